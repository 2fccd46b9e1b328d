"""Options for the configuration of a stream or basin, and the display of its retention."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streamfold.cli.parameters import Duration, RetentionType
from streamfold.model.configs import DEFAULT_RETENTION_SECS, INFINITE, Retention
from streamfold.model.units import duration_text

if TYPE_CHECKING:
    from s2_sdk import BasinConfig, StreamConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_STREAM_OPTIONS = (
    click.option("--storage-class", metavar="NAME", help="Storage class for recent appends."),
    click.option(
        "--retention-policy",
        type=RetentionType(),
        metavar="AGE",
        help="How long records are kept: 7d, 12h, infinite. 7d where neither stream nor basin sets it.",
    ),
    click.option(
        "--timestamping-mode",
        type=click.Choice(["client-prefer", "client-require", "arrival"]),
        help="Whose timestamps records get.",
    ),
    click.option(
        "--timestamping-uncapped/--timestamping-capped",
        default=None,
        help="Whether a record's timestamp may be in the future.",
    ),
    click.option(
        "--delete-on-empty-min-age",
        type=Duration(),
        metavar="AGE",
        help="Delete a stream that was empty for this long; 0 for never.",
    ),
)
_BASIN_OPTIONS = (
    click.option(
        "--create-stream-on-append/--no-create-stream-on-append",
        default=None,
        help="Whether an append to a missing stream creates it.",
    ),
    click.option(
        "--create-stream-on-read/--no-create-stream-on-read",
        default=None,
        help="Whether a read of a missing stream creates it.",
    ),
    click.option(
        "--stream-cipher",
        type=click.Choice(["aegis-256", "aes-256-gcm"]),
        help="Encrypt streams that are created from now on.",
    ),
)
_BASIN_NAMES = ("create_stream_on_append", "create_stream_on_read", "stream_cipher")


def stream_config_options(function: Function) -> Function:
    for option in reversed(_STREAM_OPTIONS):
        function = option(function)
    return function


def basin_config_options(function: Function) -> Function:
    """Add options for the basin itself and for the defaults of its streams."""
    for option in reversed(_BASIN_OPTIONS):
        function = option(function)
    return stream_config_options(function)


def stream_config(options: dict[str, Any]) -> StreamConfig | None:
    """Build the configuration from the options. Returns None if none is given."""
    from s2_sdk import StreamConfig, Timestamping, TimestampingMode

    if all(value is None for value in options.values()):
        return None
    mode, uncapped = options["timestamping_mode"], options["timestamping_uncapped"]
    timestamping = None
    if mode is not None or uncapped is not None:
        timestamping = Timestamping(None if mode is None else TimestampingMode(mode), uncapped)
    return StreamConfig(
        storage_class=options["storage_class"],
        retention_policy=options["retention_policy"],
        timestamping=timestamping,
        delete_on_empty_min_age=options["delete_on_empty_min_age"],
    )


def basin_config(options: dict[str, Any]) -> BasinConfig | None:
    """Build the configuration from the options. Returns None if none is given."""
    from s2_sdk import BasinConfig, Encryption

    own = {name: options[name] for name in _BASIN_NAMES}
    default = stream_config({name: value for name, value in options.items() if name not in own})
    if default is None and all(value is None for value in own.values()):
        return None
    cipher = own.pop("stream_cipher")
    return BasinConfig(
        default_stream_config=default,
        stream_cipher=None if cipher is None else Encryption(cipher),
        **own,
    )


def require_some(config: object) -> None:
    """Reject a reconfiguration that would change nothing."""
    if config is None:
        raise click.UsageError("nothing to change: give at least one option to set")


@dataclass(frozen=True, slots=True)
class RetentionInForce:
    """The retention of a new stream, or of a basin's future streams; None if it could not be read."""

    value: Retention | None
    #: Why the retention could not be read.
    unknown: str = ""

    @property
    def text(self) -> str:
        if self.value is None:
            return "retention unknown"
        if self.value == INFINITE:
            return "keeps records until they are trimmed"
        return f"keeps records for {_age(self.value)}"

    def advice(self, subject: str, change: str) -> str:
        """Return advice for a user who set no retention, or nothing if records never expire."""
        if self.value is None:
            return f"The retention of {subject} could not be read: {self.unknown}"
        if self.value == INFINITE:
            return ""
        return (
            f"Records of {subject} are removed {_age(self.value)} after they arrive. "
            f"To keep them: {change} --retention-policy infinite"
        )


def _age(seconds: Retention) -> str:
    return duration_text(timedelta(seconds=int(seconds)))


async def of_stream(reading: Awaitable[StreamConfig]) -> RetentionInForce:
    """Return the retention of a stream that was just created. A failed read is not an error."""
    from s2_sdk import S2Error

    try:
        return RetentionInForce((await reading).retention_policy or DEFAULT_RETENTION_SECS)
    except S2Error as error:
        return RetentionInForce(None, str(error))


async def of_basin(reading: Awaitable[BasinConfig]) -> RetentionInForce:
    """Return the default retention of streams in a basin. A failed read is not an error."""
    from s2_sdk import S2Error

    try:
        default = (await reading).default_stream_config
    except S2Error as error:
        return RetentionInForce(None, str(error))
    return RetentionInForce((default and default.retention_policy) or DEFAULT_RETENTION_SECS)
