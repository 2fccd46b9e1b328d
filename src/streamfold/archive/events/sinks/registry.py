"""Sinks by configuration.

    {"type": "sns",         "topic_arn": …}
    {"type": "sqs",         "queue_url": …}
    {"type": "kinesis",     "stream": …}
    {"type": "eventbridge", "bus": …}
    {"type": "webhook",     "url": …, "secret_env": … or "secret_file": …, "ca_file": …}

Those of AWS also take `credentials`, the name of a profile, and `region`.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from streamfold.archive.destinations.aws_credentials import Profiles
from streamfold.archive.events.secret_references import SecretReference
from streamfold.archive.events.sink import EventSink
from streamfold.archive.events.sinks.eventbridge import EventBridgeSink
from streamfold.archive.events.sinks.kinesis import KinesisSink
from streamfold.archive.events.sinks.sns import SnsSink
from streamfold.archive.events.sinks.sqs import SqsSink
from streamfold.archive.events.sinks.webhook import WebhookSink
from streamfold.errors import InvalidError


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _AwsConfig(_Config, frozen=True, kw_only=True, tag_field="type"):
    credentials: str | None = None
    region: str | None = None


class _Sns(_AwsConfig, frozen=True, kw_only=True, tag="sns"):
    topic_arn: str


class _Sqs(_AwsConfig, frozen=True, kw_only=True, tag="sqs"):
    queue_url: str


class _Kinesis(_AwsConfig, frozen=True, kw_only=True, tag="kinesis"):
    stream: str


class _EventBridge(_AwsConfig, frozen=True, kw_only=True, tag="eventbridge"):
    bus: str


class _Webhook(_Config, frozen=True, kw_only=True, tag_field="type", tag="webhook"):
    url: str
    secret_env: str | None = None
    secret_file: str | None = None
    #: PEM file with the only trusted certificates, instead of those of the machine.
    ca_file: str | None = None


def open_sink(raw: object, profiles: Profiles, *, path: str) -> EventSink:
    """Return the sink that plain configuration values describe; nothing is contacted yet.

    Errors name `path`, where the values were found.
    """
    try:
        config = msgspec.convert(raw, _Sns | _Sqs | _Kinesis | _EventBridge | _Webhook)
    except msgspec.ValidationError as error:
        # The text names fields and types, never values, except for an unknown type.
        raise InvalidError(f"{path}: {error}") from None
    try:
        return _open(config, profiles, path)
    except InvalidError as error:
        if error.message.startswith(path):
            raise
        raise InvalidError(f"{path}: {error.message}") from None


def _open(
    config: _Sns | _Sqs | _Kinesis | _EventBridge | _Webhook, profiles: Profiles, path: str
) -> EventSink:
    if isinstance(config, _Webhook):
        return WebhookSink(config.url, secret=_secret(config), tls=_tls(config))
    access = profiles.access(config.credentials, path=f"{path}.credentials", region=config.region)
    if isinstance(config, _Sns):
        return SnsSink(config.topic_arn, access)
    if isinstance(config, _Sqs):
        return SqsSink(config.queue_url, access)
    if isinstance(config, _Kinesis):
        return KinesisSink(config.stream, access)
    return EventBridgeSink(config.bus, access)


def _tls(config: _Webhook) -> ssl.SSLContext | None:
    if config.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:  # an SSLError is one
        raise InvalidError(
            f"ca_file {config.ca_file!r} has no certificates that can be used "
            f"({error.strerror or type(error).__name__}): give a PEM file"
        ) from None


def _secret(config: _Webhook) -> SecretReference | None:
    if config.secret_env is None and config.secret_file is None:
        return None
    file = Path(config.secret_file) if config.secret_file is not None else None
    return SecretReference(config.secret_env, file)
