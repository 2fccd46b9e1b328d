"""`streamfold copy`: copies streams, or a whole basin, from one server to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from streamfold.cli.connection import (
    encryption_option,
    open_basin,
    open_client,
    open_stream,
    verb,
)
from streamfold.cli.exit_status import ExitStatus, VerbFailedError
from streamfold.cli.output import Output
from streamfold.cli.target import FILE, find_target
from streamfold.model.names import BasinName, StreamName, StreamRef, parse_basin_name
from streamfold.wording import noun

if TYPE_CHECKING:
    from s2_sdk import S2

    from streamfold.cli.records.stream_copy import CopyOptions, CopyReport

_SCHEME = "s2://"


class BasinOrStream(NamedTuple):
    """A basin, or one of its streams."""

    basin: str
    stream: str | None


class PartType(click.ParamType[BasinOrStream]):
    """A basin or a stream, written as s2://basin or s2://basin/stream."""

    name = "s2://basin[/stream]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> BasinOrStream:
        if isinstance(value, BasinOrStream):
            return value
        basin, _, stream = str(value).removeprefix(_SCHEME).partition("/")
        if not basin:
            self.fail(
                f"{value!r} names no basin: write s2://basin, or s2://basin/stream", param, ctx
            )
        return BasinOrStream(basin, stream or None)


@verb("copy", changes=True)
@click.argument("source", type=PartType(), metavar="s2://FROM[/STREAM]")
@click.argument("target", type=PartType(), metavar="s2://TO[/STREAM]")
@click.option("--from-endpoint", metavar="URL",
              help="The source's server, if it is not the target's.")  # fmt: skip
@click.option("--from-token-file", type=FILE, help="File with the token for the source.")
@click.option("--from-context", metavar="NAME", help="Context of the source.")
@click.option("--prefix", default="", help="Copy only the basin's streams that begin with this.")
@click.option("--pad", is_flag=True,
              help="Fill what was trimmed with empty, trimmed records: seq_nums stay.")  # fmt: skip
@click.option("--renumber", is_flag=True,
              help="Start at seq_num 0 although the source was trimmed.")  # fmt: skip
@click.option("--verify", type=click.Choice(["copied", "all", "none"]), default="copied",
              show_default=True, help="What to read again from both streams and compare.")  # fmt: skip
@encryption_option
async def copy(
    s2: S2,
    output: Output,
    source: BasinOrStream,
    target: BasinOrStream,
    from_endpoint: str | None,
    from_token_file: Path | None,
    from_context: str | None,
    prefix: str,
    pad: bool,
    renumber: bool,
    verify: str,
    encryption_key_file: Path | None,
) -> None:
    """Copy a stream, or all streams of a basin, from one server to another.

    The target is on the server that all commands use; --from-endpoint names the source's server.
    Missing basins and streams are created with the source's configuration. Run again, an interrupted
    copy resumes where it stopped, and a complete one copies what is new.
    """
    from streamfold.cli.records.stream_copy import CopyOptions

    _check(source, target, prefix, pad=pad, renumber=renumber)
    copier = _Copier(s2, output, encryption_key_file, CopyOptions(pad, renumber, verify))
    if from_endpoint is None and from_token_file is None and from_context is None:
        await copier.copy(s2, source, target, prefix)
        return
    server = find_target(from_endpoint, from_token_file, from_context)
    async with open_client(server) as origin:
        await copier.copy(origin, source, target, prefix)


def _check(
    source: BasinOrStream, target: BasinOrStream, prefix: str, *, pad: bool, renumber: bool
) -> None:
    if pad and renumber:
        raise click.UsageError("--pad and --renumber exclude each other: choose one")
    if source.stream is not None and prefix:
        raise click.UsageError("--prefix chooses streams of a basin: name a basin as the source")
    if source.stream is None and target.stream is not None:
        raise click.UsageError("a basin is copied to a basin: name one as the target")


class _Copier:
    """Copies streams one after another, and prints the result of each."""

    def __init__(self, s2: S2, output: Output, key_file: Path | None, options: CopyOptions) -> None:
        self._s2 = s2
        self._output = output
        self._key_file = key_file
        self._options = options

    async def copy(
        self, origin: S2, source: BasinOrStream, target: BasinOrStream, prefix: str
    ) -> None:
        if source.stream is not None:
            # Before creating anything, so that a missing source leaves no basin behind.
            await open_basin(origin, source.basin).get_stream_config(source.stream)
        await self._ensure_basin(origin, source.basin, target.basin)
        if source.stream is not None:
            ref = _ref(target.basin, target.stream or source.stream)
            await self._copy_stream(origin, _ref(source.basin, source.stream), ref)
            return
        streams = open_basin(origin, source.basin).list_all_streams(prefix=prefix)
        names = [info.name async for info in streams]
        if not names:
            raise VerbFailedError(
                "nothing_to_copy",
                f"the basin {source.basin!r} has no stream that begins with {prefix!r}",
                ExitStatus.NOTHING_DONE,
            )
        for name in names:
            await self._copy_stream(origin, _ref(source.basin, name), _ref(target.basin, name))

    async def _ensure_basin(self, origin: S2, source: str, target: str) -> None:
        """Create the target basin with the source's configuration, unless it exists."""
        from s2_sdk import S2ServerError

        try:
            await self._s2.get_basin_config(target)
        except S2ServerError as error:
            if error.status_code != 404:
                raise
            config = await origin.get_basin_config(source)
            await self._s2.create_basin(parse_basin_name(target), config=config)

    async def _copy_stream(self, origin: S2, source: StreamRef, target: StreamRef) -> None:
        from s2_sdk import StreamConfig

        from streamfold.cli.records.stream_copy import StreamCopy, create_target, keep_stamps

        there, here = open_basin(origin, source.basin), open_basin(self._s2, target.basin)
        config = await create_target(there, here, source.stream, target.stream)
        copy = StreamCopy(
            open_stream(origin, source, self._key_file),
            open_stream(self._s2, target, self._key_file),
            self._options,
            lambda text: self._output.note(f"{target}: {text}"),
            lambda: keep_stamps(here, target.stream),
        )
        copied = await copy.run()
        final = StreamConfig(timestamping=config.timestamping)
        await here.reconfigure_stream(target.stream, config=final)
        self._show(source, target, copied)

    def _show(self, source: StreamRef, target: StreamRef, copied: CopyReport) -> None:
        shape = {
            "source": str(source),
            "target": str(target),
            "records": copied.records,
            "start": copied.start,
            "tail": copied.tail,
            "shift": copied.shift,
            "verified": copied.verified,
            "digest": copied.digest,
        }
        records = noun(copied.records, "record")
        text = f"{target}  {copied.records} {records}, tail {copied.tail}"
        if copied.shift:
            text += f", each seq_num {copied.shift} lower than in the source"
        if copied.verified is not None:
            text += f", {copied.verified} compared, BLAKE3 {copied.digest}"
        self._output.show(shape, text)


def _ref(basin: str, stream: str) -> StreamRef:
    return StreamRef(BasinName(basin), StreamName(stream))
