"""What is compacted is everything, or nothing is."""

from __future__ import annotations

from typing import Any

import pycrdt
import pytest

from streamfold_yjs.updates import MalformedUpdateError, compacted, frame, unframed


def recorded(document: pycrdt.Doc[Any]) -> list[bytes]:
    """The updates that a document will make."""
    updates: list[bytes] = []
    document.observe(lambda event: updates.append(event.update))
    return updates


def edits_of_every_kind() -> list[bytes]:
    """What texts, maps, arrays and trees make, with deletions, by two clients."""
    first: pycrdt.Doc[Any] = pycrdt.Doc()
    second: pycrdt.Doc[Any] = pycrdt.Doc()
    updates = recorded(first)
    text = first.get("text", type=pycrdt.Text)
    text += "plain, \U0001f600 and ü"
    text.format(0, 5, {"bold": True})
    text.insert_embed(3, {"image": "x.png"})
    del text[1:4]
    values = [None, True, False, 7, -300, 2**40, 1.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}}]
    array = first.get("array", type=pycrdt.Array)
    array.extend(values)
    nested = pycrdt.Map({"inner": pycrdt.Text("deep"), "list": pycrdt.Array([1, 2])})
    mapped = first.get("map", type=pycrdt.Map)
    mapped["nested"] = nested
    mapped["gone"] = 1
    del mapped["gone"]
    tree = first.get("tree", type=pycrdt.XmlFragment)
    tree.children.append(pycrdt.XmlElement("p", {"class": "x"}, contents=[pycrdt.XmlText("in")]))
    second.apply_update(first.get_update())
    second.observe(lambda event: updates.append(event.update))
    other = second.get("text", type=pycrdt.Text)
    other += " by another"
    return updates


def state_of(updates: list[bytes]) -> bytes:
    document: pycrdt.Doc[Any] = pycrdt.Doc()
    for update in updates:
        document.apply_update(update)
    return bytes(document.get_state())


def test_edits_of_every_kind_become_one_update_with_the_same_state() -> None:
    updates = edits_of_every_kind()
    state = compacted(updates)
    assert state is not None
    assert state_of([state]) == state_of(updates)
    assert compacted([state, *updates]) is not None, "an update that is there twice is harmless"


def test_an_update_whose_predecessor_is_missing_is_never_lost() -> None:
    """A document with one of them missing is not compacted, whichever it is."""
    updates = edits_of_every_kind()
    complete = state_of(updates)
    lacking = [updates[:at] + updates[at + 1 :] for at in range(len(updates) - 1)]
    lossy = [rest for rest in lacking if state_of(rest) != complete]
    assert len(lossy) > 5
    for at, rest in enumerate(lacking):
        state = compacted(rest)
        assert state is None or state_of([state, updates[at]]) == complete, at


def test_a_deletion_before_what_it_deletes_is_never_lost() -> None:
    document: pycrdt.Doc[Any] = pycrdt.Doc()
    updates = recorded(document)
    text = document.get("text", type=pycrdt.Text)
    text += "abc"
    del text[0:2]
    assert compacted(updates[1:]) is None
    assert compacted([updates[1], updates[0]]) is not None


def test_frames_are_taken_apart_as_they_were_put_together() -> None:
    small, large = edits_of_every_kind()[0], bytearray()
    document: pycrdt.Doc[Any] = pycrdt.Doc()
    text = document.get("text", type=pycrdt.Text)
    text += "x" * 300_000
    large += document.get_update()
    assert unframed(frame(small) + frame(bytes(large))) == [small, bytes(large)]
    assert unframed(b"") == []


@pytest.mark.parametrize("body", [b"\x05\x00", b"\x03\x01\x02\x03", b"\x80", b"\xff" * 20, b"\x00"])
def test_bytes_that_are_no_frames_of_updates_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedUpdateError):
        unframed(body)
