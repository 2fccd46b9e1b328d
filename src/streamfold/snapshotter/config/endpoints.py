"""Reads the settings of sources, destinations, event sinks and dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from streamfold.archive.destinations.aws_credentials import Profile, Profiles
from streamfold.archive.events.sink import SINKS
from streamfold.blob import DESTINATIONS
from streamfold.errors import InvalidError
from streamfold.model.names import parse_bucket_name, parse_stream_name
from streamfold.snapshotter.config.model import (
    DEFAULT_BASIN,
    PUBLISH,
    REFUSE,
    DeadLetterSettings,
    DestinationSettings,
    EventSettings,
    SourceSettings,
)
from streamfold.snapshotter.config.section import Section, read_extension, read_options


def read_source(section: Section) -> SourceSettings:
    table, namespace, stream = (
        section.required("table"),
        section.text("schema"),
        section.text("stream"),
    )
    section.raw(
        "local_snapshot_path"
    )  # accepted and ignored: a cache that this snapshotter does not need
    settings = SourceSettings(
        server=section.parsed("server", "", _origin),
        basin=_checked(section, "basin", parse_bucket_name) or DEFAULT_BASIN,
        stream=stream or "",
        table=table,
        namespace=namespace,
        client_id=section.text("client_id"),
        start=section.parsed("start", "earliest", _start),
        on_trimmed=section.choice("on_trimmed", (REFUSE, PUBLISH), REFUSE),
        token_env=section.text("token_env") or "S2_ACCESS_TOKEN",
        token_file=_path(section.text("token_file")),
    )
    if not section.holds("server"):
        section.problem("server", "is missing")
    # Published configurations name a table and no stream: the stream has the table's name.
    settings = replace(settings, stream=stream or settings.qualified)
    try:
        parse_stream_name(settings.stream or "-")
    except InvalidError as error:
        section.problem("stream", error.message)
    section.close()
    return settings


def _origin(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.username or parts.password or parts.query:
        # The text is not repeated: it may hold a secret.
        raise InvalidError("must be an origin alone; tokens are named by token_env or token_file")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError("must be host:port, or an origin such as https://host:port")
    if port == 0:
        raise ValueError("must have a port that is not 0")
    return url.rstrip("/")


def _start(text: str) -> str:
    if text in ("earliest", "latest") or re.fullmatch(r"0|[1-9][0-9]{0,18}", text):
        return text
    raise ValueError("must be earliest, latest, or a sequence number")


def read_destination(section: Section) -> DestinationSettings | None:
    kind = read_extension(section, "type", DESTINATIONS)
    options = read_options(section, kind.options) if kind else None
    if kind is None or options is None:
        return None
    try:
        url = kind.locate(options)
    except InvalidError as error:
        section.problem("", error.message)
        return None
    given = {name: getattr(options, name) for name in kind.open_options}
    return DestinationSettings(
        kind.id,
        url,
        {name: value for name, value in given.items() if value is not None},
        options.credentials if kind.takes_credentials else None,
    )


def read_event(section: Section) -> EventSettings | None:
    kind = read_extension(section, "type", SINKS)
    options = read_options(section, kind.options) if kind else None
    if kind is None or options is None:
        return None
    given = {
        name: value for name, value in msgspec.to_builtins(options).items() if value is not None
    }
    return EventSettings(kind.id, {"type": kind.id, **given})


def read_credentials(section: Section) -> dict[str, Profile]:
    """Read profiles by name, each checked as on use."""
    found = {}
    for name in section.names():
        raw = section.raw(name)
        try:
            Profiles.parse({name: raw}, path=section.path(""))
            found[name] = Profile(**raw)
        except InvalidError as error:
            section.report(error.message)
    return found


def check_credentials(
    path: str, name: str | None, profiles: Mapping[str, Profile], problems: list[str]
) -> None:
    """Refuse credentials that are not configured."""
    if name is not None and name not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        problems.append(f"{path}: {name} is not under credentials, which has {known}")


def read_dead_letters(section: Section) -> DeadLetterSettings:
    basin = _checked(section, "basin", parse_bucket_name)
    stream = _checked(section, "stream", parse_stream_name)
    folder = section.text("folder")
    if stream and folder:
        section.problem("", "names both a stream and a folder: choose one")
    if basin and not stream:
        section.problem("basin", "is given without a stream: name the stream, or remove it")
    records = _seq_nums(section, "records")
    section.close()
    if folder and "://" not in folder:
        folder = Path(folder).expanduser().absolute().as_uri()
    return DeadLetterSettings(basin, stream, folder, records)


def _seq_nums(section: Section, name: str) -> tuple[int, ...]:
    raw = section.raw(name)
    numbers = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
        return tuple(numbers)
    section.problem(name, "must be a list of seq_nums, such as [17, 42]")
    return ()


def _checked(section: Section, name: str, parse: Callable[[str], str]) -> str | None:
    found: str | None = section.parsed(name, None, parse)
    return found


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
