"""Values stored as differences are small, exact, and few steps from one stored whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold_langgraph.values import Blob, Chain, DecodedValues, pack

PLACE = ("thread", "", "messages")


def store(chain: Chain, value: bytes, decoded: DecodedValues) -> Blob:
    base = chain.base()
    prefix = b"" if base is None else decoded.decode(PLACE, chain, base)
    blob = pack("msgpack", value, base, prefix)
    chain.add(blob)
    return blob


def test_a_value_that_grows_costs_what_it_grows_by() -> None:
    rng, chain, decoded = random.Random(1), Chain(), DecodedValues(1 << 20)
    values = [b""]
    for _ in range(300):
        values.append(values[-1] + rng.randbytes(500))
    for value in values:
        store(chain, value, decoded)
    whole = sum(map(len, values))
    stored = sum(len(blob.data) for blob in chain.blobs.values())
    assert stored < 300 * 500 * 3.2  # one share for each digit of 300 in base 16
    assert stored < whole / 50
    for number, value in enumerate(values):
        assert DecodedValues(0).decode(PLACE, chain, number) == value


@pytest.mark.parametrize("size", [1 << 20, 9 << 20])
def test_a_small_change_of_a_large_value_is_small(size: int) -> None:
    value = random.Random(1).randbytes(size)
    changed = b"\x01" + value[:-1] + b"new"
    blob = pack("bytes", changed, 0, value)
    assert len(blob.data) < size / 100
    chain = Chain({0: Blob("bytes", value), 1: blob}, 2)
    assert DecodedValues(1 << 30).decode(PLACE, chain, 1) == changed


@given(st.lists(st.binary(max_size=300), max_size=40))
def test_every_value_comes_back_as_it_was(values: list[bytes]) -> None:
    chain, decoded = Chain(), DecodedValues(400)
    for value in values:
        store(chain, value, decoded)
    for number, value in enumerate(values):
        assert decoded.decode(PLACE, chain, number) == value


@given(st.lists(st.binary(min_size=20, max_size=80), min_size=1, max_size=40), st.randoms())
def test_what_is_kept_can_be_read_when_others_are_removed(
    values: list[bytes], rng: random.Random
) -> None:
    chain, decoded = Chain(), DecodedValues(1 << 20)
    for value in values:
        store(chain, value, decoded)
    kept = {number for number in range(len(values)) if rng.random() < 0.2}
    chain.keep(kept)
    store(chain, b"one more", decoded)
    for number in kept:
        assert DecodedValues(0).decode(PLACE, chain, number) == values[number]
    assert DecodedValues(0).decode(PLACE, chain, len(values)) == b"one more"
