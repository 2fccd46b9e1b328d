"""Names, reads and checks the options of `format("streamfold-archive")`.

Options that Delta also has keep Delta's names. Unknown names are rejected, because a misspelt
option would silently do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from streamfold.spark.errors import OptionError

#: Name prefixes of storage options and of the credentials profile.
STORAGE, CREDENTIALS = "storage.", "credentials."

_TABLE = ("positionAsOf", "timestampAsOf")
_FEED = ("startingPosition", "endingPosition", "startingTimestamp", "endingTimestamp")
_BOTH = ("path", "columns", "filters", "formats", "keyFields", "cache", "readChangeFeed")
_NAMES = (*_BOTH, *_TABLE, *_FEED)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ArchiveStorage:
    """An archive's location and credentials. Pickled with tasks. Its repr omits secrets."""

    uri: str
    #: Keyword arguments for `open_blob_store`.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: A credentials profile. Empty to use the storage's own environment variables.
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Cache folder on every machine that reads.
    cache: str | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A table state: at a position or as published at a time. With neither, the head."""

    position: str | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    storage: ArchiveStorage
    columns: tuple[str, ...] | None
    #: Unparsed JSON, because parsing needs the column types.
    filters: str | None
    #: Preferred formats, best first. None selects the fastest.
    formats: tuple[str, ...] | None
    #: Key fields, for archives whose manifest does not name them.
    key_fields: tuple[str, ...] | None
    #: The table state to read, or where the change feed ends.
    at: Moment
    #: Where the change feed starts, exclusive. None to read the table.
    since: Moment | None


def parse_options(raw: Mapping[str, str]) -> ArchiveOptions:
    """Parse the options of a read. Raises OptionError naming the first invalid option."""
    options = _Options(raw)
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


def parse_streaming(raw: Mapping[str, str]) -> ArchiveOptions:
    """Parse the options of a streaming read: a change feed without an end."""
    options = _Options(raw)
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
    return parse_options(raw)


class _Options:
    """Options by case-insensitive name, with their validation rules."""

    def __init__(self, raw: Mapping[str, str]) -> None:
        self._raw = {name.lower(): value for name, value in raw.items()}
        names = {name.lower() for name in _NAMES}
        for name in self._raw:
            if name not in names and not name.startswith((STORAGE, CREDENTIALS)):
                there = ", ".join(sorted((*_NAMES, f"{STORAGE}*", f"{CREDENTIALS}*")))
                raise OptionError(name, f"is not known; the options are {there}")

    def text(self, name: str) -> str | None:
        return self._raw.get(name.lower()) or None

    def flag(self, name: str) -> bool:
        word = (self.text(name) or "false").lower()
        if word not in ("true", "false"):
            raise OptionError(name, f"is {word!r}, it must be true or false")
        return word == "true"

    def names(self, name: str) -> tuple[str, ...] | None:
        text = self.text(name)
        if text is None:
            return None
        names = tuple(part.strip() for part in text.split(","))
        if "" in names or len(set(names)) < len(names):
            raise OptionError(
                name, f"is {text!r}, it must be names, each once, separated by commas"
            )
        return names

    def refuse(self, names: tuple[str, ...], feed: bool) -> None:
        """Reject table options in a change feed read, and change feed options in a table read."""
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

    def storage(self) -> ArchiveStorage:
        uri = self.text("path")
        if uri is None:
            raise OptionError("path", "is missing: name the folder of a table, as in load(uri)")
        if uri.startswith("memory:"):
            raise OptionError(
                "path",
                "is in memory, where only one process sees it: give file:///, s3://, gs:// or az://",
            )
        return ArchiveStorage(
            uri, self._below(STORAGE), self._below(CREDENTIALS), self.text("cache")
        )

    def _below(self, prefix: str) -> dict[str, str]:
        return {
            name.removeprefix(prefix): value
            for name, value in self._raw.items()
            if name.startswith(prefix)
        }


def _time(name: str, text: str) -> datetime:
    try:
        if text.isascii() and text.isdigit():
            return _EPOCH + timedelta(milliseconds=int(text))
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.tzinfo is None:
        raise OptionError(
            name,
            f"is {text[:40]!r}, it must be milliseconds since 1970 or a time with a zone such as "
            "2026-01-31T12:00:00Z",
        )
    return moment
