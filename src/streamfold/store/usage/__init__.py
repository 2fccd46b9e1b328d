"""Usage of the store: counted in memory, written by upkeep, reported as time series.

    recorder   counts operations and bytes per minute; what the hot path calls
    busy_streams the streams that most is appended to, in the last seconds; never written
    held_bytes bytes of records that streams hold, exact and crash-safe
    storage    writes both to storage, and reads them back; one per mount
    report     answers questions about a span of time

Counts of the last pass of upkeep (a minute, by default) are lost with the process. Bytes held are
not: rows that are committed together with deletions, and the chunks after them, give the exact number.
"""

from streamfold.store.usage.recorder import UsageRecorder

__all__ = ["UsageRecorder"]
