"""Times in manifests: RFC 3339, UTC."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from streamfold.errors import InvalidError

#: Digits after the seconds vary between writers; Python keeps six.
_PATTERN = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")


def format_time(moment: datetime) -> str:
    """Return the text for the manifest; a time without a zone is refused, not guessed."""
    if moment.tzinfo is None:
        raise InvalidError(f"time {moment.isoformat()} has no zone: give it in UTC")
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time(text: str) -> datetime:
    """Return the moment, to the microsecond."""
    match = _PATTERN.fullmatch(text)
    try:
        if match:
            zone = "+00:00" if match[3] == "Z" else match[3]
            return datetime.fromisoformat(match[1] + (match[2] or "")[:7] + zone).astimezone(UTC)
    except ValueError:
        pass  # no such day or hour: refused below, like any other text
    raise InvalidError(f"time {text!r} is not RFC 3339 with a zone, as 2026-06-03T12:00:00.5Z")
