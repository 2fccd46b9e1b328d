"""Configurations of basins and streams as JSON, and the changes to them.

Three shapes of a stream's configuration meet here. A request's is a layer: members may be absent
or null, which is the same. A change is tri-state: absent keeps a member, null resets it. What a
stream has is resolved: every member has a value.
"""

from __future__ import annotations

import enum
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from streamfold.model import configs as model
from streamfold.model.configs import Cipher, Retention, StorageClass, TimestampMode
from streamfold.wire.s2.errors import BadJsonError
from streamfold.wire.s2.json_body import Unsigned, check_u64, choose, decode_json

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)


class _Infinite(Struct):
    pass


class RetentionJson(Struct):
    """`{"age": seconds}` or `{"infinite": {}}`."""

    age: Unsigned | UnsetType = UNSET
    infinite: _Infinite | UnsetType = UNSET

    def to_model(self) -> Retention:
        if (self.age is UNSET) == (self.infinite is UNSET):
            raise BadJsonError("retention_policy must have either an age or infinite")
        if isinstance(self.age, UnsetType):
            return model.INFINITE
        check_u64(self.age, "retention age")
        return self.age

    @staticmethod
    def of(retention: Retention) -> RetentionJson:
        if isinstance(retention, int):
            return RetentionJson(age=retention)
        return RetentionJson(infinite=_Infinite())


class TimestampingJson(Struct):
    mode: str | None = None
    uncapped: bool | None = None


class DeleteOnEmptyJson(Struct):
    min_age_secs: Unsigned = 0


class StreamConfigJson(Struct):
    """A stream's configuration as requested, or a basin's default for streams."""

    storage_class: str | None = None
    retention_policy: RetentionJson | None = None
    timestamping: TimestampingJson | None = None
    delete_on_empty: DeleteOnEmptyJson | None = None
    #: Streamfold's own: left out where nothing is set, so that S2's clients see S2's members alone.
    trim_on_snapshot: bool | UnsetType | None = UNSET

    def to_model(self) -> model.StreamConfigLayer:
        """The layer that was asked for; refuses ages that the model refuses."""
        timestamping = self.timestamping or TimestampingJson()
        min_age = None if self.delete_on_empty is None else self.delete_on_empty.min_age_secs
        trims = self.trim_on_snapshot
        check_u64(min_age, "min_age_secs")
        return model.StreamConfigLayer(
            storage_class=_chosen(StorageClass, self.storage_class, "storage_class"),
            retention=None if self.retention_policy is None else self.retention_policy.to_model(),
            timestamp_mode=_chosen(TimestampMode, timestamping.mode, "timestamping.mode"),
            timestamp_uncapped=timestamping.uncapped,
            delete_on_empty_secs=min_age,
            trim_on_snapshot=None if isinstance(trims, UnsetType) else trims,
        )

    @staticmethod
    def of(config: model.StreamConfig | model.StreamConfigLayer) -> StreamConfigJson:
        """Every member of `config` that has a value; a group without any is null."""
        timestamping = TimestampingJson(config.timestamp_mode, config.timestamp_uncapped)
        min_age = config.delete_on_empty_secs
        return StreamConfigJson(
            config.storage_class,
            None if config.retention is None else RetentionJson.of(config.retention),
            None if timestamping == TimestampingJson() else timestamping,
            None if min_age is None else DeleteOnEmptyJson(min_age),
            UNSET if config.trim_on_snapshot is None else config.trim_on_snapshot,
        )


class BasinConfigJson(Struct):
    default_stream_config: StreamConfigJson | None = None
    stream_cipher: str | None = None
    create_stream_on_append: bool | None = None
    create_stream_on_read: bool | None = None

    def to_model(self) -> model.BasinConfig:
        return model.BasinConfig(
            (self.default_stream_config or StreamConfigJson()).to_model(),
            _chosen(Cipher, self.stream_cipher, "stream_cipher"),
            bool(self.create_stream_on_append),
            bool(self.create_stream_on_read),
        )

    @staticmethod
    def of(config: model.BasinConfig) -> BasinConfigJson:
        streams = StreamConfigJson.of(config.default_stream_config)
        return BasinConfigJson(
            None if streams == StreamConfigJson() else streams,
            config.stream_cipher,
            config.create_stream_on_append,
            config.create_stream_on_read,
        )


class _TimestampingChange(Struct):
    mode: str | UnsetType | None = UNSET
    uncapped: bool | UnsetType | None = UNSET


class _DeleteOnEmptyChange(Struct):
    min_age_secs: Unsigned | UnsetType | None = UNSET


class _StreamChange(Struct):
    storage_class: str | UnsetType | None = UNSET
    retention_policy: RetentionJson | UnsetType | None = UNSET
    timestamping: _TimestampingChange | UnsetType | None = UNSET
    delete_on_empty: _DeleteOnEmptyChange | UnsetType | None = UNSET
    trim_on_snapshot: bool | UnsetType | None = UNSET

    def to_model(self) -> model.StreamReconfiguration:
        retention = self.retention_policy
        timestamping = _group(
            self.timestamping, keep=_TimestampingChange(), reset=_TimestampingChange(None, None)
        )
        min_age = _group(
            self.delete_on_empty, keep=_DeleteOnEmptyChange(), reset=_DeleteOnEmptyChange(None)
        ).min_age_secs
        if isinstance(min_age, int):
            check_u64(min_age, "min_age_secs")
        return model.StreamReconfiguration(
            storage_class=_change_to(StorageClass, self.storage_class, "storage_class"),
            retention=_change(
                retention.to_model() if isinstance(retention, RetentionJson) else retention
            ),
            timestamp_mode=_change_to(TimestampMode, timestamping.mode, "timestamping.mode"),
            timestamp_uncapped=_change(timestamping.uncapped),
            delete_on_empty_secs=_change(min_age),
            trim_on_snapshot=_change(self.trim_on_snapshot),
        )


class _BasinChange(Struct):
    default_stream_config: _StreamChange | UnsetType | None = UNSET
    stream_cipher: str | UnsetType | None = UNSET
    #: null is the same as absent: a basin has nothing to fall back to.
    create_stream_on_append: bool | UnsetType | None = UNSET
    create_stream_on_read: bool | UnsetType | None = UNSET

    def to_model(self) -> model.BasinReconfiguration:
        streams = self.default_stream_config
        return model.BasinReconfiguration(
            _change(streams.to_model() if isinstance(streams, _StreamChange) else streams),
            _change_to(Cipher, self.stream_cipher, "stream_cipher"),
            _switch(self.create_stream_on_append),
            _switch(self.create_stream_on_read),
        )


_STREAM_CONFIG: Final = msgspec.json.Decoder(StreamConfigJson | None)
_STREAM_CHANGE: Final = msgspec.json.Decoder(_StreamChange)
_BASIN_CHANGE: Final = msgspec.json.Decoder(_BasinChange)


def decode_stream_config(body: bytes) -> model.StreamConfigLayer:
    """A stream's configuration as requested; an empty body leaves all to the defaults."""
    config = decode_json(_STREAM_CONFIG, body) if body else None
    return (config or StreamConfigJson()).to_model()


def decode_stream_reconfiguration(body: bytes) -> model.StreamReconfiguration:
    return decode_json(_STREAM_CHANGE, body).to_model()


def decode_basin_reconfiguration(body: bytes) -> model.BasinReconfiguration:
    return decode_json(_BASIN_CHANGE, body).to_model()


def encode_stream_config(config: model.StreamConfig) -> bytes:
    """Fully resolved: all four members of S2, each with a value, and of ours what is set."""
    return msgspec.json.encode(StreamConfigJson.of(config))


def encode_basin_config(config: model.BasinConfig) -> bytes:
    """The default for streams has only what was set explicitly; null where nothing was."""
    return msgspec.json.encode(BasinConfigJson.of(config))


def _chosen(choices: type[E], text: str | None, what: str) -> E | None:
    return None if text is None else choose(choices, text, what)


def _change_to(choices: type[E], text: str | UnsetType | None, what: str) -> E | model.Unset | None:
    return _change(choose(choices, text, what) if isinstance(text, str) else text)


def _group(given: T | UnsetType | None, *, keep: T, reset: T) -> T:
    """null on a group resets all its members, an absent group keeps them all."""
    if given is None:
        return reset
    return keep if isinstance(given, UnsetType) else given


def _change(value: T | UnsetType | None) -> T | model.Unset | None:
    return model.UNSET if isinstance(value, UnsetType) else value


def _switch(value: bool | UnsetType | None) -> bool | model.Unset:
    return model.UNSET if value is None or isinstance(value, UnsetType) else value
