"""Offsets: the tokens with which Durable Streams clients name a position.

To a client, an offset is opaque and sorts as text. Here it is the seq_num of the next record, in
the layout that the protocol's reference servers use and its conformance suite hard-codes:

    0000000000000042_0000000000000000
    seq_num          byte within the record, always 0: reads start and end between records
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from streamfold.errors import InvalidError
from streamfold.model.positions import U64_MAX, SeqNum
from streamfold.wire.text import parse_unsigned

#: With more than 16 digits, tokens would no longer sort as text.
OFFSET_SEQ_NUM_MAX: Final = 10**16 - 1

#: Characters of a rejected value that an error message quotes.
_SHOWN = 60

_OFFSET = re.compile(r"([0-9]{16})_([0-9]{16})")


class Sentinel(enum.Enum):
    """A read's start that is not a position. Never sent to a client."""

    #: No offset was given. Means START where the offset is optional.
    ABSENT = None
    START = "-1"
    NOW = "now"


ReadFrom: TypeAlias = SeqNum | Sentinel

_SENTINELS: Final = {"-1": Sentinel.START, "now": Sentinel.NOW}


def format_offset(seq_num: int) -> str:
    """Return a position's token. Tokens sort as text in the order of their positions."""
    if not 0 <= seq_num <= OFFSET_SEQ_NUM_MAX:
        raise InvalidError(
            f"seq_num {seq_num} has no offset token: they go from 0 to {OFFSET_SEQ_NUM_MAX}; "
            "read this stream by seq_num"
        )
    return f"{seq_num:016d}_0000000000000000"


def parse_offset(text: str) -> SeqNum:
    """Parse a token to its position.

    Raises InvalidError for text that `format_offset` never returns.
    """
    match = _OFFSET.fullmatch(text)
    if match is None or int(match[2]):
        raise InvalidError(
            f"offset {text[:_SHOWN]!r} was not given out by this server: offsets are opaque, "
            "send one exactly as it was received"
        )
    return SeqNum(int(match[1]))


def parse_position(text: str) -> SeqNum:
    """Parse a token or a plain decimal seq_num to its position."""
    if not (text.isascii() and text.isdigit()):
        return parse_offset(text)
    number = parse_unsigned(text, U64_MAX)
    if number is None:
        raise InvalidError(f"offset {text[:_SHOWN]} is too large: at most {U64_MAX}")
    return SeqNum(number)


def parse_read_offset(
    values: Sequence[str], parse: Callable[[str], SeqNum] = parse_offset
) -> ReadFrom:
    """Return where a read starts, from all `offset` values in its query."""
    if not values:
        return Sentinel.ABSENT
    if len(values) > 1:
        raise InvalidError(f"the query has offset {len(values)} times: give it once")
    [text] = values
    if not text:
        raise InvalidError("offset is empty: give an offset, -1 for the start, or leave it out")
    return _SENTINELS.get(text) or parse(text)
