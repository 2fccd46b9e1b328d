"""How long records are kept, shown where a basin or a stream is created."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from streamfold.model.configs import DEFAULT_RETENTION_SECS, INFINITE, Retention
from streamfold.model.units import duration_text

if TYPE_CHECKING:
    from s2_sdk import BasinConfig, StreamConfig


@dataclass(frozen=True, slots=True)
class RetentionInForce:
    """The retention of a new stream, or of those a basin will get; None if it could not be read."""

    value: Retention | None
    #: Why it could not be read.
    unknown: str = ""

    @property
    def text(self) -> str:
        if self.value is None:
            return "retention unknown"
        if self.value == INFINITE:
            return "keeps records until they are trimmed"
        return f"keeps records for {_age(self.value)}"

    def advice(self, subject: str, change: str) -> str:
        """Advice for a caller who set no retention; empty if records never expire."""
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
    """The retention of a stream that was just created: a failed read does not undo that."""
    from s2_sdk import S2Error

    try:
        return RetentionInForce((await reading).retention_policy or DEFAULT_RETENTION_SECS)
    except S2Error as error:
        return RetentionInForce(None, str(error))


async def of_basin(reading: Awaitable[BasinConfig]) -> RetentionInForce:
    """The retention that streams created in a basin get by default; failures as for a stream."""
    from s2_sdk import S2Error

    try:
        default = (await reading).default_stream_config
    except S2Error as error:
        return RetentionInForce(None, str(error))
    return RetentionInForce((default and default.retention_policy) or DEFAULT_RETENTION_SECS)
