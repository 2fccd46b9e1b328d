"""Counts usage in memory, stores it during upkeep, and reports it as time series.

    recorder      counts operations and bytes per minute for the hot path (`UsageRecorder`);
                  `UsageKeeper` writes them, and held bytes, to storage: one per mount
    busy_streams  counts the streams appended to most in recent seconds; never stored
    held_bytes    counts the bytes of records that streams hold, exactly and crash-safely
    report        answers questions about a time span

Counts since the last upkeep pass (a minute, by default) are lost if the process is killed. Bytes
held are not lost, because rows committed together with deletions, and the chunks after them, give
the exact number.
"""

from streamfold.store.usage.recorder import UsageRecorder

__all__ = ["UsageRecorder"]
