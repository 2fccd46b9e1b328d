"""Every commit ends as committed, conflict or unknown, with faults injected into every call."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest

from streamfold.archive.destinations.destination import StoredManifest
from streamfold.archive.destinations.mirrors import Mirrors
from streamfold.archive.errors import (
    ChainGapError,
    CommitConflictError,
    CommitUnknownError,
    ManifestInvalidError,
    ManifestNotFoundError,
    WriterFencedOutError,
)
from streamfold.archive.maintenance.garbage_collection import Collector
from streamfold.archive.manifest.model import Manifest, Pin, Writer
from streamfold.archive.manifest.positions import SEQ_NUM
from streamfold.archive.manifest.updates import (
    AddPin,
    ClaimTable,
    RemovePin,
    RequireHead,
    RequireWriter,
    Stamp,
    apply_updates,
)
from streamfold.archive.write.artifacts import write_part
from streamfold.archive.write.commit import (
    SWAP_ATTEMPTS,
    Committed,
    Conflict,
    ManifestCommit,
    Unknown,
)
from streamfold.archive.write.writer import GAP, ArchiveWriter
from streamfold.blob import BlobChangedError, BlobStore
from streamfold.errors import (
    BlobOutcomeUnknownError,
    BlobUnavailableError,
    InvalidError,
    StreamfoldError,
)
from streamfold.testing.blob_faults import FaultyBlobStore, Operation
from streamfold.testing.faults import Fault, FaultKind, ScriptedFaults
from tests.archive.plain_reader import read_states, read_table
from tests.archive.tables import START, Clock, at, changes, new_ids, open_writer, rows

BEFORE, AFTER, FINE = Fault(FaultKind.BEFORE), Fault(FaultKind.AFTER), Fault()


class Script(ScriptedFaults):
    """Faults that a test sets when it is ready for them."""

    def set(self, script: dict[Operation, list[Fault]]) -> None:
        self.__init__(script)  # type: ignore[misc]  # the same object, from the start


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def writer(blobs: BlobStore, script: Script) -> ArchiveWriter:
    """A writer of a table with one base, whose storage fails when the script says so."""
    opened = await open_writer(at(FaultyBlobStore(blobs, script)))
    await opened.write_base(rows({1: "a"}), "0", reason="first")
    return opened


async def write(writer: ArchiveWriter) -> Manifest:
    return await writer.write_diff(changes(("INSERT", 2, "b")), "0", "1")


DONE = [("0", {1: "a"}), ("1", {1: "a", 2: "b"})]


async def test_a_swap_whose_answer_is_lost_is_found_to_be_committed(
    blobs: BlobStore, script: Script, writer: ArchiveWriter
) -> None:
    script.set({Operation.PUT_IF_MATCH: [AFTER]})
    manifest = await write(writer)
    assert manifest.head_position == "1"
    assert await read_states(blobs) == DONE


async def test_a_swap_that_never_reached_storage_failed_and_may_be_repeated(
    blobs: BlobStore, script: Script, writer: ArchiveWriter
) -> None:
    script.set({Operation.PUT_IF_MATCH: [BEFORE]})
    with pytest.raises(BlobUnavailableError):
        await write(writer)
    assert await read_table(blobs) == {1: "a"}
    await write(writer)
    assert await read_states(blobs) == DONE


async def test_a_commit_that_cannot_be_read_back_is_unknown_and_then_settled(
    blobs: BlobStore, script: Script, writer: ArchiveWriter
) -> None:
    script.set({Operation.PUT_IF_MATCH: [AFTER], Operation.GET_WITH_ETAG: [BEFORE]})
    with pytest.raises(CommitUnknownError, match="its files stay"):
        await write(writer)
    assert await read_states(blobs) == DONE
    before = await blobs.get("manifest.json")
    await write(writer)
    assert await blobs.get("manifest.json") == before, "the repeated diff is covered already"


@pytest.mark.parametrize("operation", [Operation.PUT, Operation.PUT_IF_MATCH])
@pytest.mark.parametrize("fault", [BEFORE, AFTER])
@pytest.mark.parametrize("times", [1, 2, SWAP_ATTEMPTS])
async def test_after_any_fault_a_repetition_leads_to_the_same_archive(
    blobs: BlobStore,
    script: Script,
    writer: ArchiveWriter,
    operation: Operation,
    fault: Fault,
    times: int,
) -> None:
    script.set({operation: [fault] * times})
    for _ in range(times + 1):
        with suppress(StreamfoldError):
            await write(writer)
        assert await read_states(blobs) in (DONE, DONE[:1])
    assert await read_states(blobs) == DONE


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
@pytest.mark.parametrize("unread", [False, True])
async def test_a_first_base_survives_any_fault(
    blobs: BlobStore, script: Script, fault: Fault, unread: bool
) -> None:
    writer = await open_writer(at(FaultyBlobStore(blobs, script)))
    reads = [BEFORE] if unread and fault is AFTER else []
    script.set({Operation.PUT_IF_ABSENT: [fault], Operation.GET_WITH_ETAG: reads})
    failures = []
    for _ in range(2):
        try:
            await writer.write_base(rows({1: "a"}), "0", reason="first")
        except StreamfoldError as error:
            failures.append(error.definite)
    assert failures == ([True] if fault is BEFORE else [False] * unread)
    assert await read_table(blobs) == {1: "a"}


async def test_a_claim_whose_answer_is_lost_is_this_writers(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    # The self-test swaps 4 + 1 + 1 + 1 times before the claim.
    faults = ScriptedFaults({Operation.PUT_IF_MATCH: [FINE] * 7 + [AFTER]})
    second = await open_writer(at(FaultyBlobStore(blobs, faults)), writer_id="two", ids="two")
    assert second.manifest is not None
    assert second.manifest.fencing_token == 2
    with pytest.raises(WriterFencedOutError):
        await write(writer)
    await write(second)


async def test_pins_and_pruning_do_not_stop_the_writer(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    collector = Collector([at(blobs)], now=Clock().now, new_id=new_ids("pin"))
    await collector.pin("reader", 1, timedelta(days=1))
    manifest = await write(writer)
    assert [pin.id for pin in manifest.pins] == ["reader"]
    assert await read_states(blobs) == DONE


async def test_a_commit_that_others_have_built_upon_is_recognised(
    blobs: BlobStore, script: Script, writer: ArchiveWriter
) -> None:
    script.set({Operation.PUT_IF_MATCH: [AFTER], Operation.GET_WITH_ETAG: [BEFORE]})
    with pytest.raises(CommitUnknownError):
        await write(writer)
    collector = Collector([at(blobs)], now=Clock().now, new_id=new_ids("pin"))
    await collector.pin("reader", 1, timedelta(days=1))
    assert (await write(writer)).head_position == "1"
    assert await read_states(blobs) == DONE


class ContestedStore(FaultyBlobStore):
    """Storage in which someone else always swaps first."""

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise BlobChangedError("someone was faster")


async def current(blobs: BlobStore) -> StoredManifest:
    stored = await at(blobs).read()
    assert stored is not None
    return stored


def commit_of(*updates: AddPin | RemovePin | ClaimTable, **parts: object) -> ManifestCommit:
    requirements = parts.get("requirements", ())
    assert isinstance(requirements, tuple)
    return ManifestCommit(updates, requirements, Stamp("a-commit", START), SEQ_NUM)


async def test_endless_conflicts_end_as_a_conflict(blobs: BlobStore, writer: ArchiveWriter) -> None:
    stored = await current(blobs)
    contested = at(ContestedStore(blobs, ScriptedFaults()))
    outcome = await commit_of(RemovePin("p")).run(contested, stored)
    assert isinstance(outcome, Conflict)
    assert isinstance(outcome.cause, BlobChangedError)


class SilentStore(FaultyBlobStore):
    """Storage that takes no swap and never says so."""

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        raise BlobOutcomeUnknownError("no answer")


async def test_a_commit_that_stays_unsettled_ends_as_unknown(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    stored = await current(blobs)
    silent = at(SilentStore(blobs, ScriptedFaults()))
    outcome = await commit_of(RemovePin("p")).run(silent, stored)
    assert isinstance(outcome, Unknown)
    assert "no answer" in outcome.cause.message


class LateStore(FaultyBlobStore):
    """Storage whose network holds swaps back while `holding`, and delivers them on request."""

    def __init__(self, inner: BlobStore) -> None:
        super().__init__(inner, ScriptedFaults())
        self.holding = False
        self.deliver_before_next = False
        self._held: list[tuple[str, bytes, str]] = []

    async def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        if self.holding:
            self._held.append((key, data, etag))
            raise BlobOutcomeUnknownError("timed out")
        if self.deliver_before_next:
            self.deliver_before_next = False
            await self.deliver()
        return await super().put_if_match(key, data, etag)

    async def deliver(self) -> None:
        """Let the requests arrive, long after their sender gave up: one of them wins."""
        held, self._held = self._held, []
        for key, data, etag in held:
            with suppress(BlobChangedError):
                await super().put_if_match(key, data, etag)


async def open_late(blobs: BlobStore) -> tuple[ArchiveWriter, LateStore]:
    """Return a writer whose diff to position 1 has an unknown outcome."""
    store = LateStore(blobs)
    writer = await open_writer(at(store))
    await writer.write_base(rows({1: "a"}), "0", reason="first")
    store.holding = True
    with pytest.raises(CommitUnknownError):
        await write(writer)
    store.holding = False
    assert await read_states(blobs) == DONE[:1]
    return writer, store


async def test_a_swap_that_arrives_late_is_found_by_the_next_call(blobs: BlobStore) -> None:
    writer, store = await open_late(blobs)
    await store.deliver()
    await write(writer)
    assert await read_states(blobs) == DONE


async def test_a_swap_that_arrives_after_it_was_repeated_has_no_effect(blobs: BlobStore) -> None:
    writer, store = await open_late(blobs)
    await write(writer)
    await store.deliver()
    assert await read_states(blobs) == DONE


async def test_a_swap_that_arrives_in_the_middle_of_its_repetition_counts_once(
    blobs: BlobStore,
) -> None:
    writer, store = await open_late(blobs)
    store.deliver_before_next = True
    with pytest.raises(ChainGapError, match="continue from there"):
        await write(writer)
    await write(writer)
    assert await read_states(blobs) == DONE


async def test_a_late_swap_of_a_writer_that_was_replaced_has_no_effect(blobs: BlobStore) -> None:
    _, store = await open_late(blobs)
    successor = await open_writer(at(blobs), ids="two", writer_id="two")
    await store.deliver()
    assert await read_states(blobs) == DONE[:1]
    await successor.write_diff(changes(("INSERT", 3, "c")), "0", "1")
    assert await read_table(blobs) == {1: "a", 3: "c"}


async def test_requirements_are_checked_against_what_is_there(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    stored = await current(blobs)
    stranger = Writer(id="x", fencing_token=1, claim_id="x")
    for requirement, error in (
        (RequireHead(1, "5"), ChainGapError),
        (RequireHead(2, "0"), ChainGapError),
        (RequireWriter(stranger), WriterFencedOutError),
    ):
        commit = commit_of(RemovePin("p"), requirements=(requirement,))
        outcome = await commit.run(at(blobs), stored)
        assert isinstance(outcome, Conflict)
        assert isinstance(outcome.cause, error)
    assert await current(blobs) == stored


async def test_a_commit_begins_at_what_is_there_not_at_what_was_read(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    stored = await current(blobs)
    await write(writer)
    outcome = await commit_of(ClaimTable("other", "claim", "t")).run(at(blobs), stored)
    assert isinstance(outcome, Committed)
    assert outcome.stored.manifest.head_position == "1"
    assert outcome.stored.manifest.fencing_token == 2


async def test_an_update_that_breaks_a_rule_changes_nothing(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    stored = await current(blobs)
    moment = "2026-06-03T12:00:00Z"
    pin = Pin(id="p", epoch=9, created_at=moment, expires_at=moment)
    with pytest.raises(InvalidError, match=r"epoch 9 .* does not exist"):
        await commit_of(AddPin(pin)).run(at(blobs), stored)
    broken = Pin(id="p", epoch=1, created_at="today", expires_at=moment)
    with pytest.raises(ManifestInvalidError, match="RFC 3339"):
        await commit_of(AddPin(broken)).run(at(blobs), stored)
    assert await current(blobs) == stored


async def test_only_a_writer_may_begin_an_archive(blobs: BlobStore) -> None:
    with pytest.raises(ManifestNotFoundError, match="write a base first"):
        await commit_of(RemovePin("p")).run(at(blobs), None)


async def test_a_manifest_that_vanished_is_not_taken_for_a_new_table(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    await blobs.delete("manifest.json")
    for _ in range(2):
        with pytest.raises(CommitConflictError, match="is gone"):
            await write(writer)
    with pytest.raises(CommitConflictError, match="is gone"):
        await writer.write_base(rows({}), "5", reason=GAP)
    assert await read_states(blobs) == []


async def test_parts_that_were_planned_before_another_commit_are_refused(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    mirrors = Mirrors([at(blobs)], SEQ_NUM)
    base, diff = writer.plan_base("0"), writer.plan_diff("0", "1")
    late = await write_part(diff, changes(("INSERT", 9, "late")), mirrors)
    stale = await write_part(base, rows({9: "late"}), mirrors)
    await writer.rebase(rows({2: "b"}), changes(("DELETE", 1, None)), "1", reason="forced")
    with pytest.raises(ChainGapError):
        await writer.commit_diff(diff, [late])
    with pytest.raises(ChainGapError):
        await writer.commit_base(base, [stale], reason="forced")
    assert await read_table(blobs) == {2: "b"}


async def test_each_commit_names_the_one_before(blobs: BlobStore, writer: ArchiveWriter) -> None:
    before = (await current(blobs)).manifest
    after = await write(writer)
    assert after.previous_commit_id == before.commit_id
    assert after.commit_number == before.commit_number + 1
    assert after.artifacts[-1].commit_id == after.commit_id


async def test_applying_updates_leaves_the_old_manifest_as_it_was(
    blobs: BlobStore, writer: ArchiveWriter
) -> None:
    before = (await current(blobs)).manifest
    copy = (await current(blobs)).manifest
    apply_updates(before, [ClaimTable("other", "claim", "t")], Stamp("c", START), SEQ_NUM)
    assert before == copy
