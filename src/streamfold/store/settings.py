"""Settings of a store, each with its unit and its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from streamfold.errors import InvalidError
from streamfold.model.records import BATCH_BYTES_MAX

_MAY_BE_ZERO = ("commit_interval", "recent_bytes", "disk_reserve", "trim_grace", "leftover_grace")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store trades latency, cost and memory; the defaults suit a small server."""

    #: Metered bytes accepted but not yet acknowledged; further appends wait for room. Also the most
    #: that one commit can carry.
    inflight_bytes: int = 64 << 20
    #: Commits in flight at once. SlateDB flushes one after the other: a second commit hides the time
    #: between flushes, and more would only split what one flush can carry.
    commits_in_flight: int = 2
    #: Minimum seconds from the start of one commit to the next: for buckets whose requests cost.
    commit_interval: float = 0.0
    #: Seconds after which the outcome of a commit without an answer counts as unknown. An error from
    #: storage counts at once. Closing waits for storage for as long.
    commit_timeout: float = 30.0
    #: Bytes of recent records kept in memory, over all streams, for readers at the tail.
    recent_bytes: int = 64 << 20
    #: Unused streams that are kept in memory, about 1.5 KiB each; others are read from storage when
    #: they are used again, by two point reads.
    idle_streams: int = 50_000
    #: Seconds between passes of the background work (retention, deletion of what is trimmed).
    upkeep_interval: float = 60.0
    #: Seconds after a trim command for which storage keeps what it trims and readers still get it: so
    #: followers get every acknowledged record, even if they reconnect meanwhile.
    trim_grace: float = 10.0
    #: Seconds for which the store keeps a file that no row names, from when it finds that. A failed
    #: commit leaves such files, but so do damage and old backups: time to notice, and to restore.
    leftover_grace: float = 7 * 86_400.0
    #: Seconds after which the store begins to free the space of trimmed, expired and deleted records;
    #: sooner if they are a large part of what it holds (see `reclaim.py`).
    reclaim_after: float = 600.0
    #: Bytes per second, on average, that the store rewrites to free little space: it pauses after a
    #: rewrite that frees less than a quarter of what it reads.
    reclaim_rate: int = 32 << 20
    #: Whether publishing a snapshot trims what it covers, in streams without a setting of their own.
    trim_on_snapshot: bool = False
    #: Seconds from a failure for which calls wait while the store reopens its storage.
    recovery_timeout: float = 5.0
    #: Bytes of one stream in one commit from which they are stored as a file instead of rows.
    #: None = 128 KiB on local disk, 1 MiB on object storage.
    chunk_file_bytes: int | None = None
    #: On local disk: sync each commit to the device before it is acknowledged.
    fsync: bool = True
    #: On local disk and in memory: bytes that must stay free, or appends are refused. None = 256 MiB of
    #: disk, 1 GiB of memory, or a quarter if that is less.
    disk_reserve: int | None = None

    def __post_init__(self) -> None:
        if self.inflight_bytes < BATCH_BYTES_MAX:
            raise InvalidError(
                f"inflight_bytes {self.inflight_bytes} is less than one batch: "
                f"give at least {BATCH_BYTES_MAX}"
            )
        for setting in fields(self):
            value = getattr(self, setting.name)
            lowest = 0 if setting.name in _MAY_BE_ZERO else 1e-9
            if not isinstance(value, bool | None) and value < lowest:
                raise InvalidError(f"{setting.name} {value} must be positive")
