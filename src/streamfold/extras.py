"""Optional packages: imported at first use, and named with their extra when they are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from streamfold.errors import StreamfoldError


class ExtraMissingError(StreamfoldError, ModuleNotFoundError):
    """A needed package belongs to an extra that is not installed; also a `ModuleNotFoundError`."""

    code = "extra_missing"
    name = ""  # hides that of ImportError, which is not among the fields of an instance

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is not installed: run pip install 'streamfold[{extra}]'"
        )
        self.name = package


def check_installed(package: str, extra: str) -> None:
    """Raise ExtraMissingError if `package` is missing, without the cost of importing it."""
    if find_spec(package) is None:
        raise ExtraMissingError(package, extra)


@contextmanager
def needing_extra(extra: str) -> Iterator[None]:
    """Name `extra` when an import in the block finds no package; the outermost block decides."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "streamfold"):
            raise
        missing = package
    else:
        return
    raise ExtraMissingError(missing, extra)


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`, which imports the module of a name at its first use."""

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
