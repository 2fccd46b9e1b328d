"""HTML by which notebooks show streams, plans and archives; every text in it is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: Rows of a table at most, the last ones: a notebook keeps what it shows.
ROWS_MAX = 50
#: Characters of a body that are shown.
_BODY_MAX = 100


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a title; None is an empty cell."""
    kept = list(rows)
    left_out = len(kept) - ROWS_MAX
    if left_out > 0:
        title, kept = f"{title} ({left_out} earlier rows are left out)", kept[-ROWS_MAX:]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in kept)
    caption = f'<caption style="text-align: left"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def body_text(body: bytes) -> str:
    """The beginning of a body as text; bytes that are not UTF-8 are shown as escapes."""
    text = body[: 4 * _BODY_MAX].decode(errors="backslashreplace")
    return text if len(text) <= _BODY_MAX else f"{text[:_BODY_MAX]}…"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f'<td style="text-align: left">{escape(text)}</td>'
