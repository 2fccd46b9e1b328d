"""Tool results: small enough for a conversation, and lossless where documented."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from s2_sdk import SequencedRecord

Shape = dict[str, Any]

#: Bytes shown of each body, unless the call sets another limit, and of each record's headers.
BODY_BYTES: Final = 4096
#: Bytes of all bodies and headers in one result. More would fill the conversation.
RESULT_BYTES: Final = 64 << 10


def time_of(milliseconds: int) -> str:
    """Return a timestamp as RFC 3339, or as its number if it is outside the calendar."""
    try:
        moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def records_shape(records: Sequence[SequencedRecord], body_bytes: int) -> tuple[list[Shape], int]:
    """Return the first records, up to `RESULT_BYTES` but at least one, and their count."""
    shapes: list[Shape] = []
    used = 0
    for record in records:
        shape = _record(record, body_bytes)
        used += min(len(record.body), body_bytes)
        used += sum(len(name) + len(value) for name, value in shape.get("headers", ()))
        if shapes and used > RESULT_BYTES:
            break
        shapes.append(shape)
    return shapes, len(shapes)


def _record(record: SequencedRecord, body_bytes: int) -> Shape:
    shape: Shape = {"seq_num": record.seq_num, "time": time_of(record.timestamp)}
    if record.headers and not record.headers[0][0]:
        shape["command"] = _text(record.headers[0][1])
    elif record.headers:
        shape.update(_headers(record.headers))
    shape.update(_body(record.body, body_bytes))
    return shape


def _headers(headers: Sequence[tuple[bytes, bytes]]) -> Shape:
    """Return the first headers, up to `BODY_BYTES`, with the count of omitted ones."""
    shown: list[list[str]] = []
    left = BODY_BYTES
    for name, value in headers:
        left -= len(name) + len(value)
        if left < 0:
            return {"headers": shown, "headers_not_shown": len(headers) - len(shown)}
        shown.append([_text(name), _text(value)])
    return {"headers": shown}


def _body(body: bytes, limit: int) -> Shape:
    """Return the body as text, or in base64 if it is not UTF-8, with the count of omitted bytes."""
    shown = body[:limit]
    rest: Shape = {"bytes_not_shown": len(body) - limit} if len(body) > limit else {}
    try:
        body.decode()
    except UnicodeDecodeError:
        return {"body_base64": b64encode(shown).decode(), **rest}
    # The limit may fall inside a character, which is then left out.
    return {"body": shown.decode(errors="ignore"), **rest}


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
