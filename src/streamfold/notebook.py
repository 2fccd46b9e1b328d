"""Escaped HTML that shows streams, plans and archives in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

#: Maximum rows of a table, which shows only the last ones, because notebooks are saved with output.
ROWS_MAX = 50
#: Maximum characters of a body that are shown.
_BODY_MAX = 100


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a title. None gives an empty cell."""
    shown = list(rows)
    left_out = len(shown) - ROWS_MAX
    if left_out > 0:
        title, shown = f"{title} ({left_out} earlier rows are left out)", shown[-ROWS_MAX:]
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in shown)
    caption = f'<caption style="text-align: left"><b>{escape(title)}</b></caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def body_text(body: bytes) -> str:
    """Return the beginning of a body as text, with invalid UTF-8 escaped."""
    text = body[: 4 * _BODY_MAX].decode(errors="backslashreplace")
    return text if len(text) <= _BODY_MAX else f"{text[:_BODY_MAX]}…"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f'<td style="text-align: left">{escape(text)}</td>'
