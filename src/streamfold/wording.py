"""Words of messages: counted things, and what the system says about a failure."""

from __future__ import annotations

import os
import re
from typing import Final

#: The number at the start of an OSError's text. asyncio puts an address after it instead of the cause.
_NUMBER: Final = re.compile(r"\[Errno (-?\d+)\] (?:Connect call failed \('([^']*)', (\d+)[^)]*\))?")
#: How asyncio begins the texts about several addresses of one name.
_SEVERAL: Final = "Multiple exceptions: "


def noun(count: int, one: str, many: str = "") -> str:
    """`one` if there is one; else `many`, or `one` with an s."""
    return one if count == 1 else many or f"{one}s"


def reason_of(error: BaseException) -> str:
    """Why something failed, in the system's words and without its number: "Connection refused".

    Callers name the file or the server.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return error.strerror
    text = _NUMBER.sub(_in_words, str(error)).removeprefix(_SEVERAL)
    return text or type(error).__name__


def _in_words(found: re.Match[str]) -> str:
    number, host, port = found.groups()
    return f"{os.strerror(int(number))} at {host} port {port}" if host else ""
