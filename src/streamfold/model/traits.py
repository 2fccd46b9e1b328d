"""What a stream is beyond a sequence of records: type of content, lifetime, origin."""

from __future__ import annotations

import msgspec

from streamfold.model.positions import SeqNum

#: The content type of a stream that was created without one.
OCTETS = "application/octet-stream"


class Origin(msgspec.Struct, frozen=True):
    """Where a fork starts in its source, as requested and as found."""

    stream: str
    #: The position in the source; without `sub_offset`, where the fork's own records begin.
    seq_num: SeqNum
    #: Bytes or messages of the append after that position.
    sub_offset: int = 0


class StreamTraits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fixed when the stream is created."""

    #: As its creator wrote it.
    content_type: str = OCTETS
    #: Seconds after the last use at which the stream expires.
    ttl: int | None = None
    #: When the stream expires, ms since the Unix epoch.
    expires_at: int | None = None
    #: Whether a snapshot trims the records before it; the stream's configuration may override this.
    trim_on_snapshot: bool = False
    origin: Origin | None = None


class Producer(msgspec.Struct, frozen=True):
    """The producer, epoch and number of an append, by which repetitions are recognized."""

    id: str
    epoch: int
    seq: int


class Claim(msgspec.Struct, frozen=True):
    """The conditions and effects of an append."""

    #: In lower case and without parameters; None if there is no content.
    content_type: str | None = None
    producer: Producer | None = None
    #: Greater than that of all appends before.
    stream_seq: str | None = None
    #: Whether to close the stream.
    close: bool = False


def media_type(content_type: str) -> str:
    """`content_type` in lower case and without parameters: what must agree between appends."""
    return content_type.partition(";")[0].strip().lower()
