"""What the store was used for: counted in memory, written by upkeep, told as series over time.

    recorder   counts operations and bytes per minute; what the hot path calls
    held       bytes of records that streams hold, exact and crash-safe
    keeper     writes both to storage, and reads them back; one per session
    report     answers questions about a span of time

Counts of the last pass of upkeep (a minute, by default) are lost with the process. Bytes held are
not: they are told by rows that are committed together with deletions, and by the chunks after them.
"""

from streamfold.store.usage.recorder import UsageRecorder

__all__ = ["UsageRecorder"]
