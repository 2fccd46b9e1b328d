"""Pauses between attempts."""

from __future__ import annotations

import random

from streamfold.backoff import pause_after


def test_pauses_double_up_to_the_longest_and_vary() -> None:
    rng = random.Random(1)
    for failures, whole in ((1, 1.0), (2, 2.0), (4, 8.0), (5, 10.0), (10**9, 10.0)):
        pauses = {pause_after(failures, 1.0, 10.0, rng) for _ in range(50)}
        assert len(pauses) > 1
        assert all(whole / 2 <= pause <= whole for pause in pauses)
    assert 8.0 <= pause_after(9, 1.0, 10.0, rng, (0.8, 1.2)) <= 12.0
    assert pause_after(3, 0.0, 10.0, rng) == 0.0
