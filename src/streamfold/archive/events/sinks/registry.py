"""The types of event sinks, and how a sink is opened from plain configuration values."""

from __future__ import annotations

from typing import Any

import msgspec

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events.sink import EventSink, SinkContext, SinkType
from streamfold.errors import InvalidError
from streamfold.extensions import Registry

_SINKS = "streamfold.archive.events.sinks"

#: Every type of sink that `open_sink` knows.
SINKS: Registry[SinkType[Any]] = Registry(
    "streamfold.sinks",
    "event sink",
    SinkType,
    {
        "sns": f"{_SINKS}.sns:SNS",
        "sqs": f"{_SINKS}.sqs:SQS",
        "kinesis": f"{_SINKS}.kinesis:KINESIS",
        "eventbridge": f"{_SINKS}.eventbridge:EVENTBRIDGE",
        "webhook": f"{_SINKS}.webhook:WEBHOOK",
    },
)


class _Typed(msgspec.Struct):
    type: str


def open_sink(raw: object, profiles: Profiles, *, path: str) -> EventSink:
    """Return the sink that plain values describe: its `type` and its options. Contacts nothing yet.

    Errors name `path`, where the values were found.
    """
    try:
        given = msgspec.convert(raw, dict[str, Any])
        kind = SINKS.get(msgspec.convert(given, _Typed).type)
        del given["type"]
        return kind.open(msgspec.convert(given, kind.options), SinkContext(profiles, path))
    except msgspec.ValidationError as error:
        # The text names fields and types, never values.
        raise InvalidError(f"{path}: {error}") from None
    except InvalidError as error:
        if error.message.startswith(path):
            raise
        raise InvalidError(f"{path}: {error.message}") from None
