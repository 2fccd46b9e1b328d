"""Checks all rows except records: basins, streams, states, forks, tokens, usage and documents."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import TypeAlias

from streamfold.errors import FormatUnsupportedError
from streamfold.store import keys
from streamfold.store.engine.engine import TableDamagedError
from streamfold.store.inspection.report import CheckReport, RowScan, Severity
from streamfold.store.inspection.stream_index import StreamIndex
from streamfold.store.rows import (
    BasinRow,
    CleanupRow,
    CounterRow,
    ForkRow,
    FormatRow,
    HeldRow,
    HeldTotalsRow,
    LeftoversRow,
    LevelRow,
    ProducerRow,
    SpaceRow,
    StateRow,
    StreamRow,
    TokenRow,
    UsageRow,
)
from streamfold.store.supervisor import FORMAT_VERSION

#: Describes what is wrong with a document, given its kind, id and content; None if it is valid.
DocumentCheck: TypeAlias = Callable[[str, str, bytes], str | None]


def _span(kind: int) -> tuple[bytes, bytes]:
    return bytes((kind,)), bytes((kind + 1,))


class CatalogCheck:
    """Reads the rows of one store and indexes its streams."""

    def __init__(
        self,
        scan: RowScan,
        streams: StreamIndex,
        report: CheckReport,
        check_document: DocumentCheck,
    ) -> None:
        self._scan = scan
        self._streams = streams
        self._report = report
        self._check_document = check_document
        #: Basins whose rows are readable.
        self._basins: set[str] = set()
        self._basins_damaged = False
        #: When files without a row were found, by kind and name.
        self.leftovers: dict[str, dict[str, int]] = {}
        self._next_id: int | None = None

    async def check_format(self) -> None:
        """Raise FormatUnsupportedError if a newer version wrote the store."""
        try:
            value = await self._scan.engine.get(keys.FORMAT)
        except TableDamagedError:
            return  # the scan of the store's own rows reports it
        if value is None:
            self._scan.bad_row("the format of the store", "it has no row")
            return
        row = self._scan.decode(value, FormatRow, "the format of the store")
        if row is None:
            return
        self._report.format = row.version
        if row.version > FORMAT_VERSION:
            raise FormatUnsupportedError(
                f"the store has format {row.version}, but this version reads up to "
                f"{FORMAT_VERSION}: use the version that wrote it, or a newer one"
            )

    async def before_records(self) -> None:
        """Read the rows that determine which records must exist."""
        await self._read_own_rows()
        await self._read_basins()
        await self._read_streams()
        await self._read_states()
        await self._read_clean_ups()
        await self._read_held()
        await self._read_forks()

    async def after_records(self) -> None:
        """Read the other rows."""
        await self._read_tokens()
        await self._read_producers()
        for kind, row_type, name in ((0x09, LevelRow, "levels"), (0x0A, UsageRow, "usage")):
            async for key, value in self._rows(kind, f"rows of {name}"):
                self._scan.decode(value, row_type, f"the row {key.hex()} of {name}")
        await self._read_documents()
        async for page in self._scan.pages(keys.OBSOLETE_START, b"\xff", "rows of other versions"):
            unknown = [key for key, _ in page if key >= keys.OBSOLETE_END]
            if unknown:
                self._scan.bad_row(f"the row {unknown[0].hex()}", "this version has no such rows")

    async def _rows(self, kind: int, name: str) -> AsyncGenerator[tuple[bytes, bytes]]:
        async for page in self._scan.pages(*_span(kind), name):
            for row in page:
                yield row

    async def _read_own_rows(self) -> None:
        types: dict[bytes, type[FormatRow | SpaceRow | HeldTotalsRow]] = {
            keys.FORMAT: FormatRow,
            keys.SPACE: SpaceRow,
            keys.HELD_TOTALS: HeldTotalsRow,
        }
        prefix = keys.leftovers("")
        async for key, value in self._rows(0x00, "rows of the store itself"):
            subject = f"the row {key[1:].decode(errors='replace')!r}"
            if key.startswith(prefix):
                noted = self._scan.decode(value, LeftoversRow, subject)
                self.leftovers[key[len(prefix) :].decode()] = noted.since if noted else {}
            elif key == keys.STREAM_IDS:
                counter = self._scan.decode(value, CounterRow, subject)
                self._next_id = counter.following if counter else None
            elif key in types:
                self._scan.decode(value, types[key], subject)

    async def _read_basins(self) -> None:
        async for key, value in self._rows(0x01, "basins"):
            name = keys.basin_name(key)
            self._report.counts.basins += 1
            self._basins.add(name)
            self._scan.decode(value, BasinRow, f"basin {name!r}")
        self._basins_damaged = bool(self._scan.damage)

    async def _read_streams(self) -> None:
        damage = len(self._scan.damage)
        async for key, value in self._rows(0x02, "streams"):
            basin, name = keys.stream_names(key)
            self._report.counts.streams += 1
            row = self._scan.decode(value, StreamRow, f"stream {name!r} in basin {basin!r}")
            if row is None:
                self._streams.names_damaged = True
                continue
            facts = self._streams.facts(row.id)
            if facts.name is not None:
                message = (
                    f"stream {name!r} in basin {basin!r} has the id {row.id}, which is that of "
                    f"{facts.label}"
                )
                self._streams.find("stream_id_repeated", facts, message)
                continue
            facts.basin, facts.name, facts.row = basin, name, row
            facts.purged = row.deleted_at is not None
            if basin not in self._basins and not self._basins_damaged:
                message = f"{facts.label} cannot be reached: there is no such basin"
                self._streams.find("basin_missing", facts, message)
            if self._next_id is not None and row.id >= self._next_id:
                message = (
                    f"{facts.label} has the id {row.id}, which will be given to another stream "
                    f"as well: the next one is {self._next_id}"
                )
                self._streams.find("stream_id_unreserved", facts, message)
        self._streams.names_damaged |= len(self._scan.damage) > damage

    async def _read_states(self) -> None:
        damage = len(self._scan.damage)
        async for key, value in self._rows(0x03, "states of streams"):
            facts = self._streams.facts(int.from_bytes(key[1:], "big"))
            facts.state = self._scan.decode(value, StateRow, f"the state of {facts.label}")
            facts.state_damaged = facts.state is None
        for error in self._scan.damage[damage:]:
            for facts in self._streams.by_id.values():
                if error.span.start <= keys.state(facts.id) < error.span.end:
                    facts.state_damaged = facts.state is None
                    if facts.state_damaged:
                        message = f"{facts.label} cannot be used: its state cannot be read"
                        self._streams.find("stream_damaged", facts, message, file=error.file)

    async def _read_clean_ups(self) -> None:
        async for key, value in self._rows(0x05, "clean-up rows"):
            facts = self._streams.facts(keys.cleanup_stream_id(key))
            row = self._scan.decode(value, CleanupRow, f"the clean-up row of {facts.label}")
            if row is None:
                continue
            facts.purged |= row.purge
            if facts.name is None:
                facts.basin, facts.name = row.basin, row.stream

    async def _read_held(self) -> None:
        async for key, value in self._rows(0x08, "bytes held"):
            facts = self._streams.facts(keys.stream_bytes_id(key))
            facts.bytes_row = self._scan.decode(value, HeldRow, f"the bytes held by {facts.label}")

    async def _read_forks(self) -> None:
        async for key, value in self._rows(0x0B, "forks"):
            source = int.from_bytes(key[1:9], "big")
            fork_id = keys.fork_id(key)
            row = self._scan.decode(value, ForkRow, f"the row of fork {fork_id}")
            self._report.counts.forks += 1
            self._streams.facts(source).forks.add(fork_id)
            fork = self._streams.by_id.get(fork_id)
            if (fork is None or fork.name is None) and not self._streams.names_damaged:
                name = f"{row.basin}/{row.stream}" if row else f"with id {fork_id}"
                facts = self._streams.facts(source)
                message = f"{facts.label} is kept for a fork {name!r} that does not exist"
                self._streams.find("fork_missing", facts, message, severity=Severity.WARNING)

    async def _read_tokens(self) -> None:
        digests: dict[bytes, str] = {}
        async for key, value in self._rows(0x06, "secrets of access tokens"):
            row = self._scan.decode(value, TokenRow, f"the access token {key[1:].hex()}")
            if row is not None:
                digests[key[1:]] = row.token.id
        damaged = bool(self._scan.damage)
        async for key, value in self._rows(0x07, "access tokens"):
            token_id = keys.token_id(key)
            self._report.counts.access_tokens += 1
            row = self._scan.decode(value, TokenRow, f"access token {token_id!r}")
            if row is not None and digests.pop(row.digest, None) != token_id and not damaged:
                self._scan.bad_row(f"access token {token_id!r}", "its secret is not accepted")
        if not self._scan.damage:
            for token_id in digests.values():
                fault = "its secret is accepted, although it is not listed and cannot be revoked"
                self._scan.bad_row(f"access token {token_id!r}", fault)

    async def _read_producers(self) -> None:
        async for key, value in self._rows(0x0C, "producers"):
            self._report.counts.producers += 1
            facts = self._streams.facts(int.from_bytes(key[1:9], "big"))
            subject = f"producer {keys.producer_id(key)!r} of {facts.label}"
            self._scan.decode(value, ProducerRow, subject)
            if facts.state is not None and not facts.state.producers:
                message = (
                    f"{facts.label} does not look for its producers, so that repeated appends "
                    f"would be stored twice"
                )
                self._streams.find("producers_unknown", facts, message)

    async def _read_documents(self) -> None:
        async for key, value in self._rows(0x0E, "documents"):
            self._report.counts.documents += 1
            kind = key[1:].partition(b"\x00")[0].decode()
            document_id = keys.document_id(key)
            if (fault := self._check_document(kind, document_id, value)) is not None:
                self._scan.bad_row(f"the document {document_id!r} of kind {kind!r}", fault)
