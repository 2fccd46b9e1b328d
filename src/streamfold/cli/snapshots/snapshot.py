"""`streamfold snapshot`: takes, restores, lists, prunes and plans snapshots of a stream's state."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamfold.cli.connection import open_basin, verb
from streamfold.cli.exit_status import ExitStatus, VerbFailedError, exit_statuses
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
    InvalidError,
)
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
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

#: Consecutive failed attempts after which a command gives up.
_ATTEMPTS = 5


def _report_progress(work: Work) -> Work:
    """Map failures of following and taking snapshots to the exit statuses of other commands."""

    @wraps(work)
    async def run(*args: Any, **options: Any) -> None:
        with exit_statuses():
            await work(*args, **options)

    return run


@click.group(cls=VerbGroup)
def snapshot() -> None:
    """Bound how long a restore takes: snapshots of the state that a stream folds to."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # to import folds given as module:function


def _taker(s2: S2, ref: StreamRef, options: dict[str, Any], **more: Any) -> SnapshotTaker[Any]:
    """Create the snapshot taker that the options describe."""
    from streamfold.follow import SnapshotTaker

    folding = fold_of(options)
    return SnapshotTaker(
        _client(s2, ref),
        fold=folding.fold,
        initial=folding.initial,
        fold_name=folding.name,
        snapshots=snapshots_of(options, ref),
        keeping=retention_of(options),
        **more,
    )


@verb("take", changes=True)
@stream_argument
@where_options
@folding_options
@retention_options
@_report_progress
async def take(s2: S2, output: Output, ref: StreamRef, **options: Any) -> None:
    """Take one snapshot now, of everything up to the tail.

    A snapshot in the stream, which is the default, trims the records that it covers: they can no longer
    be read. --no-trim keeps them.

    Exits with status 6, and says why, if it took none: no record arrived since the last one, or
    another process has just taken one.
    """
    from streamfold.follow import Backoff, Outcome

    async with _taker(s2, ref, options, backoff=Backoff(attempts=_ATTEMPTS)) as taker:
        snapshot = await taker.take()
    if snapshot.outcome is not Outcome.TAKEN:
        raise VerbFailedError(
            snapshot.outcome.replace("-", "_"),
            f"no snapshot was taken: {snapshot.reason}",
            ExitStatus.NOTHING_DONE,
        )
    _show_taken(output, snapshot)


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
    **options: Any,
) -> None:
    """Keep taking snapshots, until interrupted; without limits, every 10,000 records.

    Snapshots in the stream, which is the default, trim the records that they cover: --no-trim keeps
    them.
    """
    from streamfold.follow import Policy

    limits = (records, size, age, replay)
    given_any = any(limit is not None for limit in limits)
    policy = Policy(records, size, age, replay) if given_any else Policy()

    def show(snapshot: Taken) -> None:
        _show_taken(output, snapshot)

    async with _taker(s2, ref, options, policy=policy, on_taken=show) as taker:
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
async def restore(
    s2: S2, output: Output, ref: StreamRef, file: Path | None, **options: Any
) -> None:
    """Restore the state as of now, and print it as JSON."""
    import msgspec

    from streamfold.follow import Backoff, follow

    folding = fold_of(options)
    async with follow(
        _client(s2, ref),
        fold=folding.fold,
        initial=folding.initial,
        fold_name=folding.name,
        snapshots=snapshots_of(options, ref),
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
async def plan(s2: S2, output: Output, ref: StreamRef, **options: Any) -> None:
    """Show what a restore would load, and how much it would replay."""
    from streamfold.follow import make_plan

    restore_plan = await make_plan(_client(s2, ref), snapshots_of(options, ref))
    output.show(_plan_shape(restore_plan), str(restore_plan))


@verb("list")
@stream_argument
@where_options
@_report_progress
async def list_(s2: S2, output: Output, ref: StreamRef, **options: Any) -> None:
    """List snapshots, the newest first; those in the stream are found by reading it."""
    from streamfold.follow.snapshots.snapshot_store import list_snapshots

    infos = await list_snapshots(_client(s2, ref), snapshots_of(options, ref))
    if not infos:
        output.note(f"No snapshots of s2://{ref.basin}/{ref.stream}.")
    for info in infos:
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
    **options: Any,
) -> None:
    """Delete external snapshots by number and age, but never the newest intact one."""
    from streamfold import follow

    if keep is None and max_age is None:
        raise click.UsageError("nothing to prune by: give --keep N, --max-age DURATION, or both")
    store = _store(snapshots_of(options, ref))
    now = int(time.time() * 1000)
    deleted = await follow.prune(store, keep=keep, max_age=max_age, now=now)
    if not deleted:
        output.note("No snapshot was deleted: none is old enough.")
    for info in deleted:
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


def _show_taken(output: Output, snapshot: Taken) -> None:
    shape: Shape = {
        "outcome": snapshot.outcome,
        "cursor": snapshot.cursor,
        "place": snapshot.placement,
        "reason": snapshot.reason,
    }
    where = f"  {snapshot.placement}" if snapshot.placement else ""
    output.show(shape, f"{snapshot.outcome}  {snapshot.cursor}{where}")


def _info_shape(info: SnapshotInfo) -> Shape:
    return {
        "place": info.placement,
        "name": info.name,
        "cursor": info.cursor,
        "codec": info.codec,
        "bytes": info.size,
        "created_at": info.created_at,
    }


def _plan_shape(restore_plan: RestorePlan) -> Shape:
    return {
        "stream": restore_plan.stream,
        "snapshot": _info_shape(restore_plan.snapshot) if restore_plan.snapshot else None,
        "first": restore_plan.first,
        "read_from": restore_plan.read_from,
        "tail": restore_plan.tail,
        "records": restore_plan.records,
        "estimated_bytes": restore_plan.estimated_bytes,
        "skipped": [str(skipped.error) for skipped in restore_plan.skipped],
    }
