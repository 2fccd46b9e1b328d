"""Basin and stream configurations, and how their layers are resolved.

A stream's configuration is resolved once, on creation: from the request, then the basin's default, then
the system's. Later changes to a basin never affect existing streams.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, Literal, TypeAlias, TypeVar

from streamfold.errors import InvalidError


class StorageClass(enum.StrEnum):
    STANDARD = "standard"
    EXPRESS = "express"


class TimestampMode(enum.StrEnum):
    CLIENT_PREFER = "client-prefer"
    CLIENT_REQUIRE = "client-require"
    ARRIVAL = "arrival"


class Cipher(enum.StrEnum):
    AEGIS_256 = "aegis-256"
    AES_256_GCM = "aes-256-gcm"


class Unset(enum.Enum):
    """Marks a member that a reconfiguration omits, as opposed to one that it resets."""

    UNSET = enum.auto()


UNSET: Final = Unset.UNSET

#: Unlimited retention.
INFINITE: Final = "infinite"
#: Seconds from a record's arrival to its expiry, or never.
Retention: TypeAlias = int | Literal["infinite"]

T = TypeVar("T")
#: UNSET leaves a member unchanged, None resets it to the layer below, a value sets it.
Change: TypeAlias = T | Unset | None

#: 7 days, as in S2.
DEFAULT_RETENTION_SECS = 604_800


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """A stream's resolved configuration."""

    storage_class: StorageClass = StorageClass.EXPRESS
    retention: Retention = DEFAULT_RETENTION_SECS
    timestamp_mode: TimestampMode = TimestampMode.CLIENT_PREFER
    timestamp_uncapped: bool = False
    #: Seconds without records after which the stream is deleted. 0 = never.
    delete_on_empty_secs: int = 0
    #: Whether publishing a snapshot trims the records that it covers. None leaves the decision to
    #: the stream's creation traits, then to the store.
    trim_on_snapshot: bool | None = None


SYSTEM_DEFAULTS: Final = StreamConfig()


@dataclass(frozen=True, slots=True)
class StreamConfigLayer:
    """A requested configuration. Members that are None inherit from the layer below."""

    storage_class: StorageClass | None = None
    retention: Retention | None = None
    timestamp_mode: TimestampMode | None = None
    timestamp_uncapped: bool | None = None
    delete_on_empty_secs: int | None = None
    trim_on_snapshot: bool | None = None

    def __post_init__(self) -> None:
        check_choice(StorageClass, self.storage_class, "storage class")
        check_choice(TimestampMode, self.timestamp_mode, "timestamping mode")
        check_retention(self.retention)
        check_min_age(self.delete_on_empty_secs)


@dataclass(frozen=True, slots=True)
class BasinConfig:
    """A basin's configuration and its defaults for new streams."""

    default_stream_config: StreamConfigLayer = field(default_factory=StreamConfigLayer)
    stream_cipher: Cipher | None = None
    create_stream_on_append: bool = False
    create_stream_on_read: bool = False

    def __post_init__(self) -> None:
        check_choice(Cipher, self.stream_cipher, "cipher")


@dataclass(frozen=True, slots=True)
class StreamReconfiguration:
    """A change to a stream's configuration, or to a basin's stream defaults."""

    storage_class: Change[StorageClass] = UNSET
    retention: Change[Retention] = UNSET
    timestamp_mode: Change[TimestampMode] = UNSET
    timestamp_uncapped: Change[bool] = UNSET
    delete_on_empty_secs: Change[int] = UNSET
    trim_on_snapshot: Change[bool] = UNSET

    def __post_init__(self) -> None:
        check_choice(StorageClass, self.storage_class, "storage class")
        check_choice(TimestampMode, self.timestamp_mode, "timestamping mode")
        if not isinstance(self.retention, Unset):
            check_retention(self.retention)
        if not isinstance(self.delete_on_empty_secs, Unset):
            check_min_age(self.delete_on_empty_secs)


@dataclass(frozen=True, slots=True)
class BasinReconfiguration:
    """A change to a basin's configuration."""

    default_stream_config: StreamReconfiguration | Unset | None = UNSET
    stream_cipher: Change[Cipher] = UNSET
    create_stream_on_append: bool | Unset = UNSET
    create_stream_on_read: bool | Unset = UNSET

    def __post_init__(self) -> None:
        check_choice(Cipher, self.stream_cipher, "cipher")


def check_choice(choices: type[enum.StrEnum], value: object, what: str) -> None:
    """Reject a value that is not one of `choices`, even if its type was never checked."""
    if not (value is None or isinstance(value, Unset | choices)):
        raise InvalidError(f"{what} {value!r} is unknown: choose from {', '.join(choices)}")


def check_retention(retention: Retention | None) -> None:
    """Reject a retention age that is not a number, or that would remove records at once."""
    if retention is None or retention == INFINITE:
        return
    if not isinstance(retention, int) or retention <= 0:
        raise InvalidError(
            f"retention age {retention!r} must be a positive number of seconds, or infinite"
        )


def check_min_age(seconds: int | None) -> None:
    if seconds is not None and seconds < 0:
        raise InvalidError(f"delete-on-empty age {seconds} must be 0 (off) or more seconds")


@lru_cache(maxsize=1000)
def resolve(requested: StreamConfigLayer, basin: StreamConfigLayer) -> StreamConfig:
    """Return a new stream's configuration: as requested, else the basin's, else the system's.

    Equal configurations share one object.
    """
    return _fill(_fill(SYSTEM_DEFAULTS, basin), requested)


@lru_cache(maxsize=1000)
def shared(config: StreamConfig) -> StreamConfig:
    """Return one object for all equal configurations, because many streams share them."""
    return config


def reconfigure_stream(
    current: StreamConfig, change: StreamReconfiguration, basin: StreamConfigLayer
) -> StreamConfig:
    """Apply `change` to `current`. Reset members fall back to the basin, then the system."""
    reset_to = _fill(SYSTEM_DEFAULTS, basin)
    changed = {
        name: getattr(reset_to, name) if value is None else value
        for name in StreamReconfiguration.__slots__
        if (value := getattr(change, name)) is not UNSET
    }
    return replace(current, **changed)


def reconfigure_basin(current: BasinConfig, change: BasinReconfiguration) -> BasinConfig:
    """Apply `change` to `current`. Reset members become unset."""
    streams = change.default_stream_config
    if streams is None:
        defaults = StreamConfigLayer()
    elif isinstance(streams, Unset):
        defaults = current.default_stream_config
    else:
        changed = {
            name: value
            for name in StreamReconfiguration.__slots__
            if (value := getattr(streams, name)) is not UNSET
        }
        defaults = replace(current.default_stream_config, **changed)
    rest = {
        name: value
        for name in ("stream_cipher", "create_stream_on_append", "create_stream_on_read")
        if (value := getattr(change, name)) is not UNSET
    }
    return replace(current, default_stream_config=defaults, **rest)


def _fill(below: StreamConfig, layer: StreamConfigLayer) -> StreamConfig:
    members = {
        name: value
        for name in StreamConfigLayer.__slots__
        if (value := getattr(layer, name)) is not None
    }
    return replace(below, **members)
