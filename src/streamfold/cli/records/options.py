"""Options that several verbs on records share: conditions of appends, the encryption key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli.connection import FILE, open_basin
from streamfold.cli.parameters import StreamRef

if TYPE_CHECKING:
    from s2_sdk import S2, S2Stream

Function = TypeVar("Function", bound=Callable[..., Any])

encryption_option = click.option(
    "--encryption-key-file",
    type=FILE,
    help="File with the stream's encryption key, 32 bytes in base64.",
)


def condition_options(function: Function) -> Function:
    """Add the conditions under which an append is made."""
    fencing = click.option(
        "--fencing-token", metavar="TOKEN", help="Append only if this is the stream's token."
    )
    matching = click.option(
        "--match-seq-num",
        type=click.IntRange(min=0),
        metavar="SEQ_NUM",
        help="Append only if the first record gets this seq_num.",
    )
    return matching(fencing(function))


def open_stream(s2: S2, ref: StreamRef, key_file: Path | None) -> S2Stream:
    """Open the stream, with its encryption key if a file is given."""
    key = key_file.read_text().strip() if key_file else None
    return open_basin(s2, ref.basin).stream(ref.stream, encryption_key=key)
