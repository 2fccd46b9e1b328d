"""Reads a configuration from plain values; lists all problems at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from streamfold.archive.formats.format import format_names, format_of, parse_format_name
from streamfold.archive.maintenance.garbage_collection import DEFAULT_GRACE, Retention
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import LAYOUTS, STREAMFOLD
from streamfold.archive.write.thresholds import Thresholds
from streamfold.errors import InvalidError
from streamfold.extensions import ExtensionBrokenError, must_be_one_of
from streamfold.model.units import duration_text
from streamfold.snapshotter.config.endpoints import (
    check_credentials,
    read_credentials,
    read_dead_letters,
    read_destination,
    read_event,
    read_source,
)
from streamfold.snapshotter.config.model import (
    DEFAULT_INTERVAL,
    DEFAULT_PORT,
    DEFAULT_THRESHOLDS,
    Configuration,
    DecoderSettings,
    FormatSettings,
    HttpSettings,
    TableSettings,
)
from streamfold.snapshotter.config.section import Section, read_extension, read_options
from streamfold.snapshotter.decoding import DECODERS, EnvelopeDecoder, parse_ddl
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.snapshotter.transactions import MAX_HELD, TransactionLimits

#: The object around everything in published configurations.
ROOT = "snapshotter"
#: Settings of a table, which are at the top level if there is only one.
_OF_TABLE = (
    "source", "key_fields", "key_prefix", "diff", "snapshot", "destinations", "formats", "events",
    "retention", "decoder", "schema", "dead_letters", "transactions", "buckets", "layout", "delta",
)  # fmt: skip
#: Shortest time between diffs: a commit takes about as long on object storage.
_INTERVAL_MIN = timedelta(milliseconds=100)
#: More would make files too small to be worth a request.
_BUCKETS_MAX = 65_536


def read_configuration(raw: Mapping[str, Any]) -> Configuration:
    """Read the configuration; ConfigurationError lists all problems."""
    problems: list[str] = []
    values = dict(raw)
    if set(values) == {ROOT}:
        values = values[ROOT]
    top = Section(values, "", problems)
    credentials = read_credentials(top.section("credentials"))
    http = _http(top.section("http"))
    tables = tuple(_read_table(section) for section in _table_sections(top, problems))
    top.close()
    for table, path in zip(tables, _paths(top, len(tables)), strict=True):
        for n, destination in enumerate(table.destinations):
            where = f"{path}destinations[{n}].credentials"
            check_credentials(where, destination.credentials, credentials, problems)
        for n, event in enumerate(table.events):
            where = f"{path}events[{n}].credentials"
            check_credentials(where, event.raw.get("credentials"), credentials, problems)
    _check_folders(tables, problems)
    if problems:
        raise ConfigurationError(problems)
    return Configuration(tables, http, credentials)


def _paths(top: Section, count: int) -> list[str]:
    return [f"tables[{n}]." for n in range(count)] if top.holds("tables") else [""] * count


def _table_sections(top: Section, problems: list[str]) -> list[Section]:
    inline = {name: value for name in _OF_TABLE if (value := top.raw(name)) is not None}
    if not top.holds("tables"):
        top.raw("tables")
        return [Section(inline, "", problems)]
    for name in inline:
        top.problem(name, "is beside tables: put it into each table")
    found = top.sections("tables")
    if not found:
        top.problem("tables", "must name at least one table")
    return found


def _http(section: Section) -> HttpSettings:
    port = section.whole("port", DEFAULT_PORT, 0, 65535)
    host = section.text("host") or HttpSettings().host
    section.close()
    return HttpSettings(port, host)


def _read_table(section: Section) -> TableSettings:
    source = read_source(section.section("source"))
    keys = section.texts("key_fields", ("id",))
    diff = section.section("diff")
    interval = diff.duration("interval", DEFAULT_INTERVAL)
    if interval < _INTERVAL_MIN:
        diff.problem("interval", f"{diff.raw('interval')} must be at least 100ms")
    diff.close()
    destinations = [read_destination(found) for found in section.sections("destinations")]
    if not destinations and not _is_wrong_list(section, "destinations"):
        section.problem("destinations", "must name at least one destination")
    settings = TableSettings(
        source=source,
        destinations=tuple(found for found in destinations if found),
        key_fields=keys,
        key_prefix=section.text("key_prefix") or f"{source.table}/",
        interval=interval,
        thresholds=_thresholds(section),
        formats=_formats(section.section("formats")),
        events=tuple(e for s in section.sections("events") if (e := read_event(s))),
        retention=_retention(section.section("retention")),
        decoder=_decoder(section.section("decoder")),
        schema=_schema(section, keys),
        dead_letters=read_dead_letters(section.section("dead_letters")),
        transactions=_transactions(section.section("transactions")),
        buckets=_buckets(section),
        layout=section.choice("layout", tuple(LAYOUTS), STREAMFOLD.name),
        delta=_delta(section),
    )
    _check_layout(section, settings)
    if settings.delta and "parquet" not in {form for form, _ in settings.formats.snapshot}:
        section.problem("delta", "needs parquet in formats.snapshot: the log names those files")
    section.close()
    return settings


def _is_wrong_list(section: Section, name: str) -> bool:
    return section.holds(name) and not isinstance(section.raw(name), list)


def _thresholds(section: Section) -> Thresholds:
    """Return the given limits; the defaults if none is given."""
    if not section.holds("snapshot"):
        section.raw("snapshot")
        return DEFAULT_THRESHOLDS
    limits = section.section("snapshot")
    found = Thresholds(
        min_interval=limits.duration("min_interval", None),
        max_interval=limits.duration("max_interval", None),
        max_diff_bytes=limits.size("max_diff_bytes"),
        max_diff_fraction=limits.fraction("max_diff_fraction"),
        max_churn_records=limits.whole("max_churn_records", None, 0),
        max_churn_fraction=limits.fraction("max_churn_fraction"),
        max_chain_bytes=limits.size("max_chain_bytes"),
        max_chain_diffs=limits.whole("max_chain_diffs", None, 0),
        max_replay_seconds=limits.seconds("max_replay_seconds"),
        jitter=_jitter(limits),
    )
    if found.min_interval and found.max_interval and found.min_interval > found.max_interval:
        shortest, longest = limits.raw("min_interval"), limits.raw("max_interval")
        limits.problem(
            "min_interval", f"{shortest} must not be longer than max_interval, {longest}"
        )
    given = [name for name in limits.names() if name.startswith("max_")]
    if all(limits.raw(name) in (0, "0") for name in given):
        limits.problem("", "sets no limit, so the chain would grow without bound: set one")
    limits.close()
    return found


def _jitter(limits: Section) -> float:
    jitter = limits.fraction("jitter") or 0.0
    if jitter == 1:
        limits.problem("jitter", "1 must be below 1")
        return 0.0
    return jitter


def _formats(section: Section) -> FormatSettings:
    usual = FormatSettings()
    found = FormatSettings(
        _format_list(section, "snapshot", usual.snapshot), _format_list(section, "diff", usual.diff)
    )
    section.close()
    return found


def _format_list(
    section: Section, name: str, usual: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, str], ...]:
    chosen = []
    for word in section.texts(name, [form for form, _ in usual]):
        form, compression = parse_format_name(word)
        try:
            format_of(form, compression)
            chosen.append((form, compression))
        except ExtensionBrokenError as error:
            section.problem(name, error.message)
        except InvalidError:
            section.problem(name, f"{word} {must_be_one_of(format_names(), word)}")
    if repeated := [form for form, n in Counter(form for form, _ in chosen).items() if n > 1]:
        section.problem(name, f"{repeated[0]} must be named once, with one compression")
    return tuple(chosen)


def _retention(section: Section) -> Retention:
    keep = section.whole("keep_epochs", None, 0)
    found = Retention(
        keep_epochs=keep or None,
        max_age=section.duration("max_age", None),
        grace=section.duration("grace", DEFAULT_GRACE),
    )
    section.close()
    return found


def _decoder(section: Section) -> DecoderSettings:
    kind = read_extension(section, "kind", DECODERS, default=EnvelopeDecoder.kind)
    options = read_options(section, kind.options) if kind else None
    return DecoderSettings(kind.id, options) if kind and options else DecoderSettings()


def _transactions(section: Section) -> TransactionLimits:
    usual = TransactionLimits()
    found = TransactionLimits(
        max_records=section.whole("max_records", usual.max_records, 1, MAX_HELD),
        max_wait=section.duration("max_wait", usual.max_wait),
        quiet=section.duration("quiet", usual.quiet),
    )
    if found.quiet > found.max_wait:
        section.problem(
            "quiet",
            f"{duration_text(found.quiet)} must not be longer than max_wait, "
            f"{duration_text(found.max_wait)}",
        )
    section.close()
    return found


def _schema(section: Section, keys: tuple[str, ...]) -> TableSchema | None:
    text = section.text("schema")
    if text is None or text == "learn":
        return None
    try:
        return parse_ddl(text, keys)
    except InvalidError as error:
        section.problem("schema", error.message)
        return None


def _delta(section: Section) -> bool | None:
    """Return True if the log is wanted; None otherwise, so that it is not listed."""
    found = section.raw("delta")
    if found not in (None, True, False, "true", "false"):
        section.problem("delta", f"{found} must be true or false")
    return True if found in (True, "true") else None


def _buckets(section: Section) -> int | None:
    if section.raw("buckets") == "auto":
        return None
    found = section.whole("buckets", None, 1, _BUCKETS_MAX)
    if found is not None and found & (found - 1):
        section.problem("buckets", f"{found} must be a power of two, such as 8, or auto")
    return found


def _check_layout(section: Section, table: TableSettings) -> None:
    """Refuse what Laredo's reader could not rebuild."""
    layout = LAYOUTS[table.layout]
    if not layout.is_published:
        return
    if "." not in table.name:
        section.problem(
            "source.schema", f"is missing: layout {layout.name} names tables <schema>.<table>"
        )
    if table.buckets not in (None, 1):
        section.problem("buckets", f"{table.buckets} must be 1 in layout {layout.name}")
    formats = table.formats
    try:
        layout.formats(
            [format_of(*chosen) for chosen in formats.snapshot],
            [format_of(*chosen) for chosen in formats.diff],
        )
    except InvalidError as error:
        section.problem("formats", error.message)


def _check_folders(tables: tuple[TableSettings, ...], problems: list[str]) -> None:
    """Refuse tables that share a folder or a name."""
    folders = Counter(d.folder(t.key_prefix) for t in tables for d in t.destinations)
    for folder, count in folders.items():
        if count > 1:
            problems.append(f"destinations: {folder} is used {count} times: choose other prefixes")
    for name, count in Counter(table.name for table in tables if table.name).items():
        if count > 1:
            problems.append(
                f"tables: {count} are named {name}: choose other names, which status and events need"
            )
