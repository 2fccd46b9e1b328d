"""What an append asks for, whichever face it came through."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from streamfold.model.configs import StreamConfigLayer
from streamfold.model.names import StreamRef
from streamfold.model.resources import Claim
from streamfold.records.batch import RecordBatch
from streamfold.store.log.sealing import SealingKey

#: Takes the content type of a stream and a batch for it; raises if they disagree.
ContentCheck: TypeAlias = Callable[[str, RecordBatch], None]


class AppendRequest(msgspec.Struct, frozen=True, gc=False):
    """Batches for one stream, and what must hold for them; None asks for nothing."""

    ref: StreamRef
    #: Become durable together. Without batches, only what `claim` changes does.
    batches: tuple[RecordBatch, ...]
    match_seq_num: int | None = None
    fencing_token: str | None = None
    claim: Claim | None = None
    #: Seals the records of a stream that has a cipher.
    key: SealingKey | None = None
    #: The configuration of the stream if this append creates it; None = it must exist.
    create_with: StreamConfigLayer | None = None
    #: Called if the stream has a content type.
    check: ContentCheck | None = None

    @property
    def count(self) -> int:
        """Records."""
        batches = self.batches
        return batches[0].count if len(batches) == 1 else sum(b.count for b in batches)

    @property
    def metered(self) -> int:
        """Metered bytes."""
        batches = self.batches
        return batches[0].metered if len(batches) == 1 else sum(b.metered for b in batches)

    @property
    def only_trims(self) -> bool:
        """Whether this can only free space."""
        return all(batch.only_trims for batch in self.batches)


class Unrecorded(enum.Enum):
    """Why an accepted append wrote no record."""

    #: It repeats an earlier append.
    REPEATED = "repeated"
    #: It has no batches: only the stream's terms changed.
    TERMS = "terms"
