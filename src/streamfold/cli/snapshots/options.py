"""Options shared by the commands of `streamfold snapshot`, and the objects built from them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from streamfold.cli.connection import token_for
from streamfold.cli.parameters import Duration, FencingToken
from streamfold.extensions import must_be_one_of
from streamfold.model.names import StreamRef

if TYPE_CHECKING:
    from streamfold.follow import RetentionRules, Snapshots, SnapshotStore
    from streamfold.follow.restore.replay import FoldSpec

F = TypeVar("F", bound=Callable[..., Any])
#: Placements that are neither URLs nor folders. A similar name is probably misspelled.
_KEYWORDS: Final = ("auto", "in-stream")


class CodecName(click.ParamType[str]):
    """The id of a codec for JSON states. Codecs are loaded only for help and errors."""

    name = "codec"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self._ids())}]"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from streamfold.follow import CODECS

        if value in CODECS and CODECS.get(value).takes_json:
            return value
        raise self.fail(f"{value!r} {must_be_one_of(self._ids(), value)}.", param, ctx)

    def _ids(self) -> list[str]:
        from streamfold.follow import CODECS

        return [codec.id for codec in CODECS if codec.takes_json]


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
        metavar="auto[:URL]|in-stream|URL|FOLDER",
        help="Where snapshots are stored: at a URL (s3://, gs://, az://), in a folder, on a Streamfold "
        "server (http://host:port), or in the stream. auto: in the stream; with a URL, there once they "
        "exceed one record.",
    ),
    click.option(
        "--shape",
        type=click.Choice(["streamfold", "plain"]),
        default="streamfold",
        show_default=True,
        help="How new snapshots look: Streamfold's own, with digests, or plain JSON with the cursor "
        "in the name or in the record. Both are read.",
    ),
    click.option(
        "--no-trim",
        is_flag=True,
        help="Do not trim the records that snapshots in the stream cover.",
    ),
    click.option(
        "--codec",
        type=CodecName(),
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
        help="last-value, merge-patch, counter, or your own as module:function.",
    ),
    click.option(
        "--key-field", default="key", show_default=True, help="last-value: field of the key."
    ),
    click.option("--key-header", help="last-value: header of the key, instead of a field."),
    click.option("--initial", metavar="JSON", help="First state, for your own fold."),
)
retention_options = _options(
    click.option("--trim", is_flag=True, help="Trim the stream to an external snapshot's cursor."),
    click.option("--keep", type=click.IntRange(min=1), help="External snapshots to keep."),
    click.option("--max-age", type=Duration(), help="Delete external snapshots older than this."),
    click.option("--fencing-token", type=FencingToken(), help="Token to send with every append."),
    click.option("--fence", is_flag=True, help="Set that token first."),
)


def fold_of(options: dict[str, Any]) -> FoldSpec[Any]:
    """Build the fold from `folding_options`."""
    from streamfold.follow.folds import find_fold

    return find_fold(
        options["fold"],
        key_field=options["key_field"],
        key_header=options["key_header"],
        initial=options["initial"],
    )


def retention_of(options: dict[str, Any]) -> RetentionRules:
    """Build the rules from `retention_options`."""
    from streamfold.follow import RetentionRules

    return RetentionRules(
        options["trim"],
        options["keep"],
        options["max_age"],
        options["fencing_token"],
        options["fence"],
    )


def snapshots_of(options: dict[str, Any], ref: StreamRef) -> Snapshots[Any]:
    """Build the snapshots of the stream `ref` from `where_options`."""
    from streamfold.follow import CODECS, auto, external, in_stream

    where, shape, trim = options["where"], options["shape"], not options["no_trim"]
    codec = CODECS.get(options["codec"]).open()
    if where == "in-stream":
        return in_stream(codec=codec, shape=shape, trim=trim)
    if where == "auto":
        return auto(codec=codec, shape=shape, trim=trim)
    url = where.removeprefix("auto:")
    if not {":", "/"} & set(url) and get_close_matches(url, _KEYWORDS, n=1):
        raise click.UsageError(
            f"--snapshots {url!r} is neither auto nor in-stream: for a folder, write ./{url}"
        )
    served = url.startswith(("http://", "https://"))
    store = _served(url, ref, shape) if served else url
    naming = "streamfold" if served else shape
    if where.startswith("auto:"):
        return auto(store, codec=codec, naming=naming, shape=shape, trim=trim)
    return external(store, codec=codec, naming=naming)


def _served(endpoint: str, ref: StreamRef, shape: str) -> SnapshotStore:
    """Open the stream's snapshots on the server at `endpoint`."""
    from streamfold.follow import ServerSnapshots

    if shape != "streamfold":
        raise click.UsageError("a server keeps snapshots in Streamfold's own shape: omit --shape")
    return ServerSnapshots(endpoint, ref.basin, ref.stream, token_for(endpoint))
