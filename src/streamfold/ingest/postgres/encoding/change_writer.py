"""Messages of pgoutput as encoded appends: the same records as `ChangeRecords` yields; needs numba.

A kernel writes them without an object for each message. Between two calls `ChangeRecords` has the
state, so that either of them can take the next message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from streamfold.follow.clients.client import EncodedBatch
from streamfold.ingest.postgres.changes import (
    ChangeRecords,
    FollowedTable,
    HeldChange,
    OpenStream,
)
from streamfold.ingest.postgres.encoding import change_kernel as kernel
from streamfold.ingest.postgres.encoding import row_kernel as rows
from streamfold.ingest.postgres.encoding.copy_kernel import KINDS, TEXT
from streamfold.ingest.postgres.encoding.rows import RowEncoder
from streamfold.ingest.postgres.encoding.runs import Run, compile_reading
from streamfold.ingest.postgres.pgoutput import (
    LSN_ZERO,
    Begin,
    Commit,
    Delete,
    Insert,
    Lsn,
    Update,
    decode_message,
)
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.record_kernel import Offsets

#: Bytes for the records of one call, and for one body: more than the largest record.
_ENCODED_BYTES: Final = 4 << 20
_BODY_BYTES: Final = 4 << 20
#: Bytes of the longest text of an LSN.
_LSN_BYTES: Final = len("FFFFFFFF/FFFFFFFF")


@dataclass(slots=True)
class Written:
    """What became of some messages of a run."""

    #: The next message; unless none is left, `ChangeRecords` must take it.
    next: int
    #: With the table; those of one stream are in order.
    batches: list[tuple[str, EncodedBatch]] = field(default_factory=list)
    #: Records by table.
    changes: dict[str, int] = field(default_factory=dict)
    #: The last commit with a record.
    commit: Commit | None = None
    #: LSN of the last transaction that began before any of the records.
    quiet: Lsn = LSN_ZERO


class _Known(NamedTuple):
    """Tables and streams by the numbers that the kernel has for them."""

    tables: list[FollowedTable]
    streams: list[OpenStream]
    layout: rows.Layout
    #: By stream, one of its tables.
    names: dict[int, str]


class ChangeWriter:
    """Writes records for the tables of `changes`, and keeps its state."""

    def __init__(self, changes: ChangeRecords) -> None:
        self._changes = changes
        self._described = -1
        self._known = _known(changes)
        self._encoded = np.empty(_ENCODED_BYTES, np.uint8)
        self._gathered = np.empty(_ENCODED_BYTES, np.uint8)
        self._body = np.empty(_BODY_BYTES, np.uint8)

    def write(self, run: Run, at: int) -> Written:
        """Write records for messages from `at` on, until one that the kernel does not understand.

        Raises what `ChangeRecords` raises of a change that is held, and that cannot be encoded.
        """
        if self._described != self._changes.described:
            self._known = _known(self._changes)
            self._described = self._changes.described
        state, output = self._state(), self._output(run, at)
        kernel.encode_messages(run.raw, run.bounds, self._known.layout, state, output)
        following, done, _, touched, begun, ended, recorded, quiet = output.written.tolist()
        self._keep(run, state, touched)
        if ended >= 0:
            self._changes.end(_commit(run[ended]))
        if begun >= 0:
            self._changes.begin = _begin(run[begun])
        counts = zip(self._known.tables, output.counts.tolist(), strict=True)
        return Written(
            following,
            list(self._batches(output.records[:done])) if done else [],
            {table.name: count for table, count in counts if count},
            _commit(run[recorded]) if recorded >= 0 else None,
            _begin(run[quiet]).commit_lsn if quiet >= 0 else LSN_ZERO,
        )

    def _state(self) -> kernel.OpenTransaction:
        changes, known = self._changes, self._known
        streams = np.zeros((len(known.streams), kernel.STREAM_FIELDS), np.int64)
        touched = np.zeros(len(known.streams), np.int64)
        bodies, end = [], 0
        for order, stream in enumerate(changes.touched):
            touched[order] = number = known.streams.index(stream)
            streams[number, kernel.S_INDEX] = stream.index
            if (held := stream.held) is not None:
                start, end = end, end + len(held.body)
                bodies.append(held.body)
                table = known.tables.index(held.table)
                streams[number, kernel.S_KIND :] = (kernel.BODY, start, end, table, held.index)
        commit = np.zeros(kernel.COMMIT_FIELDS, np.uint64)
        if (begin := changes.begin) is not None:
            commit[:] = (1, begin.commit_lsn, begin.milliseconds)
        # Not read-only, like all arrays that bodies are in: numba would compile for either.
        joined = np.frombuffer(bytearray().join([*bodies, rows.PADDING]), np.uint8)
        return kernel.OpenTransaction(streams, touched, commit, joined)

    def _output(self, run: Run, at: int) -> kernel.Output:
        layout, streams = self._known.layout, len(self._known.streams)
        places = (2, max(1, len(layout.kinds)))
        return kernel.Output(
            np.empty((len(run) - at + streams, kernel.RECORD_FIELDS), np.int64),
            self._encoded,
            np.zeros(len(self._known.tables), np.int64),
            np.array([at, 0, 0, len(self._changes.touched), -1, -1, -1, -1], np.int64),
            np.empty(_LSN_BYTES, np.uint8),
            rows.Scratch(self._body, np.zeros(places, np.int64), np.zeros(places, np.int64)),
        )

    def _keep(self, run: Run, state: kernel.OpenTransaction, touched: int) -> None:
        """Give `ChangeRecords` what the open transaction has for each stream."""
        changes, known = self._changes, self._known
        left = [known.streams[number] for number in state.touched[:touched].tolist()]
        for stream in changes.touched:
            if stream not in left:
                stream.index, stream.held = 0, None
        changes.touched = left
        for number, stream in zip(state.touched[:touched].tolist(), left, strict=True):
            stream.index, kind, start, _, table, held = state.streams[number].tolist()
            if kind == kernel.NOTHING:
                stream.held = None
            elif kind == kernel.MESSAGE:
                stream.held = self._hold(known.tables[table], run[start], held)

    def _hold(self, table: FollowedTable, message: bytes, index: int) -> HeldChange:
        event = decode_message(message)
        assert isinstance(event, Insert | Update | Delete)  # noqa: S101 - the kernel holds no other
        assert table.encoder is not None  # noqa: S101 - the layout has no other
        return self._changes.hold(table, table.encoder, event, index)

    def _batches(self, records: Offsets) -> Iterator[tuple[str, EncodedBatch]]:
        for stream in np.unique(records[:, kernel.R_STREAM]).tolist():
            at = 0
            while True:
                at, count, metered, size = kernel.gather(
                    self._encoded, records, at, stream, BATCH_RECORDS_MAX, BATCH_BYTES_MAX,
                    self._gathered,
                )  # fmt: skip
                if not count:
                    break
                encoded = self._gathered[:size].tobytes()
                yield self._known.names[stream], EncodedBatch(count, metered, encoded)


def compiled() -> None:
    """Have the kernel compiled, or loaded from the disk cache."""
    changes = ChangeRecords(int, lambda *_: None, lambda *_: None)
    writer, run = ChangeWriter(changes), Run.of([b"?"])
    if writer.write(run, 0).next:
        raise RuntimeError("the kernel takes a message that it does not understand")
    compile_reading()
    records, room = np.zeros((1, kernel.RECORD_FIELDS), np.int64), np.empty(1, np.uint8)
    kernel.gather(room, records, 0, 0, 1, 1, room)


def _begin(message: bytes) -> Begin:
    event = decode_message(message)
    assert isinstance(event, Begin)  # noqa: S101 - the kernel looked
    return event


def _commit(message: bytes) -> Commit:
    event = decode_message(message)
    assert isinstance(event, Commit)  # noqa: S101 - the kernel looked
    return event


def _known(changes: ChangeRecords) -> _Known:
    # All of them: one that was renamed has no relation, but may have a held change. Those without an
    # encoder come last, because the layout does not have them.
    tables = sorted(changes.tables.values(), key=lambda table: table.encoder is None)
    streams = list(dict.fromkeys([changes.shared, *(table.stream for table in tables)]))
    relations = []
    for relation, table in sorted(changes.relations.items()):
        if table is None:
            number = rows.NOT_FOLLOWED
        else:
            number = tables.index(table) if table.encoder is not None else rows.NOT_DESCRIBED
        relations.append((relation, number))
    names = {streams.index(table.stream): table.name for table in tables}
    return _Known(tables, streams, _layout(relations, tables, streams), names)


def _layout(
    relations: Sequence[tuple[int, int]],
    tables: Sequence[FollowedTable],
    streams: Sequence[OpenStream],
) -> rows.Layout:
    kinds: list[int] = []
    keys: list[int] = []
    texts: list[bytes] = []
    starts: list[tuple[int, ...]] = []
    for table in tables:
        encoder, index = table.encoder, table.position[1]
        if encoder is None:
            break
        starts.append((streams.index(table.stream), len(kinds), len(keys), len(texts), index))
        kinds += [KINDS.get(type_oid, TEXT) for _, type_oid in encoder.columns]
        keys += encoder.key
        texts += _openings(encoder)
        texts += [name for name, _ in encoder.columns]
    starts.append((0, len(kinds), len(keys), len(texts), 0))
    return rows.Layout(
        np.array(relations, np.int64).reshape(-1, 2),
        np.array(starts, np.int64),
        np.array([table.position[0] for table in tables], np.uint64),
        np.array(kinds, np.uint8),
        np.array(keys, np.int64),
        np.frombuffer(b"".join([*texts, rows.PADDING]), np.uint8),
        np.array([0, *accumulate(map(len, texts))], np.int64),
    )


def _openings(encoder: RowEncoder) -> list[bytes]:
    kinds = ((b"c", b"after"), (b"u", b"key"), (b"d", b"key"))
    return [b'%s,"%s":{' % (encoder.opening(op), image) for op, image in kinds]
