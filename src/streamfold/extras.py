"""What to install when a package is missing, in one sentence: for commands and imports alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from streamfold.errors import StreamfoldError


class ExtraMissingError(StreamfoldError, ModuleNotFoundError):
    """A package of an extra that was not installed is needed; also a `ModuleNotFoundError`."""

    code = "extra_missing"

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"the package {package!r} is not installed: run pip install 'streamfold[{extra}]'"
        )
        self.name = package


def check_installed(package: str, extra: str) -> None:
    """Name `extra` if `package` is missing, without the cost of importing it."""
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
