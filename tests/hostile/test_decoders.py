"""Every decoder of foreign bytes honours its contract for seeds and their mutations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hostile.catalogue import decoders
from tests.hostile.decoder import Decoder, judge
from tests.hostile.mutation import Mutator

#: Inputs of each decoder besides its seeds, times its weight; `make prove` runs a million.
INPUTS = 200
SEED = 20_260_118


@pytest.fixture(scope="module")
def catalogue() -> list[Decoder]:
    return decoders()


def test_every_decoder_returns_a_value_or_raises_an_error_that_it_names(
    catalogue: list[Decoder],
) -> None:
    findings: list[str] = []
    for decoder in catalogue:
        mutator = Mutator(decoder.seeds, SEED)
        inputs = [*decoder.seeds, *(mutator.next() for _ in range(round(INPUTS * decoder.weight)))]
        places = {finding.place: finding for data in inputs if (finding := judge(decoder, data))}
        findings += map(str, places.values())
    assert not findings, f"seed {SEED}:\n" + "\n".join(findings)


def test_every_decoder_reads_one_of_its_seeds_at_least(catalogue: list[Decoder]) -> None:
    """Else what it refuses would say nothing."""
    mute = [one.name for one in catalogue if not any(map(_reader(one), one.seeds))]
    assert not mute


def test_an_error_that_a_decoder_does_not_name_is_a_finding() -> None:
    def decode(data: bytes) -> str:
        return data.decode()

    finding = judge(Decoder("text", decode, (b"a",)), b"\xff")
    assert finding is not None
    assert finding.reason.startswith("UnicodeDecodeError")
    assert judge(Decoder("text", decode, (b"a",), (UnicodeDecodeError,)), b"\xff") is None


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, second = Mutator([b"abc", b"{}"], 5), Mutator([b"abc", b"{}"], 5)
    assert [first.next() for _ in range(200)] == [second.next() for _ in range(200)]


def _reader(decoder: Decoder) -> Callable[[bytes], bool]:
    def reads(data: bytes) -> bool:
        try:
            decoder.decode(data)
        except decoder.errors:
            return False
        return True

    return reads
