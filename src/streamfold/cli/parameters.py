"""Command-line parameter types: streams, basins, durations, times and sizes."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from streamfold.errors import InvalidError
from streamfold.model.names import BasinName, StreamName, StreamRef, parse_token
from streamfold.model.units import parse_seconds, parse_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_SCHEME = "s2://"


class ByteSize(click.ParamType[int]):
    """A number of bytes, written like 67108864 or 64MiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return parse_size(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a size: write it like 64MiB", param, ctx)


class FiniteFloat(click.FloatRange):
    """A number within bounds. Rejects inf and nan, which range checks may accept."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class Duration(click.ParamType[int]):
    """Whole seconds, written like 90, 15m, 7d or 1h30m."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value).strip().lower()
        try:
            if text.isascii() and text.isdigit():
                return int(text)
            return parse_seconds(text)
        except ValueError:
            self.fail(f"{value!r} is not a duration: write it like 90s, 15m, 7d", param, ctx)


class RetentionType(Duration):
    """How long records are kept: a duration, or infinite."""

    name = "duration|infinite"

    def convert(  # type: ignore[override]  # the SDK, too, mixes numbers and a word
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "infinite":
            return "infinite"
        return super().convert(value, param, ctx)


class TimeType(click.ParamType[int]):
    """Milliseconds since the Unix epoch, written as a number or in RFC 3339."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            self.fail(
                f"{value!r} is not a time: write milliseconds since 1970, or 2026-01-31T12:00:00Z",
                param,
                ctx,
            )
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)


class RecordFormatType(click.Choice[str]):
    """The format of records as lines: S2's names, and `base64` for `json-base64`."""

    def __init__(self) -> None:
        super().__init__(["text", "json", "json-base64"])

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        return super().convert("json-base64" if value == "base64" else value, param, ctx)


class FencingToken(click.ParamType[str]):
    """A fencing token, which may be empty."""

    name = "token"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        try:
            return parse_token(str(value), "a fencing token")
        except InvalidError as error:
            self.fail(error.message, param, ctx)


class StreamRefType(click.ParamType[StreamRef]):
    """A stream, written as s2://basin/stream or basin/stream."""

    name = "s2://basin/stream"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> StreamRef:
        if isinstance(value, StreamRef):
            return value
        basin, slash, stream = str(value).removeprefix(_SCHEME).partition("/")
        if not (basin and slash and stream):
            self.fail(f"{value!r} names no stream: write s2://basin/stream", param, ctx)
        return StreamRef(BasinName(basin), StreamName(stream))  # the server enforces the rules

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _complete(ctx, incomplete, "")


class BasinType(click.ParamType[str]):
    """A basin, written as s2://basin or basin."""

    name = "basin"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        basin = str(value).removeprefix(_SCHEME).removesuffix("/")
        if not basin or "/" in basin:
            self.fail(f"{value!r} names no basin: write it like s2://basin", param, ctx)
        return basin

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _complete(ctx, incomplete, "/")


def _complete(ctx: click.Context, incomplete: str, removed: str) -> list[CompletionItem]:
    # Imported here, because only shell completion needs it.
    from click.shell_completion import CompletionItem

    from streamfold.cli.setup.completion import names_on_server

    names = names_on_server(ctx, incomplete)
    return [CompletionItem(name.removesuffix(removed) if removed else name) for name in names]


#: The argument of commands on a stream, and of commands on a basin.
stream_argument = click.argument("ref", type=StreamRefType(), metavar="s2://BASIN/STREAM")
basin_argument = click.argument("basin", type=BasinType(), metavar="BASIN")
