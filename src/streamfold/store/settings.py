"""Store settings, each with its unit and reason."""

from __future__ import annotations

from dataclasses import dataclass, fields

from streamfold.errors import InvalidError
from streamfold.model.records import BATCH_BYTES_MAX

_MAY_BE_ZERO = ("commit_interval", "recent_bytes", "disk_reserve", "trim_grace", "leftover_grace")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A store's trade-offs between latency, cost and memory. The defaults suit a small server."""

    #: Maximum metered bytes accepted but not yet acknowledged. Further appends wait for room. Also
    #: bounds a single commit.
    inflight_bytes: int = 64 << 20
    #: Maximum concurrent commits. SlateDB flushes one at a time: a second commit hides the time
    #: between flushes, and more would only split what one flush can carry.
    commits_in_flight: int = 2
    #: Minimum seconds from the start of one commit to the next, for buckets that charge per
    #: request.
    commit_interval: float = 0.0
    #: Seconds after which the outcome of an unanswered commit counts as unknown. A storage error
    #: counts at once. Closing the store waits for storage equally long.
    commit_timeout: float = 30.0
    #: Bytes of recent records cached in memory over all streams, for readers at the tail.
    recent_bytes: int = 64 << 20
    #: Idle streams kept in memory, about 1.5 KiB each. Other streams are read from storage when
    #: next used, with two point reads.
    idle_streams: int = 50_000
    #: Seconds between upkeep passes (retention, deletion of trimmed records).
    upkeep_interval: float = 60.0
    #: Seconds after a trim command during which trimmed records stay on storage and readable, so
    #: that followers receive every acknowledged record even if they reconnect meanwhile.
    trim_grace: float = 10.0
    #: Seconds for which the store keeps a file that no row names, counted from its discovery.
    #: Failed commits leave such files, but so do damage and old backups: this leaves time to notice
    #: and restore.
    leftover_grace: float = 7 * 86_400.0
    #: Seconds until the store starts to free the space of trimmed, expired and deleted records. It
    #: starts sooner if they are a large part of the store (see `reclaim.py`).
    reclaim_after: float = 600.0
    #: Maximum average bytes per second rewritten for little gain: the store pauses after a rewrite
    #: that frees less than a quarter of what it reads.
    reclaim_rate: int = 32 << 20
    #: Whether publishing a snapshot trims the records it covers, in streams that do not set this.
    trim_on_snapshot: bool = False
    #: Seconds after a failure during which calls wait for storage to be reopened.
    recovery_timeout: float = 5.0
    #: Bytes that one stream writes in one commit from which they go to a chunk file instead of
    #: rows. None = 128 KiB on local disk, 1 MiB on object storage.
    chunk_file_bytes: int | None = None
    #: On local disk: whether to sync each commit to the device before acknowledging it.
    fsync: bool = True
    #: On local disk and in memory: bytes that must stay free; below that, appends are rejected.
    #: None = 256 MiB of disk, 1 GiB of memory, or a quarter of the total if that is less.
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
