"""Traces and metrics by OTLP, at a receiver of the test's own that decodes them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from s2_sdk import AppendInput, Record

from streamfold.blob import BlobStore
from streamfold.server.main import running_server
from streamfold.tracing import is_exported, tracing
from tests.archive.tables import at, open_writer, rows
from tests.ports import free_port
from tests.sdk import sdk_client
from tests.server.conftest import configuration

BASIN, STREAM = "traced-basin", "traced"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """What has been sent to /v1/traces and /v1/metrics."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Any] = []

    def spans(self, name: str) -> list[Any]:
        return [
            span
            for request in self.requests
            if isinstance(request, ExportTraceServiceRequest)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name == name
        ]

    def metrics(self) -> dict[str, Any]:
        """The last of each name."""
        return {
            metric.name: metric
            for request in self.requests
            if isinstance(request, ExportMetricsServiceRequest)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextmanager
def receiving() -> Iterator[Receiver]:
    kinds: dict[str, Any] = {
        "/v1/traces": ExportTraceServiceRequest,
        "/v1/metrics": ExportMetricsServiceRequest,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            inbox.requests.append(kinds[self.path].FromString(sent))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        inbox = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield inbox
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield receiver


def links_of(span: Any) -> set[bytes]:
    return {link.span_id for link in span.links}


async def test_a_request_its_append_and_its_commit_are_spans_that_lead_to_each_other(
    receiver: Receiver,
) -> None:
    async with running_server(configuration()) as server, sdk_client(server.url) as s2:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        await s2.basin(BASIN).stream(STREAM).append(AppendInput([Record(b"a"), Record(b"b")]))
    [request] = [
        span for span in receiver.spans("POST") if "records" in attributes(span)["url.path"]
    ]
    assert attributes(request)["http.response.status_code"] == 200
    [append] = receiver.spans("append")
    assert append.parent_span_id == request.span_id
    assert append.trace_id == request.trace_id
    assert attributes(append)["streamfold.append.records"] == 2
    [accepted] = append.events
    commits = {span.span_id: span for span in receiver.spans("commit")}
    [linked] = links_of(append)
    commit = commits[linked]
    assert (
        request.start_time_unix_nano
        <= append.start_time_unix_nano
        <= accepted.time_unix_nano
        <= commit.end_time_unix_nano
        <= append.end_time_unix_nano
        <= request.end_time_unix_nano
    )


async def test_appends_of_a_session_are_traces_with_a_link_to_it(receiver: Receiver) -> None:
    async with running_server(configuration()) as server, sdk_client(server.url) as s2:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        async with s2.basin(BASIN).stream(STREAM).append_session() as session:
            for body in (b"a", b"b"):
                await (await session.submit(AppendInput([Record(body)])))
    first, second = receiver.spans("append")
    assert len({first.trace_id, second.trace_id}) == 2
    sessions = {span.span_id for span in receiver.spans("POST")}
    commits = {span.span_id for span in receiver.spans("commit")}
    for append in (first, second):
        assert not append.parent_span_id
        assert len(links_of(append) & commits) == 1
        assert len(links_of(append) & sessions) == 1
    assert links_of(first) & sessions == links_of(second) & sessions


async def test_a_request_continues_the_trace_of_its_caller(receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    async with running_server(configuration()) as server, httpx.AsyncClient(timeout=60) as http:
        await http.get(f"{server.url}/health", headers=headers)
        await http.get(f"{server.url}/no-such-path", headers={"traceparent": "00-nonsense"})
    by_path = {attributes(span)["url.path"]: span for span in receiver.spans("GET")}
    assert by_path["/health"].trace_id.hex() == TRACE
    assert by_path["/health"].parent_span_id.hex() == CALLER
    assert not by_path["/no-such-path"].parent_span_id
    assert attributes(by_path["/no-such-path"])["http.response.status_code"] == 404


async def test_the_metrics_of_the_server_are_exported_at_the_latest_when_it_stops(
    receiver: Receiver,
) -> None:
    async with running_server(configuration()) as server, sdk_client(server.url) as s2:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        for _ in range(3):
            await s2.basin(BASIN).stream(STREAM).append(AppendInput([Record(b"a"), Record(b"b")]))
    metrics = receiver.metrics()
    [latency] = metrics["s2_append_ack_latency_seconds"].histogram.data_points
    assert latency.count == sum(latency.bucket_counts) == 3
    assert len(latency.bucket_counts) == len(latency.explicit_bounds) + 1
    assert latency.sum > 0
    [records] = metrics["s2_append_batch_records"].histogram.data_points
    assert records.sum == 6
    [followers] = metrics["streamfold_followers"].gauge.data_points
    assert followers.as_double == 0


async def test_the_commit_of_a_table_is_a_span(receiver: Receiver, blobs: BlobStore) -> None:
    with tracing() as tracer:
        assert tracer is not None
        writer = await open_writer(at(blobs))
        await writer.write_base(rows({1: "a"}), "0", reason="first")
    [commit] = receiver.spans("commit table")
    assert attributes(commit) == {"streamfold.table": "public.users"}


async def test_a_receiver_that_is_away_changes_nothing_for_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with running_server(configuration()) as server, sdk_client(server.url) as s2:
        await server.store.create_basin(BASIN)
        await server.store.create_stream(BASIN, STREAM)
        ack = await s2.basin(BASIN).stream(STREAM).append(AppendInput([Record(b"a")]))
        assert ack.tail.seq_num == 1


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import asyncio, sys\n"
        "from streamfold.server.main import running_server\n"
        "from tests.server.conftest import configuration\n"
        "async def main():\n"
        "    async with running_server(configuration()): pass\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


@pytest.mark.parametrize(
    ("environment", "signals"),
    [
        ({}, []),
        (ENDPOINT, ["traces", "metrics"]),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, []),
        (ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}, ["traces"]),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost:4318/v1/metrics"}, ["metrics"]),
    ],
)
def test_the_standard_variables_decide(environment: dict[str, str], signals: list[str]) -> None:
    exported = [name for name in ("traces", "metrics") if is_exported(name, environment)]
    assert exported == signals


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
