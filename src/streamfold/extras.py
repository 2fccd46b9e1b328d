"""Optional packages, imported on first use. Errors name the missing extra."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from streamfold.errors import StreamfoldError


class ExtraMissingError(StreamfoldError, ModuleNotFoundError):
    """Raised if a package of an extra is not installed. Also a `ModuleNotFoundError`."""

    code = "extra_missing"
    name = ""  # hides ImportError's, which is not an instance field

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is not installed: run pip install 'streamfold[{extra}]'"
        )
        self.name = package


def check_installed(package: str, extra: str) -> None:
    """Raise ExtraMissingError if `package` is missing, without importing it."""
    if find_spec(package) is None:
        raise ExtraMissingError(package, extra)


@contextmanager
def needing_extra(extra: str) -> Iterator[None]:
    """Name `extra` if an import in the block fails. The outermost block decides."""
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


def lazy_exports(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return the `__getattr__` of `package`, which imports names on first use.

    `names` lists the names that each module exports.
    """
    modules = {name: module for module, exported in names.items() for name in exported}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return load
