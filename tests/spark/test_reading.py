"""Ranges are read completely and once, by sessions and pages, despite failures. Without Spark."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import s2_sdk

from streamfold.errors import InvalidError, NotFoundError, StreamfoldError
from streamfold.records.columns import Columns
from streamfold.spark import (
    DataLossError,
    EndpointUnavailableError,
    OptionError,
    StreamGoneError,
)
from streamfold.spark.stream.client import ServerConnection, StreamCalls
from streamfold.spark.stream.options import SourceOptions, parse_source
from streamfold.spark.stream.positions import StreamPositions
from streamfold.spark.stream.range_reads import Range, Wanted, read_range
from streamfold.spark.stream.source import StreamfoldSource

from .server import BASIN, KEY, SecuredServer, Server

BY_SESSION, BY_PAGES = Wanted(), Wanted(sessions=False)


def source_options(server: Server, **options: str) -> SourceOptions:
    return parse_source({**server.options, **options})


def seq_nums(server: Server, part: Range, wanted: Wanted = BY_SESSION) -> list[int]:
    endpoint = source_options(server, stream=part.stream).endpoint
    return [int(n) for found in read_range(endpoint, part, wanted) for n in found.seq_nums]


@pytest.mark.parametrize("wanted", [BY_SESSION, BY_PAGES])
def test_a_range_is_read_completely_and_no_further(
    server: Server, fresh: Callable[[], str], wanted: Wanted
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(4000))
    assert seq_nums(server, Range(stream, 0, 4000), wanted) == list(range(4000))
    assert seq_nums(server, Range(stream, 1234, 2345), wanted) == list(range(1234, 2345))
    assert seq_nums(server, Range(stream, 7, 7), wanted) == []


@pytest.mark.parametrize("wanted", [BY_SESSION, BY_PAGES])
def test_a_hole_is_named_with_what_comes_after_it(
    server: Server, fresh: Callable[[], str], wanted: Wanted
) -> None:
    stream, gone = fresh(), fresh()
    server.append_numbers(stream, range(2000))
    server.trim(stream, 1500)
    with pytest.raises(DataLossError, match=r"records 100 to 199 .* is 1500"):
        seq_nums(server, Range(stream, 100, 200), wanted)
    with pytest.raises(DataLossError, match=r"records 100 to 1499 .* is 1500"):
        seq_nums(server, Range(stream, 100, 1800), wanted)
    tolerant = Wanted(fail_on_data_loss=False, sessions=wanted.sessions)
    assert seq_nums(server, Range(stream, 100, 1800), tolerant) == list(range(1500, 1800))
    assert seq_nums(server, Range(stream, 100, 200), tolerant) == []
    with pytest.raises(DataLossError, match="records 0 to 4 "):
        seq_nums(server, Range(gone, 0, 5), wanted)


def test_a_read_continues_where_it_was_when_the_server_died(own_server: Server) -> None:
    reading = long_read(own_server, "long", BY_SESSION)
    found = next(reading).seq_nums.tolist()
    assert len(found) < 300, "most is still to come when the server dies"
    own_server.kill()
    own_server.start()
    for columns in reading:
        found += columns.seq_nums.tolist()
    assert found == list(range(1000))

    given = {**own_server.options, "stream": "long", "retryTimeout": "0.1"}
    reading = read_range(parse_source(given).endpoint, Range("long", 0, 1000), BY_SESSION)
    next(reading)
    own_server.kill()
    with pytest.raises(EndpointUnavailableError, match=f"{own_server.url}.*retryTimeout"):
        list(reading)


def test_what_is_trimmed_under_a_reader_is_missed(server: Server) -> None:
    strictly = long_read(server, "trimmed/a", BY_SESSION)
    tolerantly = long_read(server, "trimmed/b", Wanted(fail_on_data_loss=False))
    found = next(tolerantly).seq_nums.tolist()
    next(strictly)
    for stream in ("trimmed/a", "trimmed/b"):
        server.trim(stream, 990)
    with pytest.raises(DataLossError, match=r"records \d+ to 989 .* first available is 990"):
        list(strictly)
    for columns in tolerantly:
        found += columns.seq_nums.tolist()
    assert len(found) < 900
    assert found == [*range(len(found) - 10), *range(990, 1000)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_limit_of_bytes_holds_for_a_stream_that_is_trimmed_to_its_tail(
    server: Server, stored: bool
) -> None:
    stream = f"emptied/{stored}"
    server.create(stream)
    server.append_numbers(stream, range(10))
    server.trim(stream, 11)
    where = server.stored if stored else server.options
    for tolerant in ("true", "false"):
        given = {"stream": stream, "maxBytesPerTrigger": "100", "failOnDataLoss": tolerant}
        source = StreamfoldSource({**where, **given})
        reader = source.streamReader(source.schema())
        end = reader.latestOffset({stream: 0}, reader.getDefaultReadLimit())
        assert end == {stream: 11}
        [part] = reader.partitions({stream: 0}, end)
        reader.stop()
        if tolerant == "false":
            assert list(reader.read(part)) == []
            continue
        with pytest.raises(DataLossError, match=r"records 0 to 10 .* first available is 11"):
            list(reader.read(part))


def test_encrypted_streams_and_own_authorities_need_key_and_certificate(
    secured: SecuredServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    secured.append_sealed("with a key", range(1500))

    def found(**options: str) -> list[int]:
        given = {**secured.options, "stream": "with a key", **options}
        part, endpoint = Range("with a key", 0, 1500), parse_source(given).endpoint
        return [int(n) for columns in read_range(endpoint, part, BY_SESSION) for n in columns[0]]

    certificate = str(secured.certificate)
    assert found(caFile=certificate, encryptionKey=KEY) == list(range(1500))
    with pytest.raises(OptionError, match=r"not trusted.*caFile.*SSL_CERT_FILE"):
        found(encryptionKey=KEY)
    with pytest.raises(InvalidError, match=r"encrypted with aegis-256"):
        found(caFile=certificate)
    other = KEY.replace("a", "b")
    with pytest.raises(StreamfoldError, match="decryption_failed") as raised:
        found(caFile=certificate, encryptionKey=other)
    assert other not in raised.value.message
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    monkeypatch.setenv("S2_ENCRYPTION_KEY", KEY)
    assert found() == list(range(1500))


def test_what_does_not_exist_is_refused_at_once(server: Server) -> None:
    with pytest.raises(NotFoundError, match="stream_not_found"):
        seq_nums(server, Range("no such stream", 0, 5))


def test_a_start_that_is_trimmed_becomes_the_cursor_of_the_newest_snapshot(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(100))
    put(server, stream, "snapshot/60", b"state")
    assert starts(server, stream, bootstrap="true", startingOffsets="earliest") == 0
    server.trim(stream, 60)
    assert starts(server, stream, startingOffsets="earliest") == 60
    put(server, stream, "snapshot/80", b"newer state")
    for start in ("earliest", json.dumps({stream: 10})):
        assert starts(server, stream, bootstrap="true", startingOffsets=start) == 80
    assert starts(server, stream, bootstrap="true", startingOffsets=json.dumps({stream: 70})) == 70
    assert starts(server, stream, startingOffsets=json.dumps({stream: 10})) == 10


def test_a_stream_that_was_deleted_under_a_query_is_data_loss(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    with ServerConnection(source_options(server, stream=stream).endpoint) as connection:
        positions = StreamPositions(
            source_options(server, streamsPattern="gone"), StreamCalls(connection)
        )
        with pytest.raises(StreamGoneError, match=r"'gone'.*before 7.*failOnDataLoss"):
            positions.tails({"gone": 7})
        with pytest.raises(DataLossError, match="failOnDataLoss"):
            positions.tails({stream: 7})
        options = source_options(server, streamsPattern="gone", failOnDataLoss="false")
        tolerant = StreamPositions(options, StreamCalls(connection))
        assert tolerant.tails({"gone": 7, stream: 7}) == {"gone": 7, stream: 7}


def test_an_endpoint_that_holds_no_sessions_is_read_by_pages(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    server.append_numbers(stream, range(2500))
    with refusing_sessions(server) as (url, refused):
        endpoint = parse_source({**server.options, "endpoint": url, "stream": stream}).endpoint
        found = list(read_range(endpoint, Range(stream, 0, 2500), BY_SESSION))
    assert [int(n) for columns in found for n in columns.seq_nums] == list(range(2500))
    assert len(refused) == 1, "it was asked for a session once"


def long_read(server: Server, stream: str, wanted: Wanted) -> Iterator[Columns]:
    """A read of a thousand records, of which connections and servers hold a part at most."""

    async def fill(basin: Any) -> None:
        await basin.create_stream(stream)
        for _ in range(40):
            records = [s2_sdk.Record(b"x" * 40_000) for _ in range(25)]
            await basin.stream(stream).append(s2_sdk.AppendInput(records))

    server.talk(fill)
    endpoint = source_options(server, stream=stream).endpoint
    return read_range(endpoint, Range(stream, 0, 1000), wanted)


@contextmanager
def refusing_sessions(server: Server) -> Iterator[tuple[str, list[str]]]:
    """An endpoint that passes requests on to the server, but for sessions."""
    address = urlsplit(server.url)
    refused: list[str] = []

    class Endpoint(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers["content-type"] == "s2s/proto":
                refused.append(self.path)
                return self._answer(400, b"{}")
            onward = http.client.HTTPConnection(address.hostname or "", address.port)
            onward.request("GET", self.path, headers=dict(self.headers.items()))
            response = onward.getresponse()
            self._answer(response.status, response.read())
            onward.close()
            return None

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as endpoint:
        thread = threading.Thread(target=endpoint.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{endpoint.server_address[1]}", refused
        finally:
            endpoint.shutdown()
            thread.join()


def starts(server: Server, stream: str, **options: str) -> int:
    given = source_options(server, stream=stream, **options)
    with ServerConnection(given.endpoint) as connection:
        return StreamPositions(given, StreamCalls(connection)).starts("latest")[stream]


def put(server: Server, stream: str, what: str, body: bytes) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    path = f"/v1/streams/{quote(stream, safe='')}/{what}"
    connection.request("PUT", path, body, {"s2-basin": BASIN})
    response = connection.getresponse()
    assert response.status == 204, response.read()
    connection.close()
