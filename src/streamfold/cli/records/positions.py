"""Commands for a stream's tail, for trimming, and for its fencing token."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamfold.cli import json_output
from streamfold.cli.connection import (
    condition_options,
    encryption_option,
    open_basin,
    open_stream,
    verb,
)
from streamfold.cli.json_output import rfc3339
from streamfold.cli.output import Output, confirm, yes_option
from streamfold.cli.parameters import FencingToken, stream_argument
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2, AppendAck, Record, S2Stream

#: The largest possible seq_num.
_U64_MAX = (1 << 64) - 1


@verb("check-tail")
@stream_argument
async def check_tail(s2: S2, output: Output, ref: StreamRef) -> None:
    """Show the seq_num that the next record will get, and the timestamp of the last record."""
    tail = await open_basin(s2, ref.basin).stream(ref.stream).check_tail()
    text = f"seq_num {tail.seq_num}"
    if tail.timestamp:
        text += f", timestamp {tail.timestamp}"
        with suppress(ValueError, OverflowError, OSError):  # clients choose timestamps in any unit
            text += f" ({rfc3339(datetime.fromtimestamp(tail.timestamp / 1000, UTC))})"
    output.show(json_output.position(tail), text)


@verb("trim", changes=True)
@stream_argument
@click.argument("seq_num", type=click.IntRange(0, _U64_MAX))
@condition_options
@encryption_option
@yes_option
async def trim(
    s2: S2,
    output: Output,
    ref: StreamRef,
    seq_num: int,
    match_seq_num: int | None,
    fencing_token: str | None,
    encryption_key_file: Path | None,
    yes: bool,
) -> None:
    """Remove all records before SEQ_NUM, so that they can no longer be read.

    A trim is itself a record, and is acknowledged as one. Readers may still get the records for some
    seconds. Asks first, unless --yes is given.
    """
    from s2_sdk import CommandRecord

    stream = open_stream(s2, ref, encryption_key_file)
    if not yes:
        tail = (await stream.check_tail()).seq_num
        uri = f"s2://{ref.basin}/{ref.stream}"
        confirm(f"remove all records before {seq_num} from {uri}, whose tail is {tail}", yes=yes)
    ack = await _append(stream, CommandRecord.trim(seq_num), match_seq_num, fencing_token)
    text = f"trimmed up to seq_num {seq_num}, by record {ack.start.seq_num}"
    output.show(json_output.ack(ack), f"{text}; readers may still get the records for some seconds")


@verb("fence", changes=True)
@stream_argument
@click.argument("new_token", type=FencingToken())
@condition_options
@encryption_option
async def fence(
    s2: S2,
    output: Output,
    ref: StreamRef,
    new_token: str,
    match_seq_num: int | None,
    fencing_token: str | None,
    encryption_key_file: Path | None,
) -> None:
    """Set the stream's fencing token to NEW_TOKEN: appends that carry a different token then fail.

    An empty token removes it. A fence is itself a record, and is acknowledged as one.
    """
    from s2_sdk import CommandRecord

    stream = open_stream(s2, ref, encryption_key_file)
    ack = await _append(stream, CommandRecord.fence(new_token), match_seq_num, fencing_token)
    output.show(json_output.ack(ack), f"fenced with {new_token!r}, by record {ack.start.seq_num}")


async def _append(
    stream: S2Stream, record: Record, match_seq_num: int | None, fencing_token: str | None
) -> AppendAck:
    from s2_sdk import AppendInput

    return await stream.append(AppendInput([record], match_seq_num, fencing_token))
