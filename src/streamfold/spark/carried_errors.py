"""Carries our errors out of Spark's Python processes, whole.

Spark passes on an exception of these processes as the text of its traceback (upstream defect 12). So
the methods that Spark calls there add a note to our errors, a line of JSON, which a traceback prints
after the message; the driver finds that line and decodes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from streamfold.errors import StreamfoldError

_MARK = "streamfold-error: "
_NOTE = re.compile(rf"^{_MARK}(\{{.*\}})\s*$", re.MULTILINE)


class CarriesErrors:
    """Base of what Spark calls in its Python processes: public methods carry our errors."""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, _carrying(member))


def error_behind(raised: BaseException) -> StreamfoldError | None:
    """Return our error behind what Spark raised, with its code and fields; None if it is not ours."""
    if isinstance(raised, StreamfoldError):
        return raised
    for note in reversed(_NOTE.findall(str(raised))):
        try:
            return StreamfoldError.from_wire(note)
        except ValueError:
            continue  # text of another origin that looks like a note
    return None


def _carrying(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        with _noted():
            return method(*args, **given)

    @wraps(method)
    def iterate(*args: Any, **given: Any) -> Iterator[Any]:
        with _noted():
            yield from method(*args, **given)

    return iterate if inspect.isgeneratorfunction(method) else call


@contextmanager
def _noted() -> Iterator[None]:
    try:
        yield
    except StreamfoldError as error:
        if not any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
            error.add_note(_MARK + error.to_wire())
        raise
