"""Messages of pgoutput that were received together, for the kernels; needs numba."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from streamfold.ingest.postgres.encoding.row_kernel import PADDING, _number
from streamfold.ingest.postgres.libpq_kernel import Puller, compile_pull
from streamfold.ingest.postgres.pgoutput import Lsn
from streamfold.ingest.postgres.replication import (
    DATA_HEAD,
    KEEPALIVE_BYTES,
    Received,
    unexpected,
)
from streamfold.records.compiling import kernel
from streamfold.records.record_kernel import U8, Bytes, Offsets, Values

_DATA, _KEEPALIVE = U8(ord("w")), U8(ord("k"))
#: Entries of what `split` has seen: the end of the log, whether the server wants an answer.
_WAL_END, _ASKED, _SEEN_FIELDS = range(3)


class Run:
    """Messages in one array; `bounds` has the offset of each and of its end."""

    def __init__(self, raw: Bytes, bounds: Offsets) -> None:
        self.raw, self.bounds = raw, bounds

    @classmethod
    def of(cls, messages: Sequence[bytes]) -> Run:
        raw = np.frombuffer(bytearray().join([*messages, PADDING]), np.uint8)
        bounds = list(pairwise(accumulate(map(len, messages), initial=0)))
        return cls(raw, np.array(bounds, np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, number: int) -> bytes:
        start, end = self.bounds[number].tolist()
        return self.raw[start:end].tobytes()


@kernel
def split(raw: Bytes, ends: Offsets, bounds: Offsets, seen: Values) -> tuple[int, int]:
    """Find the messages of pgoutput within those of the replication protocol.

    Returns how many there are, and the number of the first message that is neither, or -1.
    """
    count, at = 0, 0
    for number in range(len(ends)):
        end = ends[number]
        kind = raw[at]
        if kind == _DATA and end - at >= DATA_HEAD:
            seen[_WAL_END] = _number(raw, at + 9, 8)
            bounds[count, 0], bounds[count, 1] = at + DATA_HEAD, end
            count += 1
        elif kind == _KEEPALIVE and end - at == KEEPALIVE_BYTES:
            seen[_WAL_END] = _number(raw, at + 1, 8)
            if raw[end - 1]:
                seen[_ASKED] = 1
        else:
            return count, number
        at = end
    return count, -1


class RunReader(Puller):
    """Gathers messages of one connection into runs; each is valid until more is gathered."""

    def take_run(self) -> Received:
        """Return what was gathered, as `split_messages` does."""
        return split_run(*self.take())


def split_run(raw: Bytes, ends: Offsets) -> Received:
    """Do as `split_messages`, without an object for each message; zeros must follow the last."""
    bounds, seen = np.empty((len(ends), 2), np.int64), np.zeros(_SEEN_FIELDS, np.uint64)
    count, bad = split(raw, ends, bounds, seen)
    if bad >= 0:
        start, end = int(ends[bad - 1]) if bad else 0, int(ends[bad])
        raise unexpected(raw[start:end][:1].tobytes())
    wal_end, asked = seen.tolist()
    run = Run(raw, bounds[:count])
    return Received(run, Lsn(wal_end), bool(asked), run)


def compile_reading() -> None:
    """Have the kernels of this module and of libpq compiled, or loaded from the disk cache."""
    compile_pull()
    run = Run.of([])
    if len(split_run(run.raw, np.zeros(0, np.int64)).messages):
        raise RuntimeError("the kernel finds a message where there is none")
