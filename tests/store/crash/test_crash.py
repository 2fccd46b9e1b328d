"""kill -9 loses nothing acknowledged. `python -m tests.store.crash` runs this for long."""

from __future__ import annotations

from pathlib import Path

from tests.store.crash.killer import Killer

KILLS = 12
SEED = 2


async def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    summary = await Killer(tmp_path, SEED).run(KILLS)
    print(summary)
    assert summary.kills == KILLS
    assert summary.acked_batches > 0
    assert summary.verifications > KILLS // 2
