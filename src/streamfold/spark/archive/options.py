"""The options of `format("streamfold-archive")`: read, checked and named here alone.

Names follow Delta's for what both have. An unknown name is refused, since a misspelt one would silently
do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from streamfold.spark.errors import OptionError

#: Prefixes of names that say how to reach storage, and with which credentials.
STORAGE, CREDENTIALS = "storage.", "credentials."

_TABLE = ("positionAsOf", "timestampAsOf")
_FEED = ("startingPosition", "endingPosition", "startingTimestamp", "endingTimestamp")
_BOTH = ("path", "columns", "filters", "formats", "keyFields", "cache", "readChangeFeed")
_NAMES = (*_BOTH, *_TABLE, *_FEED)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Storage:
    """Where an archive is, and the credentials to read it; pickled with tasks, never shown whole."""

    uri: str
    #: As `open_blob_store` takes them.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: A profile that says where credentials come from; empty for the storage's own variables.
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Cache folder, on every machine that reads.
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A state of the table: at a position, or as published at a time; neither means the head."""

    position: str | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    storage: Storage
    columns: tuple[str, ...] | None
    #: As JSON; its meaning depends on the columns.
    filters: str | None
    #: Preferred formats, best first; None for the quickest.
    formats: tuple[str, ...] | None
    #: For archives whose manifest does not name them.
    key_fields: tuple[str, ...] | None
    #: The table at this moment, or the end of the change feed.
    at: Moment
    #: Where the change feed starts, exclusive; None to read the table.
    since: Moment | None


def parse_options(given: Mapping[str, str]) -> ArchiveOptions:
    """Parse the options of a read; InvalidError names the wrong one."""
    options = _Options(given)
    feed = options.flag("readChangeFeed")
    options.refuse(_TABLE if feed else _FEED, feed)
    since = options.moment("startingPosition", "startingTimestamp") if feed else None
    if since == Moment():
        raise OptionError(
            "startingPosition",
            "is missing: the change feed starts after it; give it or startingTimestamp",
        )
    return ArchiveOptions(
        storage=options.storage(),
        columns=options.names("columns"),
        filters=options.text("filters"),
        formats=options.names("formats"),
        key_fields=options.names("keyFields"),
        at=options.moment(*(("endingPosition", "endingTimestamp") if feed else _TABLE)),
        since=since,
    )


def parse_streaming(given: Mapping[str, str]) -> ArchiveOptions:
    """Parse the options of a streaming read, which is a change feed without an end."""
    options = _Options(given)
    if not options.flag("readChangeFeed"):
        raise OptionError(
            "readChangeFeed",
            "must be true in streaming, where only changes can be read: set it, and load the rows "
            "with spark.read",
        )
    for name in ("endingPosition", "endingTimestamp"):
        if options.text(name) is not None:
            raise OptionError(
                name, "is for batches, and a streaming query would ignore it: leave it out"
            )
    return parse_options(given)


class _Options:
    """Options by name, ignoring case, and the rules that they must keep."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        known = {name.lower() for name in _NAMES}
        for name in self._given:
            if name not in known and not name.startswith((STORAGE, CREDENTIALS)):
                there = ", ".join(sorted((*_NAMES, f"{STORAGE}*", f"{CREDENTIALS}*")))
                raise OptionError(name, f"is not known; the options are {there}")

    def text(self, name: str) -> str | None:
        return self._given.get(name.lower()) or None

    def flag(self, name: str) -> bool:
        found = (self.text(name) or "false").lower()
        if found not in ("true", "false"):
            raise OptionError(name, f"is {found!r}, it must be true or false")
        return found == "true"

    def names(self, name: str) -> tuple[str, ...] | None:
        text = self.text(name)
        if text is None:
            return None
        found = tuple(part.strip() for part in text.split(","))
        if "" in found or len(set(found)) < len(found):
            raise OptionError(
                name, f"is {text!r}, it must be names, each once, separated by commas"
            )
        return found

    def refuse(self, names: tuple[str, ...], feed: bool) -> None:
        """Refuse options of the table in a change feed, and of the change feed without one."""
        for name in names:
            if self.text(name) is not None:
                rule = "is for tables, and readChangeFeed is true: " if feed else ""
                rest = f"give {' or '.join(_FEED)}" if feed else "needs readChangeFeed to be true"
                raise OptionError(name, rule + rest)

    def moment(self, position: str, time: str) -> Moment:
        at, text = self.text(position), self.text(time)
        if at is not None and text is not None:
            raise OptionError(time, f"cannot be combined with {position}: give one of them")
        return Moment(at, None if text is None else _time(time, text))

    def storage(self) -> Storage:
        uri = self.text("path")
        if uri is None:
            raise OptionError("path", "is missing: name the folder of a table, as in load(uri)")
        if uri.startswith("memory:"):
            raise OptionError(
                "path",
                "is in memory, where only one process sees it: give file:///, s3://, gs:// or az://",
            )
        return Storage(uri, self._below(STORAGE), self._below(CREDENTIALS), self.text("cache"))

    def _below(self, prefix: str) -> dict[str, str]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._given.items()
            if name.startswith(prefix)
        }


def _time(name: str, text: str) -> datetime:
    try:
        if text.isascii() and text.isdigit():
            return _EPOCH + timedelta(milliseconds=int(text))
        found = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        found = None
    if found is None or found.tzinfo is None:
        raise OptionError(
            name,
            f"is {text[:40]!r}, it must be milliseconds since 1970 or a time with a zone such as "
            "2026-01-31T12:00:00Z",
        )
    return found
