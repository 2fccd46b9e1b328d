"""Records of every shape, and every legal way to encode them."""

from __future__ import annotations

from hypothesis import strategies as st

from streamfold.model.configs import TimestampMode
from streamfold.model.positions import U64_MAX, Timestamp
from streamfold.model.records import Header, Record, fence_record, trim_record
from streamfold.records.protobuf import varint

from .models import Clock

#: Numbers around those where an encoding gets longer, and the ends of the range.
edges = sorted({max(0, min(U64_MAX, (1 << bits) + d)) for bits in range(0, 71, 7) for d in (-1, 0)})
u64 = st.one_of(st.sampled_from(edges), st.integers(0, U64_MAX))
#: Small ones too, so that clocks and clients disagree in both directions.
stamps = st.one_of(st.integers(0, 50), u64)

sizes = st.sampled_from([0, 1, 5, 117, 126, 127, 128, 129, 300])
bodies = st.one_of(st.binary(max_size=20), sizes.map(lambda size: b"\x12" * size))
headers = st.builds(Header, st.binary(min_size=1, max_size=4), st.binary(max_size=4))
data = st.builds(
    Record,
    bodies,
    st.lists(headers, max_size=3).map(tuple),
    st.none() | stamps.map(Timestamp),
)
fences = st.text(max_size=9).map(fence_record)
trims = u64.map(trim_record)
records = st.one_of(data, data, data, fences, trims)
batches = st.lists(records, min_size=1, max_size=12)
tokens = st.none() | st.text(max_size=9)

clocks = st.builds(Clock, st.sampled_from(TimestampMode), st.booleans(), now=stamps, floor=stamps)

unknown = st.sampled_from(
    [
        b"\x20\x07",  # field 4, varint
        b"\x2a\x03abc",  # field 5, bytes
        b"\x35abcd",  # field 6, fixed 32 bits
        b"\x39abcdefgh",  # field 7, fixed 64 bits
        b"\x43\x08\x01\x4b\x4c\x1a\x02hi\x44",  # field 8, a group with a group in it
        b"\xf8\xff\xff\xff\x0f\x00",  # the highest field number
        b"\x0d\x00\x00\x00\x00",  # field 1 with a type it never has
        b"\x13\x14",  # field 2 as a group
        b"\x1d\x00\x00\x00\x00",  # field 3 with a type it never has
    ]
)


@st.composite
def number(draw: st.DrawFn, value: int, longest: int = 10) -> bytes:
    """A varint, perhaps padded with zeros."""
    short = varint(value)
    padding = draw(st.sampled_from([0, 0, 0, 1, 3]))
    if not padding or len(short) + padding > longest:
        return short
    return short[:-1] + bytes([short[-1] | 0x80]) + b"\x80" * (padding - 1) + b"\x00"


@st.composite
def field(draw: st.DrawFn, tag: int, content: bytes | int) -> bytes:
    head = draw(number(tag, longest=5))
    if isinstance(content, int):
        return head + draw(number(content))
    return head + draw(number(len(content))) + content


@st.composite
def message(draw: st.DrawFn, groups: list[list[bytes]]) -> bytes:
    """Fields in any order, but those of one group in theirs, with unknown ones in between."""
    queues = [list(group) for group in groups if group]
    out = []
    while queues:
        if draw(st.integers(0, 3)) == 0:
            out.append(draw(unknown))
        queue = draw(st.sampled_from(queues))
        out.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return b"".join(out)


@st.composite
def scalar(draw: st.DrawFn, tag: int, content: bytes | int | None) -> list[bytes]:
    """A field that is there once, twice with the last to win, or not at all."""
    if content is None:
        return []
    decoy = draw(st.booleans())
    first = [draw(field(tag, 7 if isinstance(content, int) else b"decoy"))] if decoy else []
    return [*first, draw(field(tag, content))]


@st.composite
def encoded_records(draw: st.DrawFn, record: Record) -> bytes:
    inner = []
    for name, value in record.headers:
        parts = [draw(scalar(0x0A, name)), draw(scalar(0x12, value))]
        inner.append(draw(field(0x12, draw(message(parts)))))
    stamp, body = draw(scalar(0x08, record.timestamp)), draw(scalar(0x1A, record.body))
    return draw(message([stamp, inner, body]))


@st.composite
def odd_inputs(draw: st.DrawFn) -> bytes:
    """AppendInputs in encodings that no serializer emits, but that all of them must accept."""
    batch = draw(st.lists(records, min_size=1, max_size=4))
    inner = [draw(field(0x0A, draw(encoded_records(record)))) for record in batch]
    token = draw(tokens)
    match = draw(scalar(0x10, draw(st.none() | u64)))
    fencing = draw(scalar(0x1A, None if token is None else token.encode()))
    return draw(message([inner, match, fencing]))
