"""Basins and streams as the catalog describes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from streamfold.model.configs import Cipher
from streamfold.model.names import BasinName, StreamName
from streamfold.model.traits import StreamTraits


@dataclass(frozen=True, slots=True)
class BasinInfo:
    """A basin in a listing; `deleted_at` is set while its deletion is under way."""

    name: BasinName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    #: Where its records are; None = the store's default.
    location: str | None = None


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """A stream in a listing; `deleted_at` is set while its deletion is under way."""

    name: StreamName
    #: Milliseconds since the Unix epoch.
    created_at: int
    deleted_at: int | None
    cipher: Cipher | None


class StreamStatus(msgspec.Struct, frozen=True):
    """The durable state of a stream."""

    id: int
    traits: StreamTraits
    #: The first record kept, and the seq_num of the next one.
    first: int
    tail: int
    closed: bool


class Provision(enum.StrEnum):
    """What a create or an ensure did."""

    CREATED = "created"
    UPDATED = "updated"
    NOOP = "noop"


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Part of a listing, in byte order of names; `has_more` says whether another follows."""

    items: tuple[Item, ...]
    has_more: bool
