"""The soak's rules: when a figure counts as rising, and how records are accounted for."""

from __future__ import annotations

import random

from bench.soak_ledger import StreamLedger
from bench.soak_verdicts import rise


def test_a_rise_is_told_from_noise_and_from_single_peaks() -> None:
    dice, minutes = random.Random(1), [number / 12 for number in range(240)]
    noise = [100 + dice.gauss(0, 10) + (500 if number % 40 == 0 else 0) for number in range(240)]
    risen, least = rise(minutes, noise)
    assert least < 0 < risen + 5
    risen, least = rise(
        minutes, [value + minute for value, minute in zip(noise, minutes, strict=True)]
    )
    assert 15 < least < risen < 25  # one per minute for twenty minutes


def test_the_books_find_lost_changed_doubled_and_unsent_records() -> None:
    stream = StreamLedger("s")
    stream.acknowledge(0, [b"a", b"b"])
    stream.audit(0, b"a")
    assert "1 acknowledged records are missing" in stream.judge()[0]
    stream.audit(1, b"x")
    assert "other bytes" in stream.judge()[0]
    stream = StreamLedger("s")
    stream.doubt([b"maybe"])
    stream.audit(0, b"maybe")
    assert not stream.judge()
    stream.audit(1, b"never sent")
    assert "never acknowledged" in stream.judge()[0]
    stream = StreamLedger("s")
    stream.acknowledge(0, [b"a"])
    stream.acknowledge(0, [b"b"])
    assert "twice" in stream.judge()[0]


def test_a_record_that_is_skipped_is_found() -> None:
    stream = StreamLedger("s")
    stream.acknowledge(0, [b"a", b"b", b"c"])
    stream.audit(0, b"a")
    stream.audit(2, b"c")
    assert "2 was read where 1 was due" in stream.judge()[0]
