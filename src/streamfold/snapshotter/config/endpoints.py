"""Reads the settings of sources, destinations, event sinks, credentials and dead letters."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    section.raw("local_snapshot_path")  # accepted for compatibility: a cache, which is not needed
    token_file = section.text("token_file")
    source = SourceSettings(
        server=section.parsed("server", "", _origin),
        basin=section.parsed("basin", DEFAULT_BASIN, parse_bucket_name),
        stream=section.text("stream") or "",
        table=section.required("table"),
        namespace=section.text("schema"),
        client_id=section.text("client_id"),
        start=section.parsed("start", "earliest", _start),
        on_trimmed=section.choice("on_trimmed", (REFUSE, PUBLISH), REFUSE),
        token_env=section.text("token_env") or "S2_ACCESS_TOKEN",
        token_file=Path(token_file) if token_file else None,
    )
    if not section.holds("server"):
        section.problem("server", "is missing")
    # Published configurations name a table and no stream: the stream has the table's name.
    source = replace(source, stream=source.stream or source.qualified)
    try:
        parse_stream_name(source.stream or "-")
    except InvalidError as error:
        section.problem("stream", error.message)
    section.close()
    return source


def _origin(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.username or parts.password or parts.query:
        # Not repeated, since it may hold a secret.
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


def read_destination(
    section: Section, profiles: Mapping[str, Profile]
) -> DestinationSettings | None:
    kind = read_extension(section, "type", DESTINATIONS)
    options = read_options(section, kind.options) if kind else None
    if kind is None or options is None:
        return None
    try:
        url = kind.locate(options)
    except InvalidError as error:
        section.problem("", error.message)
        return None
    settings = {name: getattr(options, name) for name in kind.open_options}
    credentials = options.credentials if kind.takes_credentials else None
    _check_credentials(section, credentials, profiles)
    return DestinationSettings(
        kind.id,
        url,
        {name: value for name, value in settings.items() if value is not None},
        credentials,
    )


def read_event(section: Section, profiles: Mapping[str, Profile]) -> EventSettings | None:
    kind = read_extension(section, "type", SINKS)
    options = read_options(section, kind.options) if kind else None
    if kind is None or options is None:
        return None
    values = msgspec.to_builtins(options)
    settings = {name: value for name, value in values.items() if value is not None}
    _check_credentials(section, settings.get("credentials"), profiles)
    return EventSettings(kind.id, {"type": kind.id, **settings})


def read_credentials(section: Section) -> dict[str, Profile]:
    """Read profiles by name."""
    profiles = {}
    for name in section.names():
        raw = section.raw(name)
        try:
            Profiles.parse({name: raw}, path=section.path(""))
            profiles[name] = Profile(**raw)
        except InvalidError as error:
            section.report(error.message)
    return profiles


def _check_credentials(section: Section, name: str | None, profiles: Mapping[str, Profile]) -> None:
    if name is not None and name not in profiles:
        names = ", ".join(sorted(profiles)) or "none"
        section.problem("credentials", f"{name} is not under credentials, which has {names}")


def read_dead_letters(section: Section) -> DeadLetterSettings:
    basin = section.parsed("basin", None, parse_bucket_name)
    stream = section.parsed("stream", None, parse_stream_name)
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
