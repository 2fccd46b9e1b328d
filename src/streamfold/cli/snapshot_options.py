"""Options that the verbs of `streamfold snapshot` share, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli.parameters import Duration

if TYPE_CHECKING:
    from streamfold.follow import Keeping, Snapshots
    from streamfold.follow.intake import Folding

F = TypeVar("F", bound=Callable[..., Any])


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


where_options = _options(
    click.option(
        "--snapshots",
        "where",
        default="auto",
        show_default=True,
        metavar="auto[:URL]|in-stream|URL",
        help="Where snapshots live: outside at a URL (s3://, gs://, az://, file:///), in the stream, "
        "or in the stream while they fit one record and then at the URL.",
    ),
    click.option(
        "--codec",
        type=click.Choice(["json", "msgpack"]),
        default="json",
        show_default=True,
        help="How states are written.",
    ),
)
folding_options = _options(
    click.option(
        "--fold",
        required=True,
        metavar="NAME",
        help="last-value, merge-patch, counter, or one of yours as module:function.",
    ),
    click.option(
        "--key-field", default="key", show_default=True, help="last-value: field of the key."
    ),
    click.option("--key-header", help="last-value: header of the key, instead of a field."),
    click.option("--initial", metavar="JSON", help="First state, for a fold of yours."),
)
keeping_options = _options(
    click.option("--trim", is_flag=True, help="Trim the stream to an external snapshot's cursor."),
    click.option("--keep", type=click.IntRange(min=1), help="External snapshots to keep."),
    click.option("--max-age", type=Duration(), help="Delete external snapshots older than this."),
    click.option("--fencing-token", help="Token to show with every append."),
    click.option("--fence", is_flag=True, help="Set that token first."),
)


def fold_of(given: dict[str, Any]) -> Folding[Any]:
    """What `folding_options` asked for."""
    from streamfold.follow.folds import find_fold

    return find_fold(
        given["fold"],
        key_field=given["key_field"],
        key_header=given["key_header"],
        initial=given["initial"],
    )


def keeping_of(given: dict[str, Any]) -> Keeping:
    """What `keeping_options` asked for."""
    from streamfold.follow import Keeping

    return Keeping(
        given["trim"], given["keep"], given["max_age"], given["fencing_token"], given["fence"]
    )


def snapshots_of(where: str, codec: str) -> Snapshots[Any]:
    """What `where_options` asked for."""
    from streamfold.follow import JsonCodec, MsgpackCodec, auto, external, in_stream

    chosen = JsonCodec[Any]() if codec == "json" else MsgpackCodec[Any]()
    if where == "in-stream":
        return in_stream(codec=chosen)
    if where == "auto" or where.startswith("auto:"):
        return auto(where.removeprefix("auto").removeprefix(":") or None, codec=chosen)
    return external(where, codec=chosen)
