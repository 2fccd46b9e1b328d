"""`streamfold snapshot`: take, restore, list, prune and plan snapshots of a stream's state."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamfold.cli.connection import open_basin, verb
from streamfold.cli.exit_status import ExitStatus, OutputClosedError, VerbFailedError
from streamfold.cli.json_output import Shape
from streamfold.cli.menu import VerbGroup
from streamfold.cli.output import Output
from streamfold.cli.parameters import ByteSize, Duration, stream_argument
from streamfold.cli.snapshots.options import (
    fold_of,
    folding_options,
    retention_of,
    retention_options,
    snapshots_of,
    where_options,
)
from streamfold.errors import (
    ConditionFailedError,
    InvalidError,
    NotFoundError,
    OutcomeUnknownError,
    StreamfoldError,
)
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from s2_sdk import S2

    from streamfold.follow import (
        RestorePlan,
        SnapshotInfo,
        Snapshots,
        SnapshotStore,
        SnapshotTaker,
        Taken,
    )
    from streamfold.follow.clients.s2 import S2Client

Work = Callable[..., Coroutine[Any, Any, None]]

#: Failed attempts in a row before a verb gives up.
_ATTEMPTS = 5
_STATUSES: tuple[tuple[type[StreamfoldError], ExitStatus], ...] = (
    (ConditionFailedError, ExitStatus.CONDITION_FAILED),
    (NotFoundError, ExitStatus.NOT_FOUND),
    (OutcomeUnknownError, ExitStatus.OUTCOME_UNKNOWN),
)


def _report_progress(work: Work) -> Work:
    """Map failures of following and snapshotting to the exit statuses of other verbs."""

    @wraps(work)
    async def run(*args: Any, **given: Any) -> None:
        with _exit_statuses():
            await work(*args, **given)

    return run


@contextmanager
def _exit_statuses() -> Iterator[None]:
    try:
        yield
    except (VerbFailedError, OutputClosedError):
        raise
    except StreamfoldError as error:
        fitting = [status for kind, status in _STATUSES if isinstance(error, kind)]
        status = fitting[0] if fitting else ExitStatus.FAILURE
        raise VerbFailedError(error.code, error.message, status) from error


@click.group(cls=VerbGroup)
def snapshot() -> None:
    """Bound how long a restore takes: snapshots of the state that a stream folds to."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # for folds as module:function


def _taker(s2: S2, ref: StreamRef, given: dict[str, Any], **more: Any) -> SnapshotTaker[Any]:
    """Make the taker that the options describe."""
    from streamfold.follow import SnapshotTaker

    folding = fold_of(given)
    return SnapshotTaker(
        _client(s2, ref),
        fold=folding.fold,
        initial=folding.initial,
        fold_name=folding.name,
        snapshots=snapshots_of(given, ref),
        keeping=retention_of(given),
        **more,
    )


@verb("take", changes=True)
@stream_argument
@where_options
@folding_options
@retention_options
@_report_progress
async def take(s2: S2, output: Output, ref: StreamRef, **given: Any) -> None:
    """Take one snapshot now, of everything up to the tail.

    A snapshot in the stream, which is the default, trims the records that it covers: they can no longer
    be read. --no-trim keeps them.

    Exits with status 6, and says why, if it took none: no record arrived since the last one, or
    another process has just taken one.
    """
    from streamfold.follow import Backoff, Outcome

    async with _taker(s2, ref, given, backoff=Backoff(attempts=_ATTEMPTS)) as taker:
        taken = await taker.take()
    if taken.outcome is not Outcome.TAKEN:
        raise VerbFailedError(
            taken.outcome.replace("-", "_"),
            f"no snapshot was taken: {taken.reason}",
            ExitStatus.NOTHING_DONE,
        )
    _show_taken(output, taken)


@verb("run", changes=True)
@stream_argument
@where_options
@folding_options
@retention_options
@click.option("--records", type=click.IntRange(min=1), help="Take one after this many records.")
@click.option("--bytes", "size", type=ByteSize(), help="Take one after this many bytes of records.")
@click.option("--age", type=Duration(), help="Take one after this long, if records arrived.")
@click.option("--replay", type=Duration(), help="Take one when a replay would take this long.")
@_report_progress
async def run(
    s2: S2,
    output: Output,
    ref: StreamRef,
    records: int | None,
    size: int | None,
    age: int | None,
    replay: int | None,
    **given: Any,
) -> None:
    """Keep taking snapshots, until interrupted; without limits, every 10,000 records.

    Snapshots in the stream, which is the default, trim the records that they cover: --no-trim keeps
    them.
    """
    from streamfold.follow import Policy

    limits = (records, size, age, replay)
    given_any = any(limit is not None for limit in limits)
    policy = Policy(records, size, age, replay) if given_any else Policy()

    def show(taken: Taken) -> None:
        _show_taken(output, taken)

    async with _taker(s2, ref, given, policy=policy, on_taken=show) as taker:
        output.note(f"follows {ref} from {taker.state.cursor}")
        await taker.run()


@verb("restore")
@stream_argument
@where_options
@folding_options
@click.option(
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the state to this file instead of standard output.",
)
@_report_progress
async def restore(s2: S2, output: Output, ref: StreamRef, file: Path | None, **given: Any) -> None:
    """Restore the state as of now, and print it as JSON."""
    import msgspec

    from streamfold.follow import Backoff, follow

    folding = fold_of(given)
    async with follow(
        _client(s2, ref),
        fold=folding.fold,
        initial=folding.initial,
        fold_name=folding.name,
        snapshots=snapshots_of(given, ref),
        backoff=Backoff(attempts=_ATTEMPTS),
    ) as state:
        shape: Shape = {"cursor": state.cursor, "plan": _plan_shape(state.plan)}
        encoded = msgspec.json.encode(state.value)
    if file is not None:
        await asyncio.to_thread(file.write_bytes, encoded)
        output.show({**shape, "file": str(file)}, f"{file}  state before {shape['cursor']}")
    elif output.as_json:
        output.show({**shape, "state": msgspec.Raw(encoded)}, "")
    else:
        output.write(encoded, b"\n")


@verb("plan")
@stream_argument
@where_options
@_report_progress
async def plan(s2: S2, output: Output, ref: StreamRef, **given: Any) -> None:
    """Show what a restore would load, and how much it would replay."""
    from streamfold.follow import make_plan

    found = await make_plan(_client(s2, ref), snapshots_of(given, ref))
    output.show(_plan_shape(found), str(found))


@verb("list")
@stream_argument
@where_options
@_report_progress
async def list_(s2: S2, output: Output, ref: StreamRef, **given: Any) -> None:
    """List snapshots, the newest first; those in the stream are found by reading it."""
    from streamfold.follow.snapshots.snapshot_store import list_snapshots

    for info in await list_snapshots(_client(s2, ref), snapshots_of(given, ref)):
        size = "-" if info.size is None else str(info.size)
        text = f"{info.cursor:>20}  {info.placement:8}  {info.codec:8}  {size:>12}  {info.name}"
        output.show(_info_shape(info), text)


@verb("prune", changes=True)
@stream_argument
@where_options
@click.option("--keep", type=click.IntRange(min=1), help="Snapshots to keep.")
@click.option("--max-age", type=Duration(), help="Delete those older than this.")
@_report_progress
async def prune(
    s2: S2,
    output: Output,
    ref: StreamRef,
    keep: int | None,
    max_age: int | None,
    **given: Any,
) -> None:
    """Delete external snapshots by number and age, but never the newest intact one."""
    from streamfold import follow

    if keep is None and max_age is None:
        raise click.UsageError("nothing to prune by: give --keep N, --max-age DURATION, or both")
    store = _store(snapshots_of(given, ref))
    now = int(time.time() * 1000)
    for info in await follow.prune(store, keep=keep, max_age=max_age, now=now):
        output.show(_info_shape(info), f"deleted {info.name}")


for command in (take, run, restore, plan, list_, prune):
    snapshot.add_command(command)


def _client(s2: S2, ref: StreamRef) -> S2Client:
    from streamfold.follow.clients.s2 import S2Client

    return S2Client(open_basin(s2, ref.basin).stream(ref.stream))


def _store(snapshots: Snapshots[Any]) -> SnapshotStore:
    if snapshots.store is None:
        raise InvalidError(
            "only external snapshots are pruned, those in the stream are trimmed: "
            "give their URL with --snapshots"
        )
    return snapshots.store


def _show_taken(output: Output, taken: Taken) -> None:
    shape: Shape = {
        "outcome": taken.outcome,
        "cursor": taken.cursor,
        "place": taken.placement,
        "reason": taken.reason,
    }
    where = f"  {taken.placement}" if taken.placement else ""
    output.show(shape, f"{taken.outcome}  {taken.cursor}{where}")


def _info_shape(info: SnapshotInfo) -> Shape:
    return {
        "place": info.placement,
        "name": info.name,
        "cursor": info.cursor,
        "codec": info.codec,
        "bytes": info.size,
        "created_at": info.created_at,
    }


def _plan_shape(found: RestorePlan) -> Shape:
    return {
        "stream": found.stream,
        "snapshot": _info_shape(found.snapshot) if found.snapshot else None,
        "first": found.first,
        "read_from": found.read_from,
        "tail": found.tail,
        "records": found.records,
        "estimated_bytes": found.estimated_bytes,
        "skipped": [str(skipped.error) for skipped in found.skipped],
    }
