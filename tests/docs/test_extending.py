"""The examples of the guide for extensions: installed as a package of its own, and held to the kits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeVar

import pytest

from streamfold.archive import Destination, Profiles
from streamfold.archive.events import Event, SinkContext, SinkType, decode_event
from streamfold.archive.formats import FileCompression, Format, FormatType
from streamfold.blob import BlobStore, DestinationType
from streamfold.errors import BlobUnavailableError
from streamfold.extensions import Extension, Registry
from streamfold.follow import Codec, CodecType
from streamfold.snapshotter.decoding import ChangeDecoder, DecoderType
from streamfold.testing import (
    BlobStoreConformance,
    ChangeDecoderConformance,
    CodecConformance,
    DestinationConformance,
    EventSinkConformance,
    FormatConformance,
    Sample,
    SinkProbe,
)
from streamfold.testing.change_decoder_kit import TABLE, records
from tests.cli.commands import Shell
from tests.distributions import EXAMPLE, install_example
from tests.docs.markdown import blocks_of
from tests.interop.serving import serving

PAGE = Path(__file__).parents[2] / "docs" / "contributing" / "extending.md"
E = TypeVar("E", bound=Extension)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example, installed where this process and those that it starts import from."""
    folder = install_example(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def found(group: str, kind: type[E], name: str) -> E:
    """An extension of the example, as its entry point gives it."""
    return Registry(group, "example", kind, {}).get(name)


def test_the_page_shows_the_files_of_the_example_as_they_are() -> None:
    shown = {b.how["source"]: b.text for b in blocks_of(PAGE) if "source" in b.how}
    assert all("source" in b.how for b in blocks_of(PAGE) if b.language == "python")
    files = [*EXAMPLE.glob("acme_streamfold/[a-z]*.py"), EXAMPLE / "pyproject.toml"]
    assert shown == {str(file.relative_to(EXAMPLE)): file.read_text() for file in files}


def test_a_sink_takes_forty_lines() -> None:
    lines = (EXAMPLE / "acme_streamfold" / "file_sink.py").read_text().splitlines()
    assert len(lines) <= 40


class TestXzFormat(FormatConformance):
    checksummed = True
    knows_its_end = True

    @pytest.fixture
    def format(self, installed: Path) -> Format:
        return found("streamfold.formats", FormatType, "jsonl-xz").open(FileCompression.NONE)


class TestMaxwellDecoder(ChangeDecoderConformance):
    @pytest.fixture
    def decoder(self, installed: Path) -> ChangeDecoder:
        kind = found("streamfold.decoders", DecoderType, "maxwell")
        return kind.open(("id",), kind.options(table="orders"))

    def body(self, sample: Sample) -> bytes:
        message = {"database": "shop", "table": "orders", "type": sample.op, "data": sample.row}
        return json.dumps(message, ensure_ascii=False).encode()

    def test_changes_of_other_tables_are_ignored(self, decoder: ChangeDecoder) -> None:
        other = self.body(Sample("insert")).replace(b'"orders"', b'"customers"')
        decoded = decoder.decode(records([other, self.body(Sample("insert"))]), TABLE)
        assert (decoded.ignored, decoded.changes["seq_num"].to_pylist()) == (1, [1])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder that looks like a mounted disk."""
    mount = tmp_path / "disk"
    mount.mkdir()
    (mount / ".mounted").touch()
    return mount


def open_disk(mount: Path) -> Destination:
    kind = found("streamfold.destinations", DestinationType, "disk")
    url = kind.locate(kind.options(mount=str(mount)))
    assert url == f"disk://{mount}/archives"
    return Destination(kind.open(url, {}), url + "/")


class TestDiskDestination(DestinationConformance):
    @pytest.fixture
    def destination(self, installed: Path, disk: Path) -> Destination:
        return open_disk(disk)


class TestDiskStore(BlobStoreConformance):
    @pytest.fixture
    def store(self, installed: Path, disk: Path) -> BlobStore:
        return open_disk(disk).blobs


def test_a_disk_that_is_not_mounted_is_refused(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(BlobUnavailableError, match="no disk is mounted for disk:///"):
        open_disk(tmp_path / "absent")


def test_urls_of_an_installed_destination_are_known_to_the_command_line(
    installed: Path, disk: Path
) -> None:
    shown = Shell({})("archive", "show", f"disk://{disk}/archives/orders", "--json")
    assert shown.error["code"] == "manifest_not_found"
    unknown = Shell({})("archive", "show", "disc://somewhere", "--json")
    assert unknown.error["message"].endswith("memory:, file:///, s3://, gs://, az://, disk://")


class TestZlibCodec(CodecConformance):
    @pytest.fixture
    def codec(self, installed: Path) -> Codec[Any]:
        return found("streamfold.codecs", CodecType, "json-zlib").open()


class FileProbe(SinkProbe):
    """Reads the lines of the file, and puts a folder in its way."""

    def __init__(self, path: Path) -> None:
        kind = found("streamfold.sinks", SinkType, "file")
        options = kind.options(path=str(path))
        self.sink = kind.open(options, SinkContext(Profiles({}), "events[0]"))
        self._path = path

    async def received(self, count: int) -> list[Event]:
        return [decode_event(line) for line in self._path.read_bytes().splitlines()]

    async def break_target(self) -> None:
        self._path.mkdir()


class TestFileSink(EventSinkConformance):
    @pytest.fixture
    def probe(self, installed: Path, tmp_path: Path) -> SinkProbe:
        return FileProbe(tmp_path / "events.jsonl")


def configuration(folder: Path, text: str) -> str:
    file = folder / "snapshotter.toml"
    file.write_text(f'source = {{ server = "localhost:8080", table = "orders" }}\n{text}')
    return str(file)


def test_the_command_line_takes_the_sink_of_an_installed_package(
    installed: Path, tmp_path: Path
) -> None:
    file = configuration(
        tmp_path,
        """
        destinations = [{ type = "local", path = "/archive" }]
        events = [{ type = "file", path = "/events.jsonl" }]
        """,
    )
    outcome = Shell({})("snapshotter", "validate", "--config", file)
    assert outcome.stderr == ""
    assert "events[0].type = file\ntables[0].events[0].path = /events.jsonl\n" in outcome.text


def test_the_settings_of_the_page_are_accepted(installed: Path, tmp_path: Path) -> None:
    settings = [b.text for b in blocks_of(PAGE) if b.language == "toml" and "source" not in b.how]
    assert len(settings) == 4, "one for each kind of extension that a configuration names"
    outcome = Shell({})(
        "snapshotter", "validate", "--config", configuration(tmp_path, "".join(settings))
    )
    assert (outcome.status, outcome.stderr) == (0, "")


def test_the_command_of_the_page_takes_a_snapshot(installed: Path, tmp_path: Path) -> None:
    [command] = [b.text for b in blocks_of(PAGE) if b.language == "sh"]
    resources = {"basins": [{"name": "shop-basin", "streams": [{"name": "prices"}]}]}
    (tmp_path / "init.json").write_text(json.dumps(resources))
    with serving("--no-access-log", "--init-file", str(tmp_path / "init.json")) as exports:
        Shell(exports).ok("append", "s2://shop-basin/prices", stdin=b'{"item": "pear"}\n')
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {**os.environ, **exports, "PATH": path}
        subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=variables, check=True)
    assert list(tmp_path.glob("snapshots/**/*.json-zlib"))


def test_help_lists_what_a_configuration_may_name(installed: Path) -> None:
    shown = " ".join(Shell({})("snapshotter", "validate", "--help").text.split())
    assert "change decoders envelope, debezium, upserts, maxwell" in shown
    assert "formats jsonl, parquet, protobuf, protobuf-typed, jsonl-xz" in shown
    assert "destinations local, s3, gcs, azure, disk" in shown
    assert "event sinks sns, sqs, kinesis, eventbridge, webhook, file" in shown


def test_options_of_an_installed_package_are_checked_by_their_types(
    installed: Path, tmp_path: Path
) -> None:
    file = configuration(
        tmp_path,
        """
        destinations = [{ type = "local", path = "/archive" }]
        events = [{ type = "file", pth = "/events.jsonl" }, { type = "fiel" }]
        """,
    )
    outcome = Shell({})("snapshotter", "validate", "--config", file)
    sinks = "sns, sqs, kinesis, eventbridge, webhook, file"
    assert outcome.stderr.splitlines()[:3] == [
        "events[0].path: is missing",
        "events[0].pth: is not known; did you mean path?",
        f"events[1].type: fiel must be one of {sinks}; did you mean file?",
    ]
