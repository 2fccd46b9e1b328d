"""Messages name causes in words, and count in English."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path

import pytest

from streamfold.wording import noun, reason_of
from tests.ports import free_port


def test_one_is_not_many() -> None:
    assert [noun(count, "row") for count in (0, 1, 2)] == ["rows", "row", "rows"]
    assert [noun(count, "base is", "bases are") for count in (1, 2)] == ["base is", "bases are"]


async def test_a_refused_connection_is_named_with_its_address() -> None:
    port = free_port()
    with pytest.raises(OSError, match="Errno") as refused:
        await asyncio.open_connection("127.0.0.1", port)
    assert reason_of(refused.value) == f"Connection refused at 127.0.0.1 port {port}"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "Connection refused"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (
            OSError(
                "Multiple exceptions: [Errno 111] Connect call failed ('::1', 9, 0, 0), "
                "[Errno 111] Connect call failed ('127.0.0.1', 9)"
            ),
            "Connection refused at ::1 port 9, Connection refused at 127.0.0.1 port 9",
        ),
        (RuntimeError("[Errno 104] Connection reset by peer"), "Connection reset by peer"),
        (TimeoutError("timed out"), "timed out"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("no [brackets] here"), "no [brackets] here"),
    ],
)
def test_the_cause_is_in_words(error: BaseException, words: str) -> None:
    assert reason_of(error) == words


def test_a_file_is_named_by_the_caller_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "missing").read_text()
    assert reason_of(missing.value) == "No such file or directory"
