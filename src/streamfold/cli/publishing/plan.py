"""The plan of `publish`: the tables, where their files go, and the configuration of each part."""

from __future__ import annotations

import glob
import json
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from psycopg2.extensions import make_dsn, parse_dsn

from streamfold.archive.write.layout import LAREDO, STREAMFOLD
from streamfold.errors import ConflictError, InvalidError
from streamfold.ingest.postgres.catalog import Table

#: Destination types by URL scheme, with the option that names the bucket.
_REMOTE: Final = {"s3": ("s3", "bucket"), "gs": ("gcs", "bucket"), "az": ("azure", "container")}
#: Where the parts listen if run from files. The parts of `publish` itself use free ports.
_SERVER_PORT, _STATUS_PORT = 8080, 8081
_HOST = "127.0.0.1"
#: Characters that the name of an archive's folder cannot contain, because it is part of a URL.
_NOT_IN_FOLDERS: Final = frozenset("/#?%")
#: Formats of bases and diffs by layout. Laredo's reader knows one format, which both can have.
_FORMATS: Final = {
    STREAMFOLD.name: '{ snapshot = ["parquet"], diff = ["jsonl"] }',
    LAREDO.name: '{ snapshot = ["jsonl"], diff = ["jsonl"] }',
}


@dataclass(frozen=True, slots=True)
class ArchiveFolder:
    """A folder with one archive per table, on local disk or in a bucket."""

    type: str
    #: The options of a destination in the snapshotter's configuration, besides its type.
    options: dict[str, str]
    shown: str

    @classmethod
    def parse(cls, text: str) -> ArchiveFolder:
        """Return the folder at a path or URL."""
        scheme, separator, _ = text.partition("://")
        if not separator or scheme == "file":
            path = urlsplit(text).path if separator else text
            return cls("local", {"path": str(Path(path).expanduser().absolute())}, text)
        if scheme not in _REMOTE:
            raise InvalidError(
                f"--to {text!r} is not a folder or bucket: give a folder, or s3://, gs:// or az:// "
                "with a bucket and a prefix"
            )
        type_, container = _REMOTE[scheme]
        parts = urlsplit(text)
        options = {container: parts.netloc, "prefix": parts.path.strip("/")}
        return cls(type_, {name: value for name, value in options.items() if value}, text)

    @property
    def state_folder(self) -> Path:
        """The default state folder: beside the archives, or named like a remote archive folder."""
        if self.type == "local":
            path = Path(self.options["path"])
            return path.with_name(f"{path.name}.state")
        return Path(f"{self.shown.rstrip('/').rpartition('/')[2]}.state").absolute()

    def of(self, table: Table) -> str:
        """Return the location of a table's archive, as other commands accept it."""
        return f"{self.shown.rstrip('/')}/{table.full_name}"


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """One publication of tables: everything except secrets, which are in the environment."""

    dsn: str
    tables: Sequence[Table]
    archives: ArchiveFolder
    #: Folder for the store, configuration and logs.
    state: Path
    #: A server that runs elsewhere; None = run one.
    endpoint: str | None
    token_file: Path | None
    password_file: Path | None
    basin: str
    slot: str
    publication: str
    diff_interval: str
    #: `source.on_trimmed` in the snapshotter's configuration.
    on_trimmed: str
    #: `decoder.mismatch` in the snapshotter's configuration.
    mismatch: str
    #: Records that become dead letters, by table.
    skipped: Mapping[str, Sequence[int]]
    #: As in the snapshotter's configuration.
    layout: str
    keep_epochs: int
    #: Where the server listens; 0 = any free port.
    port: int
    recopy: bool
    #: Whether streams keep records that the archives already have.
    keep_streams: bool
    #: Seconds between two notes of the ingester's position while no table changes.
    heartbeat: float

    def __post_init__(self) -> None:
        for table in self.tables:
            if characters := _NOT_IN_FOLDERS.intersection(table.full_name):
                raise InvalidError(
                    f"table {table.full_name!r} has {' and '.join(sorted(characters))} in its name, "
                    "which cannot name the folder of its archive: run ingest and the snapshotter with "
                    "a key_prefix instead"
                )

    @property
    def store(self) -> Path:
        return self.state / "store"

    @property
    def snapshotter_file(self) -> Path:
        return self.state / "snapshotter.toml"

    @property
    def snapshotter_address(self) -> Path:
        """The file that contains the snapshotter's address, for the console."""
        return self.state / "snapshotter.url"

    @property
    def trim_file(self) -> Path | None:
        """The file that tells the ingester what to trim; None if streams keep everything."""
        # Other readers may use the streams of a server that runs elsewhere.
        trims = self.endpoint is None and not self.keep_streams
        return self.state / "trim.json" if trims else None

    def log(self, part: str) -> Path:
        return self.state / "log" / f"{part}.log"

    def serve(self, port: int, snapshotter: str) -> list[str]:
        """Return the server's arguments. `snapshotter` is its address, or @ and a file."""
        tables = self.archives.options.get("path", self.archives.shown)
        return [
            *("serve", "--host", _HOST, "--port", str(port), "--local-root", str(self.store)),
            *("--tables", tables, "--snapshotter", snapshotter, "--no-access-log"),
        ]

    def ingest(self, url: str) -> list[str]:
        """Return the ingester's arguments. The database is in STREAMFOLD_POSTGRES_DSN."""
        # Escaped, because `--table` accepts patterns.
        names = [("--table", glob.escape(table.full_name)) for table in self.tables]
        files = {"--password-file": self.password_file, "--token-file": self.token_file}
        return [
            *("ingest", "postgres", "--endpoint", url, "--basin", self.basin),
            *("--slot", self.slot, "--publication", self.publication),
            *("--heartbeat", f"{self.heartbeat:g}"),
            *(text for pair in names for text in pair),
            *(text for name, file in files.items() if file for text in (name, str(file))),
        ]

    def snapshotter(self, url: str, port: int = 0) -> str:
        """Return the snapshotter's configuration as TOML."""
        destination = _inline({"type": self.archives.type, **self.archives.options})
        token = {"token_file": str(self.token_file)} if self.token_file else {}
        parts = [f'http = {{ host = "{_HOST}", port = {port} }}\n']
        for table in self.tables:
            source = {"server": url, "basin": self.basin, "stream": table.full_name} | token
            source |= {"schema": table.schema, "table": table.name, "on_trimmed": self.on_trimmed}
            parts.append(
                "[[tables]]\n"
                f"key_fields = [{', '.join(map(_text, table.key))}]\n"
                f"key_prefix = {_text(f'{table.full_name}/')}\n"
                f"diff = {{ interval = {_text(self.diff_interval)} }}\n"
                f"decoder = {{ mismatch = {_text(self.mismatch)} }}\n"
                f"dead_letters = {{ records = {sorted(self.skipped.get(table.full_name, ()))} }}\n"
                f"formats = {_FORMATS[self.layout]}\n"
                f"layout = {_text(self.layout)}\n"
                f"retention = {{ keep_epochs = {self.keep_epochs} }}\n"
                f"destinations = [{destination}]\n"
                f"source = {_inline(source)}\n"
            )
        return "\n".join(parts)


def skipped_records(texts: Sequence[str], tables: Sequence[Table]) -> dict[str, list[int]]:
    """Return the records by table, each given as TABLE:RECORD. Raises InvalidError if one is wrong."""
    names = {table.full_name for table in tables}
    records: defaultdict[str, list[int]] = defaultdict(list)
    for text in texts:
        table, _, record = text.rpartition(":")
        full = table if "." in table else f"public.{table}"
        if full not in names or not (record.isascii() and record.isdecimal()):
            raise InvalidError(
                f"--skip {text!r} is not a table and a record: give one of {sorted(names)}, a colon, "
                "and the record's seq_num"
            )
        records[full].append(int(record))
    return dict(records)


def write_configuration(plan: PublicationPlan, folder: Path) -> list[Path]:
    """Write a configuration that continues what `publish` does. Returns the scripts, in order.

    Raises ConflictError if one of the files exists, because it may have been edited.
    """
    url = plan.endpoint or f"http://{_HOST}:{_SERVER_PORT}"
    toml = folder / "snapshotter.toml"
    scripts = {
        "ingest": _ingest_script(plan, url),
        "snapshotter": _script(
            "Publishes the streams as archives.", ["snapshotter", "run", "--config", str(toml)]
        ),
    }
    if plan.endpoint is None:
        server = _script(
            "Keeps the streams.", plan.serve(_SERVER_PORT, f"http://{_HOST}:{_STATUS_PORT}")
        )
        scripts = {"server": server, **scripts}
    texts = {folder / f"{name}.sh": text for name, text in scripts.items()}
    written = texts | {toml: plan.snapshotter(url, _STATUS_PORT)}
    for file in written:
        if file.exists():
            raise ConflictError(f"{file} exists and may have been edited: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        file.write_text(text)
        file.chmod(0o755 if file in texts else 0o644)
    return list(texts)


#: Members of a connection string that are not written to files.
_SECRETS: Final = ("password", "sslpassword", "oauth_client_secret")


def _ingest_script(plan: PublicationPlan, url: str) -> str:
    database = {name: text for name, text in parse_dsn(plan.dsn).items() if name not in _SECRETS}
    creation = f"streamfold create-basin {shlex.quote(plan.basin)} --retention-policy infinite"
    if plan.endpoint is None:
        creation += f" --ensure --endpoint {url}"
    else:
        creation = f"# Once, unless the basin exists: {creation}"
    return _script(
        "Copies the tables into streams, then follows their changes.\n"
        "# The password of the database comes from PGPASSWORD, ~/.pgpass or --password-file.",
        plan.ingest(url),
        f"export STREAMFOLD_POSTGRES_DSN={shlex.quote(make_dsn(**database))}\n{creation}\n",
    )


def _script(purpose: str, arguments: Sequence[str], before: str = "") -> str:
    return f"#!/bin/sh\n# {purpose}\n{before}exec {shlex.join(['streamfold', *arguments])}\n"


def _text(value: str) -> str:
    """Return a TOML string."""
    return json.dumps(value, ensure_ascii=False)


def _inline(values: dict[str, str]) -> str:
    return "{ " + ", ".join(f"{name} = {_text(value)}" for name, value in values.items()) + " }"
