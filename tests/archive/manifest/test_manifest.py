from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamfold.archive.errors import ManifestInvalidError
from streamfold.archive.manifest.encoding import read_manifest, to_json, write_manifest
from streamfold.archive.manifest.model import check_manifest, with_uris
from streamfold.archive.manifest.positions import LSN, SEQ_NUM, format_time, parse_time
from streamfold.blob import open_blob_store
from streamfold.errors import FormatUnsupportedError, InvalidError
from tests.archive.tables import START, Clock, at, changes, open_writer, rows

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLISHED = (GOLDEN / "published.json").read_bytes()
OURS = (GOLDEN / "streamfold-v1.json").read_bytes()


def test_a_manifest_of_the_published_form_is_read() -> None:
    manifest = read_manifest(PUBLISHED)
    assert (manifest.epoch, manifest.head_position) == (2, "0/1A2B400")
    assert [artifact.kind for artifact in manifest.chain] == ["diff"]
    assert manifest.base.row_count == 3
    assert manifest.artifacts[0].row_count is None
    assert [part.path for part in manifest.artifacts[1].parts()] == [
        "epoch=1/diff-0_1A2B000-0_1A2B300.pb"
    ]
    assert manifest.columns is not None
    assert manifest.columns[0]["TypeOID"] == 20


def test_nothing_of_a_published_manifest_is_lost_when_it_is_written_again() -> None:
    def without_parts(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_parts(v) for k, v in value.items() if k != "parts"}
        return [without_parts(item) for item in value] if isinstance(value, list) else value

    again = json.loads(write_manifest(read_manifest(PUBLISHED)))
    assert without_parts(again) == json.loads(PUBLISHED)


def test_a_golden_manifest_reads_and_writes_to_the_same_bytes() -> None:
    assert write_manifest(read_manifest(OURS)) == OURS


async def test_a_writer_of_today_makes_the_golden_manifest() -> None:
    blobs, clock = open_blob_store("memory:"), Clock()
    writer = await open_writer(at(blobs, "file:///archive/public.users/"), clock=clock)
    await writer.write_base({0: rows({2: "b"}), 1: rows({1: "a"})}, "7", reason="first")
    clock.advance(seconds=30)
    closing = changes(("UPDATE", 1, "A"))
    await writer.rebase(
        {1: rows({1: "A"})}, closing, "9", reason="max_diff_bytes", reuse=[0], record_count=2
    )
    clock.advance(seconds=30)
    await writer.write_diff(changes(("DELETE", 2, None)), "9", "10", record_count=1)
    assert (await blobs.get("manifest.json")).decode() == OURS.decode()


def test_unknown_fields_survive_at_every_level() -> None:
    raw = json.loads(OURS)
    entries: list[Any] = [raw, raw["artifacts"][0], raw["writer"]]
    entries += [raw["artifacts"][0]["formats"]["jsonl"]]
    entries += [raw["artifacts"][0]["formats"]["jsonl"]["parts"][0]]
    for number, entry in enumerate(entries):
        entry["from_the_future"] = {"number": number, "big": 2**63, "nothing": None}
    again = json.loads(write_manifest(with_uris(read_manifest(json.dumps(raw).encode()), "x:/")))
    entries = [again, again["artifacts"][0], again["writer"]]
    entries += [again["artifacts"][0]["formats"]["jsonl"]]
    entries += [again["artifacts"][0]["formats"]["jsonl"]["parts"][0]]
    assert [entry["from_the_future"]["number"] for entry in entries] == [0, 1, 2, 3, 4]
    assert again["from_the_future"]["big"] == 2**63


@pytest.mark.parametrize("version", [2, 10**30])
def test_a_later_version_is_refused_whatever_else_it_says(version: int) -> None:
    with pytest.raises(FormatUnsupportedError, match="upgrade"):
        read_manifest(json.dumps({"manifest_version": version, "other": 1}).encode())


_DEEP = b'{"manifest_version":1,"x":' + b"[" * 5_000 + b"]" * 5_000 + b"}"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b"{}", b'{"manifest_version": "1"}', _DEEP],
    ids=range(7),
)
def test_bytes_that_are_not_a_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(ManifestInvalidError):
        read_manifest(data)


def _set(*path: Any) -> Callable[[Any], None]:
    *way, name, value = path

    def change(raw: Any) -> None:
        for step in way:
            raw = raw[step]
        raw[name] = value

    return change


def _swap_last_two(raw: Any) -> None:
    raw["artifacts"][2:] = raw["artifacts"][:1:-1]


DAMAGE: dict[str, tuple[Callable[[Any], None], str]] = {
    "no artifacts": (_set("artifacts", []), "first artifact must be a base"),
    "no base": (lambda raw: raw["artifacts"].pop(0), "first artifact must be a base"),
    "head is not the end": (_set("head_position", "11"), "its head is"),
    "epoch is not the end's": (_set("epoch", 1), "its head is"),
    "a gap": (_set("artifacts", 3, "from_position", "8"), "must begin at '9'"),
    "a missing diff": (lambda raw: raw["artifacts"].pop(2), "must be of epoch 1"),
    "a duplicate": (lambda raw: raw["artifacts"].append(raw["artifacts"][3]), "must begin at '10'"),
    "an empty range": (_set("artifacts", 3, "to_position", "9"), "must end after it begins"),
    "a backward range": (_set("artifacts", 3, "to_position", "3"), "must end after it begins"),
    "an older epoch": (_set("artifacts", 2, "epoch", 1), "must open an epoch after 1"),
    "a diff of another epoch": (_set("artifacts", 3, "epoch", 3), "must be of epoch 2"),
    "a backward base": (_set("artifacts", 2, "to_position", "8"), "goes back behind '9'"),
    "artifacts out of order": (_swap_last_two, "must be of epoch 1"),
    "a base with a beginning": (_set("artifacts", 2, "from_position", "1"), "only for a base"),
    "a diff without one": (_set("artifacts", 3, "from_position", None), "only for a base"),
    "an unknown kind": (_set("artifacts", 0, "kind", "delta"), "Invalid enum value"),
    "a number as position": (_set("artifacts", 0, "to_position", 7), "Expected `str`"),
    "an empty position": (_set("artifacts", 0, "to_position", ""), "not a sequence number"),
    "a position of another order": (_set("artifacts", 0, "to_position", "0/7"), "not a sequence"),
    "an unknown order": (_set("position_order", "mine"), "give the order of that name"),
    "no format": (_set("artifacts", 0, "formats", {}), "it cannot be read"),
    "a path that leaves": (
        _set("artifacts", 3, "formats", "jsonl", "parts", 0, "path", "../../etc/passwd"),
        "segment '..'",
    ),
    "an absolute path": (
        _set("artifacts", 3, "formats", "jsonl", "parts", 0, "path", "/etc/passwd"),
        "segment ''",
    ),
    "sizes that do not add up": (
        _set("artifacts", 0, "formats", "jsonl", "size_bytes", 3),
        "sum of its parts",
    ),
    "a broken hash": (
        _set("artifacts", 0, "formats", "jsonl", "parts", 0, "sha256", "abc"),
        "64 hex digits",
    ),
    "an unknown schema": (_set("artifacts", 0, "schema_id", "none"), "which does not exist"),
    "a time without zone": (_set("updated_at", "2026-06-03T12:00:00"), "RFC 3339"),
    "no time": (_set("artifacts", 0, "created_at", "yesterday"), "RFC 3339"),
    "a wrong oldest position": (_set("oldest_readable_position", "9"), "must be '7'"),
    "text for a list": (_set("artifacts", "none"), "instead of a list"),
    "a list for an object": (_set("artifacts", 0, []), "instead of an object"),
    "no table": (lambda raw: raw.pop("table"), "missing required field"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_manifest_that_breaks_a_rule_is_refused_as_a_whole(damage: str) -> None:
    raw = json.loads(OURS)
    change, reported = DAMAGE[damage]
    change(raw)
    with pytest.raises(ManifestInvalidError, match=reported):
        read_manifest(json.dumps(raw).encode())


def test_pins_have_one_name_each() -> None:
    raw = json.loads(OURS)
    moment = "2026-06-03T12:00:00Z"
    pin = {"id": "p", "epoch": 1, "created_at": moment, "expires_at": moment}
    raw["pins"] = [pin, pin]
    with pytest.raises(ManifestInvalidError, match="pin 'p' occurs twice"):
        read_manifest(json.dumps(raw).encode())


def test_the_order_may_be_given_and_must_be_the_right_one() -> None:
    assert read_manifest(OURS, SEQ_NUM) == read_manifest(OURS)
    with pytest.raises(ManifestInvalidError, match="'lsn' was given"):
        read_manifest(OURS, LSN)
    assert read_manifest(PUBLISHED, LSN) == read_manifest(PUBLISHED)


def test_absent_fields_are_left_out_but_a_base_always_has_a_null_beginning() -> None:
    raw = to_json(read_manifest(PUBLISHED))
    assert raw["artifacts"][0]["from_position"] is None
    assert "pins" not in raw
    assert "schema_id" not in raw["artifacts"][0]


def test_times_are_rfc_3339_in_utc() -> None:
    assert format_time(START) == "2026-06-03T12:00:00.000000Z"
    for text in ("2026-06-03T12:00:00Z", "2026-06-03T14:00:00.0000001+02:00"):
        assert parse_time(text) == START
    with pytest.raises(InvalidError, match="no zone"):
        format_time(START.replace(tzinfo=None))
    for text in ("2026-13-03T12:00:00Z", "2026-06-03T24:00:00Z"):
        with pytest.raises(InvalidError, match="RFC 3339"):
            parse_time(text)


def test_a_changed_artifact_is_checked_although_an_earlier_version_was() -> None:
    manifest = read_manifest(OURS)
    last = msgspec.structs.replace(manifest.artifacts[-1], epoch=manifest.epoch + 1)
    changed = msgspec.structs.replace(manifest, artifacts=(*manifest.artifacts[:-1], last))
    with pytest.raises(ManifestInvalidError, match="must be of epoch"):
        check_manifest(changed, checked=manifest.artifacts)
    gone = msgspec.structs.replace(manifest, schemas={}, schema_id=None)
    with pytest.raises(ManifestInvalidError, match="which does not exist"):
        check_manifest(gone, checked=manifest.artifacts)
