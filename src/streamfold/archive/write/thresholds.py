"""Decides when to write a diff and when a new base, from numbers alone.

Everything is measured from committed data, so a restart changes nothing: the age of the last base
comes from the manifest. A limit is reached at its value (>=). None or 0 turns it off. The rules
apply in this order, and the first limit that is reached is the reason:

1. nothing is due if no change is pending and the chain is empty or `max_interval` has not passed;
2. `min_interval` is a floor: no base is written before it has passed, whatever the other limits
   say;
3. `max_interval`, even on a quiet table if its chain is not empty;
4. the pending diff: `max_diff_bytes`, `max_diff_fraction` of the last base's bytes;
5. changed rows since the base: `max_churn_records`, `max_churn_fraction` of the table's rows;
6. the chain with the pending diff: `max_chain_bytes`, `max_chain_diffs`, `max_replay_seconds`.
"""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from streamfold.archive.manifest.model import Artifact, Manifest
from streamfold.archive.manifest.positions import parse_time
from streamfold.errors import InvalidError

#: Assumed speed of a reader, for `max_replay_seconds`: bytes decoded and applied per second on one
#: core, and seconds for each file fetched.
REPLAY_BYTES_PER_SECOND = 50 * 1024 * 1024
REPLAY_SECONDS_PER_DIFF = 0.05


class Action(enum.StrEnum):
    """The artifact to write now, if any."""

    NOTHING = "nothing"
    DIFF = "diff"
    BASE = "base"


@dataclass(frozen=True, slots=True)
class Decision:
    """The action, and for a base the limit that was reached, which the manifest records."""

    action: Action
    trigger: str | None = None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of one table. By default none is set, and the chain grows without bound."""

    min_interval: timedelta | None = None
    max_interval: timedelta | None = None
    max_diff_bytes: int | None = None
    max_diff_fraction: float | None = None
    max_churn_records: int | None = None
    max_churn_fraction: float | None = None
    max_chain_bytes: int | None = None
    max_chain_diffs: int | None = None
    max_replay_seconds: float | None = None
    #: Share of `max_interval` by which a table may write sooner. Each table uses its own fraction
    #: of it, so that many tables with one configuration do not all write a base at once.
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_limit(field.name, getattr(self, field.name))
        if not 0 <= self.jitter < 1:
            raise InvalidError(f"jitter is {self.jitter}: it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Pending:
    """The contents of the next diff."""

    changes: int
    size_bytes: int
    #: Rows of the table after the changes.
    table_rows: int


@dataclass(frozen=True, slots=True)
class ChainState:
    """The last base, and the commits since."""

    since_base: timedelta
    base_bytes: int
    changes: int
    size_bytes: int
    diffs: int
    #: 0 to 1, constant for a table's whole epoch.
    jitter_share: float = 0.0


def chain_state(manifest: Manifest, now: datetime) -> ChainState:
    """Return the state according to the manifest. A clock that went backwards counts as zero time.

    Sizes are those of the newest diff's first format, or of the base's, so sizes of the same format
    are compared.
    """
    base, chain = manifest.base, manifest.chain
    form = next(iter((chain[-1] if chain else base).formats))
    return ChainState(
        since_base=max(now - parse_time(base.created_at), timedelta(0)),
        base_bytes=_size(base, form),
        changes=sum(diff.change_count or 0 for diff in chain),
        size_bytes=sum(_size(diff, form) for diff in chain),
        diffs=len(chain),
        jitter_share=_share(f"{manifest.table}/{manifest.epoch}"),
    )


def decide(limits: Thresholds, state: ChainState, pending: Pending) -> Decision:
    """Return what is due now. Deterministic: the same input always gives the same decision."""
    overdue = _is_overdue(limits, state)
    quiet = pending.changes == 0
    if quiet and not (overdue and state.diffs):
        return Decision(Action.NOTHING)
    if limits.min_interval and state.since_base < limits.min_interval:
        return Decision(Action.NOTHING if quiet else Action.DIFF)
    trigger = "max_interval" if overdue else _reached(limits, state, pending)
    return Decision(Action.BASE, trigger) if trigger else Decision(Action.DIFF)


def is_overdue(limits: Thresholds, manifest: Manifest, now: datetime) -> bool:
    """Return whether a quiet table is due for a base, as `decide` does without pending changes."""
    least = limits.max_interval and limits.max_interval * (1 - limits.jitter)
    if not least or now - parse_time(manifest.base.created_at) < least:
        return False
    decision = decide(limits, chain_state(manifest, now), Pending(0, 0, 0))
    return decision.action is Action.BASE


def _is_overdue(limits: Thresholds, state: ChainState) -> bool:
    if not limits.max_interval:
        return False
    due = limits.max_interval * (1 - limits.jitter * state.jitter_share)
    return state.since_base >= due


def _reached(limits: Thresholds, state: ChainState, pending: Pending) -> str | None:
    churn = state.changes + pending.changes
    chain_bytes, diffs = state.size_bytes + pending.size_bytes, state.diffs + 1
    replay = chain_bytes / REPLAY_BYTES_PER_SECOND + diffs * REPLAY_SECONDS_PER_DIFF
    amounts = (
        ("max_diff_bytes", pending.size_bytes, 1),
        ("max_diff_fraction", pending.size_bytes, state.base_bytes),
        ("max_churn_records", churn, 1),
        ("max_churn_fraction", churn, pending.table_rows),
        ("max_chain_bytes", chain_bytes, 1),
        ("max_chain_diffs", diffs, 1),
        ("max_replay_seconds", replay, 1),
    )
    for name, amount, whole in amounts:
        limit = getattr(limits, name)
        # A fraction of zero sets no limit: an empty base or table triggers nothing.
        if limit and whole and amount >= limit * whole:
            return name
    return None


def _size(artifact: Artifact, form: str) -> int:
    files = artifact.formats.get(form) or next(iter(artifact.formats.values()))
    return files.size_bytes


def _share(seed: str) -> float:
    digest = hashlib.sha256(seed.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def _check_limit(name: str, value: timedelta | float | None) -> None:
    if value is None:
        return
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= number < math.inf:
        raise InvalidError(f"{name} is {value}: it must be at least 0, and 0 or None for no limit")
