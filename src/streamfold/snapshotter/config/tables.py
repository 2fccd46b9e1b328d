"""Reads a configuration from plain values, and lists all problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from streamfold.archive.destinations.aws_credentials import Profile
from streamfold.archive.formats.format import format_names, format_of, parse_format_name
from streamfold.archive.maintenance.garbage_collection import DEFAULT_GRACE, Retention
from streamfold.archive.schema import TableSchema
from streamfold.archive.write.layout import LAYOUTS, STREAMFOLD
from streamfold.archive.write.thresholds import Thresholds
from streamfold.errors import InvalidError
from streamfold.extensions import ExtensionBrokenError, must_be_one_of
from streamfold.model.units import duration_text
from streamfold.snapshotter.config.endpoints import (
    read_credentials,
    read_dead_letters,
    read_destination,
    read_event,
    read_source,
)
from streamfold.snapshotter.config.model import (
    DEFAULT_INTERVAL,
    DEFAULT_THRESHOLDS,
    DecoderSettings,
    FormatSettings,
    HttpSettings,
    SnapshotterConfiguration,
    TableSettings,
)
from streamfold.snapshotter.config.section import (
    Section,
    read_extension,
    read_options,
    read_settings,
)
from streamfold.snapshotter.decoding import DECODERS, EnvelopeDecoder, parse_ddl
from streamfold.snapshotter.errors import ConfigurationError
from streamfold.snapshotter.transactions import TransactionLimits

#: The object around everything in published configurations.
ROOT = "snapshotter"
#: Settings of a table, at the top level if there is only one.
_OF_TABLE = (
    "source", "key_fields", "key_prefix", "diff", "snapshot", "destinations", "formats", "events",
    "retention", "decoder", "schema", "dead_letters", "transactions", "buckets", "layout", "delta",
)  # fmt: skip
#: Shortest time between diffs, about that of a commit on object storage.
_INTERVAL_MIN = timedelta(milliseconds=100)
#: More would make files too small for their requests.
_BUCKETS_MAX = 65_536


def read_configuration(raw: Mapping[str, Any]) -> SnapshotterConfiguration:
    """Read the configuration; ConfigurationError lists all problems."""
    problems: list[str] = []
    values = dict(raw)
    if set(values) == {ROOT}:
        values = values[ROOT]
    top = Section(values, "", problems)
    credentials = read_credentials(top.section("credentials"))
    http = read_settings(top.section("http"), HttpSettings)
    tables = tuple(_read_table(section, credentials) for section in _table_sections(top, problems))
    top.close()
    _check_folders(tables, problems)
    if problems:
        raise ConfigurationError(problems)
    return SnapshotterConfiguration(tables, http, credentials)


def _table_sections(top: Section, problems: list[str]) -> list[Section]:
    inline = {name: value for name in _OF_TABLE if (value := top.raw(name)) is not None}
    if not top.holds("tables"):
        top.raw("tables")
        return [Section(inline, "", problems)]
    for name in inline:
        top.problem(name, "is beside tables: put it into each table")
    sections = top.sections("tables")
    if not sections:
        top.problem("tables", "must name at least one table")
    return sections


def _read_table(section: Section, credentials: Mapping[str, Profile]) -> TableSettings:
    source = read_source(section.section("source"))
    keys = section.texts("key_fields", ("id",))
    diff = section.section("diff")
    interval = diff.duration("interval", DEFAULT_INTERVAL)
    if interval < _INTERVAL_MIN:
        diff.problem("interval", f"{diff.raw('interval')} must be at least 100ms")
    diff.close()
    destinations = [
        read_destination(destination, credentials)
        for destination in section.sections("destinations")
    ]
    if not destinations and not _is_wrong_list(section, "destinations"):
        section.problem("destinations", "must name at least one destination")
    key_prefix = section.text("key_prefix", allow_empty=True)
    settings = TableSettings(
        source=source,
        destinations=tuple(destination for destination in destinations if destination),
        key_fields=keys,
        key_prefix=f"{source.table}/" if key_prefix is None else key_prefix,
        interval=interval,
        thresholds=_thresholds(section),
        formats=_formats(section.section("formats")),
        events=tuple(
            event for sink in section.sections("events") if (event := read_event(sink, credentials))
        ),
        retention=_retention(section.section("retention")),
        decoder=_decoder(section.section("decoder")),
        schema=_schema(section, keys),
        dead_letters=read_dead_letters(section.section("dead_letters")),
        transactions=_transactions(section.section("transactions")),
        buckets=_buckets(section),
        layout=section.choice("layout", tuple(LAYOUTS), STREAMFOLD.name),
        delta=section.flag("delta") or None,  # no is not listed
    )
    _check_layout(section, settings)
    if settings.delta and "parquet" not in {form for form, _ in settings.formats.snapshot}:
        section.problem("delta", "needs parquet in formats.snapshot: the log names those files")
    section.close()
    return settings


def _is_wrong_list(section: Section, name: str) -> bool:
    return section.holds(name) and not isinstance(section.raw(name), list)


def _thresholds(section: Section) -> Thresholds:
    """Return the configured limits, or the defaults without any."""
    if not section.holds("snapshot"):
        section.raw("snapshot")
        return DEFAULT_THRESHOLDS
    limits = section.section("snapshot")
    thresholds = read_settings(limits, Thresholds)
    shortest, longest = thresholds.min_interval, thresholds.max_interval
    if shortest and longest and shortest > longest:
        limits.problem(
            "min_interval",
            f"{duration_text(shortest)} must not be longer than max_interval, "
            f"{duration_text(longest)}",
        )
    names = [name for name in limits.names() if name.startswith("max_")]
    if all(limits.raw(name) in (0, "0") for name in names):
        limits.problem("", "sets no limit, so the chain would grow without bound: set one")
    return thresholds


def _formats(section: Section) -> FormatSettings:
    usual = FormatSettings()
    formats = FormatSettings(
        _format_list(section, "snapshot", usual.snapshot), _format_list(section, "diff", usual.diff)
    )
    section.close()
    return formats


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
    retention = Retention(
        keep_epochs=keep or None,
        max_age=section.duration("max_age", None),
        grace=section.duration("grace", DEFAULT_GRACE),
    )
    section.close()
    return retention


def _decoder(section: Section) -> DecoderSettings:
    kind = read_extension(section, "kind", DECODERS, default=EnvelopeDecoder.kind)
    options = read_options(section, kind.options) if kind else None
    return DecoderSettings(kind.id, options) if kind and options else DecoderSettings()


def _transactions(section: Section) -> TransactionLimits:
    limits = read_settings(section, TransactionLimits)
    if limits.quiet > limits.max_wait:
        section.problem(
            "quiet",
            f"{duration_text(limits.quiet)} must not be longer than max_wait, "
            f"{duration_text(limits.max_wait)}",
        )
    return limits


def _schema(section: Section, keys: tuple[str, ...]) -> TableSchema | None:
    text = section.text("schema")
    if text is None or text == "learn":
        return None
    try:
        return parse_ddl(text, keys)
    except InvalidError as error:
        section.problem("schema", error.message)
        return None


def _buckets(section: Section) -> int | None:
    if section.raw("buckets") == "auto":
        return None
    count = section.whole("buckets", None, 1, _BUCKETS_MAX)
    if count is not None and count & (count - 1):
        section.problem("buckets", f"{count} must be a power of two, such as 8, or auto")
    return count


def _check_layout(section: Section, table: TableSettings) -> None:
    """Reject tables that Laredo's reader could not rebuild."""
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
    """Reject tables that share a folder or a name."""
    folders = Counter(d.folder(t.key_prefix) for t in tables for d in t.destinations)
    for folder, count in folders.items():
        if count > 1:
            problems.append(f"destinations: {folder} is used {count} times: choose other prefixes")
    for name, count in Counter(table.name for table in tables if table.name).items():
        if count > 1:
            problems.append(
                f"tables: {count} are named {name}: choose other names, which status and events need"
            )
