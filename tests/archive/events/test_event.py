from __future__ import annotations

import msgspec
import pytest

from streamfold.archive.destinations.destination import Destination
from streamfold.archive.events import Event, decode_event, encode_event
from streamfold.archive.events.cursor import find_due, position_of
from streamfold.archive.events.event import describe
from streamfold.archive.manifest.model import Artifact, FormatFiles, Manifest, Part
from streamfold.errors import MalformedError
from tests.archive.events.feeds import Table

URI = "memory:table/manifest.json"


def artifact(kind: str, epoch: int, start: str | None, end: str) -> Artifact:
    part = Part(path=f"epoch={epoch}/{kind}-{start}-{end}.jsonl", uri="", size_bytes=0)
    return Artifact(
        kind="snapshot" if kind == "base" else "diff",
        epoch=epoch,
        from_position=start,
        to_position=end,
        created_at="2026-06-03T12:00:00Z",
        formats={"jsonl": FormatFiles(uri=part.path, size_bytes=0, parts=(part,))},
        commit_id=f"commit-{epoch}-{end}",
    )


#: Two epochs, linked by the diff that closes the first.
FIRST = (
    artifact("base", 1, None, "0"),
    artifact("diff", 1, "0", "5"),
    artifact("diff", 1, "5", "9"),
)
SECOND = (artifact("base", 2, None, "9"), artifact("diff", 2, "9", "12"))
#: After changes that are lost.
THIRD = (artifact("base", 3, None, "20"), artifact("diff", 3, "20", "21"))


def manifest_of(*artifacts: Artifact, archive_id: str = "a") -> Manifest:
    last = artifacts[-1]
    return Manifest(
        table="public.users",
        epoch=last.epoch,
        updated_at="2026-06-03T12:00:00Z",
        head_position=last.to_position,
        artifacts=artifacts,
        archive_id=archive_id,
    )


def due(manifest: Manifest, reached: Artifact | None, archive_id: str = "a") -> list[object]:
    """Return what is to be announced, with a mark for gaps."""
    before = manifest_of(*FIRST, archive_id=archive_id)
    position = None if reached is None else position_of(before, reached)
    found = find_due(manifest, position)
    return [("gap", item.artifact) if item.gap else item.artifact for item in found]


async def test_an_event_names_the_artifact_and_the_manifest_by_full_uris() -> None:
    table = await Table.create(Destination.open("memory:folder/table"))
    await table.commit_diff()
    event = table.committed[-1]
    assert table.writer.manifest is not None
    last = table.writer.manifest.artifacts[-1]
    assert msgspec.to_builtins(event) == {
        "event_id": event.event_id,
        "table": "public.users",
        "kind": "diff",
        "epoch": 1,
        "from_position": "0",
        "to_position": "1",
        "head_position": "1",
        "manifest_uri": "memory:folder/table/manifest.json",
        "formats": {"jsonl": f"memory:folder/table/{next(last.parts()).path}"},
        "created_at": last.created_at,
        "gap": False,
    }
    assert len(event.event_id) == 32


async def test_an_event_is_the_same_bytes_however_late_it_is_derived() -> None:
    table = await Table.create(Destination.open("memory:table"))
    await table.commit_diff()
    await table.rebase()
    await table.commit_diff()
    manifest = table.writer.manifest
    assert manifest is not None
    late = [table.event(manifest, index) for index in range(len(manifest.artifacts))]
    assert list(map(encode_event, late)) == list(map(encode_event, table.committed))
    assert len({event.event_id for event in late}) == 5


def test_ids_stay_the_same_in_later_versions() -> None:
    # Consumers drop repetitions by it, also of what an earlier version sent.
    plain = describe(manifest_of(*FIRST), FIRST[1], URI)
    gap = describe(manifest_of(*FIRST), FIRST[0], URI, gap=True)
    assert (plain.event_id, gap.event_id) == (
        "c12cc6f920ea1445f465257a7445aab3",
        "0953f7de059fa89d0e5499e1d9169a78",
    )


def test_the_head_is_where_the_commit_of_the_artifact_ended() -> None:
    closing, base = (
        msgspec.structs.replace(item, commit_id="one") for item in (FIRST[2], SECOND[0])
    )
    manifest = manifest_of(*FIRST[:2], closing, base, SECOND[1])
    assert describe(manifest, closing, URI).head_position == "9"
    assert describe(manifest, FIRST[1], URI).head_position == "5"


@pytest.mark.parametrize("change", ["table", "commit_id", "to_position", "kind", "gap"])
def test_ids_differ_with_everything_that_distinguishes_events(change: str) -> None:
    manifest, base = manifest_of(*FIRST), FIRST[0]
    plain = describe(manifest, base, URI)
    if change == "table":
        other = describe(msgspec.structs.replace(manifest, table="other"), base, URI)
    elif change == "gap":
        other = describe(manifest, base, URI, gap=True)
    else:
        changed = msgspec.structs.replace(base, **{change: "diff" if change == "kind" else "8"})
        other = describe(manifest_of(changed), changed, URI)
    assert other.event_id != plain.event_id


def test_archives_of_writers_without_commit_ids_have_events_too() -> None:
    foreign = tuple(msgspec.structs.replace(item, commit_id=None) for item in FIRST)
    events = [describe(manifest_of(*foreign), item, URI) for item in foreign]
    assert [event.head_position for event in events] == ["0", "5", "9"]
    assert len({event.event_id for event in events}) == 3


def test_events_are_decoded_with_fields_of_later_versions() -> None:
    event = describe(manifest_of(*FIRST), FIRST[0], URI)
    later = msgspec.json.decode(encode_event(event)) | {"later": 1}
    assert decode_event(msgspec.json.encode(later)) == event
    assert isinstance(event, Event)


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff", b'{"event_id": 3}'])
def test_bytes_that_are_not_an_event_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_event(data)


def test_without_a_position_everything_live_is_due() -> None:
    assert due(manifest_of(*FIRST, *SECOND), None) == [*FIRST, *SECOND]


def test_what_follows_the_position_is_due() -> None:
    manifest = manifest_of(*FIRST, *SECOND)
    everything = [*FIRST, *SECOND]
    for index, reached in enumerate(everything, 1):
        assert due(manifest, reached) == everything[index:]


def test_a_base_after_lost_changes_is_marked_as_a_gap() -> None:
    manifest = manifest_of(*SECOND, *THIRD)
    assert due(manifest, SECOND[1]) == [("gap", THIRD[0]), THIRD[1]]


def test_a_position_in_a_pruned_epoch_gets_a_gap_notice_of_the_newest_base() -> None:
    assert due(manifest_of(*SECOND), FIRST[1]) == [("gap", SECOND[0]), SECOND[1]]
    assert due(manifest_of(*SECOND, *THIRD), FIRST[1]) == [("gap", THIRD[0]), THIRD[1]]


def test_the_end_of_a_pruned_epoch_leads_to_the_next_base_without_a_gap() -> None:
    assert due(manifest_of(*SECOND), FIRST[2]) == [*SECOND]


def test_epochs_pruned_between_a_pinned_one_and_the_next_are_a_gap() -> None:
    assert due(manifest_of(*FIRST, *THIRD), FIRST[2]) == [("gap", THIRD[0]), THIRD[1]]


def test_an_archive_that_was_made_anew_begins_with_a_gap() -> None:
    assert due(manifest_of(*FIRST, archive_id="b"), FIRST[2]) == [
        ("gap", FIRST[0]),
        *FIRST[1:],
    ]


def test_a_manifest_that_went_back_begins_with_a_gap() -> None:
    assert due(manifest_of(*FIRST[:2]), FIRST[2]) == [("gap", FIRST[0]), FIRST[1]]
