"""Every error crosses processes whole: as JSON, and pickled."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

import streamfold
from streamfold.errors import DataCorruptError, RetryLaterError, StreamfoldError
from streamfold.extras import ExtraMissingError

_SAMPLES: dict[Any, object] = {
    str: "naïve 'text'\nof two lines \udcff",
    int: 7,
    float: 1.5,
    object: "int64",
    Sequence[str]: ("a", "b"),
    str | None: None,
}


def _all_errors() -> list[type[StreamfoldError]]:
    # Not when the tests are collected: this loads every package.
    for module in pkgutil.walk_packages(streamfold.__path__, "streamfold."):
        importlib.import_module(module.name)
    return sorted(set(_ours(StreamfoldError)), key=lambda kind: (kind.__module__, kind.__name__))


def _ours(kind: type[StreamfoldError]) -> Iterator[type[StreamfoldError]]:
    if kind.__module__.startswith("streamfold."):
        yield kind
    for child in kind.__subclasses__():
        yield from _ours(child)


def _sample(kind: type[StreamfoldError]) -> StreamfoldError:
    taken = inspect.signature(kind, eval_str=True).parameters.values()
    given: dict[str, Any] = {
        it.name: _SAMPLES[it.annotation] for it in taken if it.default is it.empty
    }
    return kind(**given)


def _by_wire(error: StreamfoldError) -> StreamfoldError:
    return StreamfoldError.from_wire(error.to_wire())


def _by_pickle(error: StreamfoldError) -> StreamfoldError:
    copy: StreamfoldError = pickle.loads(pickle.dumps(error))
    return copy


@pytest.mark.parametrize("send", [_by_wire, _by_pickle])
def test_every_error_arrives_as_it_was_raised(
    send: Callable[[StreamfoldError], StreamfoldError],
) -> None:
    for kind in _all_errors():
        error = _sample(kind)
        error.destination = "s3://bucket/table/"
        error.public_message = "something else"
        arrived = send(error)
        assert type(arrived) is kind
        assert vars(arrived) == vars(error)
        assert (str(arrived), arrived.args) == (str(error), error.args)
        assert (arrived.code, arrived.definite) == (error.code, error.definite)


@pytest.mark.parametrize("send", [_by_wire, _by_pickle])
def test_an_error_without_a_class_of_its_own_keeps_its_code(
    send: Callable[[StreamfoldError], StreamfoldError],
) -> None:
    arrived = send(RetryLaterError("the wake is over", code="wake_fenced"))
    assert type(arrived) is RetryLaterError
    assert (arrived.message, arrived.code) == ("the wake is over", "wake_fenced")
    assert RetryLaterError.code == "unavailable"


def test_the_wire_is_one_line_of_ascii() -> None:
    wire = StreamfoldError("two\nlines, \u2028 and \udcff").to_wire()
    assert wire.isascii()
    assert wire.splitlines() == [wire]


def test_an_error_of_an_extension_that_is_not_loaded_keeps_its_group_code_and_fields() -> None:
    class FileBrokenError(DataCorruptError):
        code = "file_broken"
        definite = False

        def __init__(self, path: str) -> None:
            super().__init__(f"{path} is broken")
            self.path = path

    wire = FileBrokenError("a.csv").to_wire().replace("FileBrokenError", "OtherError")
    arrived = StreamfoldError.from_wire(wire)
    assert type(arrived) is DataCorruptError
    assert (arrived.code, arrived.definite) == ("file_broken", False)
    assert (arrived.message, vars(arrived)["path"]) == ("a.csv is broken", "a.csv")
    assert (DataCorruptError.code, DataCorruptError.definite) == ("data_corrupt", True)


def test_a_missing_extra_is_still_a_missing_module_elsewhere() -> None:
    arrived = _by_wire(ExtraMissingError("pyspark", "spark"))
    assert isinstance(arrived, ModuleNotFoundError)
    assert arrived.name == "pyspark"


@pytest.mark.parametrize(
    "wire", ["", "{", "[]", "7", "{}", '{"kinds": []}', '{"kinds": ["os.system"], "fields": {}}']
)
def test_json_that_is_not_an_error_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match=r"not the JSON of an error|Expecting"):
        StreamfoldError.from_wire(wire)


def test_notes_and_causes_stay_where_they_are() -> None:
    error = RetryLaterError("later")
    error.add_note("a secret of this process")
    assert "secret" not in error.to_wire()
