"""Wording of messages: counted nouns and the system's failure reasons."""

from __future__ import annotations

import os
import re
from typing import Final

#: The number at the start of an OSError's text. After it, asyncio gives an address, not the cause.
_NUMBER: Final = re.compile(r"\[Errno (-?\d+)\] (?:Connect call failed \('([^']*)', (\d+)[^)]*\))?")
#: The start of asyncio's messages about several addresses for one name.
_SEVERAL: Final = "Multiple exceptions: "


def noun(count: int, one: str, many: str = "") -> str:
    """Return `one` for a count of 1, else `many`, which defaults to `one` with an s."""
    return one if count == 1 else many or f"{one}s"


def reason_of(error: BaseException) -> str:
    """Return the system's reason for a failure without its number, such as "Connection refused".

    Callers name the file or server.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return error.strerror
    text = _NUMBER.sub(_in_words, str(error)).removeprefix(_SEVERAL)
    return text or type(error).__name__


def _in_words(match: re.Match[str]) -> str:
    number, host, port = match.groups()
    return f"{os.strerror(int(number))} at {host} port {port}" if host else ""
