"""Receiving ends of sinks: real services of a moto server, and a real little HTTP server."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3

from streamfold.archive.destinations.aws_credentials import AwsAccess, Profiles
from streamfold.archive.events import (
    Event,
    EventBridgeSink,
    KinesisSink,
    MemorySink,
    SnsSink,
    SqsSink,
    WebhookSink,
    decode_event,
)
from streamfold.testing.event_sink_kit import SinkProbe
from tests.s3 import S3Server

#: Seconds until a message that does not come is given up: generous, as the machine may be busy.
TIMEOUT = 300


@cache
def aws_client(server: S3Server, service: str) -> Any:
    """Return a plain boto3 client, for looking from outside."""
    return boto3.client(
        service,
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        region_name=server.region,
    )


def access_to(server: S3Server, **fields: str) -> AwsAccess:
    """Return access by a profile; the ambient credentials come from the environment."""
    raw = {"tests": {"region": server.region, "endpoint_url": server.endpoint, **fields}}
    return Profiles.parse(raw).access("tests", path="sink.credentials")


def new_name() -> str:
    return f"n{uuid.uuid4().hex[:12]}"


class Queue:
    """A queue of one test, and what was received from it."""

    def __init__(self, server: S3Server, *, fifo: bool) -> None:
        self._client = aws_client(server, "sqs")
        attributes = {"FifoQueue": "true"} if fifo else {}
        name = new_name() + (".fifo" if fifo else "")
        self.url = self._client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        self.messages: list[dict[str, Any]] = []

    @property
    def arn(self) -> str:
        found = self._client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        return str(found["Attributes"]["QueueArn"])

    def delete(self) -> None:
        self._client.delete_queue(QueueUrl=self.url)

    async def receive(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(TIMEOUT):
            while await asyncio.to_thread(self._receive) or len(self.messages) < count:
                continue
        return self.messages

    def _receive(self) -> bool:
        found = self._client.receive_message(
            QueueUrl=self.url, MaxNumberOfMessages=10, AttributeNames=["All"]
        ).get("Messages", [])
        for message in found:
            self._client.delete_message(QueueUrl=self.url, ReceiptHandle=message["ReceiptHandle"])
        self.messages += found
        return bool(found)


class QueueProbe(SinkProbe):
    """SQS."""

    def __init__(self, server: S3Server, access: AwsAccess, *, fifo: bool) -> None:
        self.queue = Queue(server, fifo=fifo)
        self.sink = SqsSink(self.queue.url, access)
        self.drops_repetitions = fifo
        self.secrets = [server.secret_access_key]

    async def received(self, count: int) -> list[Event]:
        return [decode_event(m["Body"]) for m in await self.queue.receive(count)]

    async def break_target(self) -> None:
        self.queue.delete()


class TopicProbe(SinkProbe):
    """SNS, received through a queue that is subscribed to the topic."""

    def __init__(self, server: S3Server, access: AwsAccess, *, fifo: bool) -> None:
        self._client = aws_client(server, "sns")
        name = new_name() + (".fifo" if fifo else "")
        attributes = {"FifoTopic": "true"} if fifo else {}
        self.arn = self._client.create_topic(Name=name, Attributes=attributes)["TopicArn"]
        self.queue = Queue(server, fifo=fifo)
        self._client.subscribe(
            TopicArn=self.arn,
            Protocol="sqs",
            Endpoint=self.queue.arn,
            Attributes={"RawMessageDelivery": "true"},
        )
        self.sink = SnsSink(self.arn, access)
        self.drops_repetitions = fifo
        self.secrets = [server.secret_access_key]

    async def received(self, count: int) -> list[Event]:
        return [decode_event(m["Body"]) for m in await self.queue.receive(count)]

    async def break_target(self) -> None:
        self._client.delete_topic(TopicArn=self.arn)


class KinesisProbe(SinkProbe):
    """Kinesis, with more than one shard."""

    def __init__(self, server: S3Server, access: AwsAccess) -> None:
        self._client = aws_client(server, "kinesis")
        self._name = new_name()
        self._client.create_stream(StreamName=self._name, ShardCount=3)
        self.sink = KinesisSink(self._name, access)
        self.secrets = [server.secret_access_key]

    async def received(self, count: int) -> list[Event]:
        async with asyncio.timeout(TIMEOUT):
            while len(found := await asyncio.to_thread(self.records)) < count:
                continue
        return [decode_event(record["Data"]) for record in found]

    async def break_target(self) -> None:
        self._client.delete_stream(StreamName=self._name)

    def records(self) -> list[dict[str, Any]]:
        """Return all records, shard by shard."""
        shards = self._client.list_shards(StreamName=self._name)["Shards"]
        return [record for shard in shards for record in self._records_of(shard["ShardId"])]

    def _records_of(self, shard: str) -> list[dict[str, Any]]:
        start = self._client.get_shard_iterator(
            StreamName=self._name, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
        )
        found = self._client.get_records(ShardIterator=start["ShardIterator"], Limit=1000)
        return list(found["Records"])


class BusProbe(SinkProbe):
    """EventBridge, received through a queue that a rule sends to."""

    is_ordered = False

    def __init__(self, server: S3Server, access: AwsAccess) -> None:
        self._client = aws_client(server, "events")
        self._bus = new_name()
        self._client.create_event_bus(Name=self._bus)
        self.queue = Queue(server, fifo=False)
        pattern = {"source": ["streamfold.archive"]}
        self._client.put_rule(Name="all", EventBusName=self._bus, EventPattern=json.dumps(pattern))
        self._client.put_targets(
            Rule="all", EventBusName=self._bus, Targets=[{"Id": "1", "Arn": self.queue.arn}]
        )
        self.sink = EventBridgeSink(self._bus, access)
        self.secrets = [server.secret_access_key]

    async def received(self, count: int) -> list[Event]:
        bodies = [json.loads(m["Body"]) for m in await self.queue.receive(count)]
        return [decode_event(json.dumps(body["detail"])) for body in bodies]

    async def break_target(self) -> None:
        self._client.remove_targets(Rule="all", EventBusName=self._bus, Ids=["1"])
        self._client.delete_rule(Name="all", EventBusName=self._bus)
        self._client.delete_event_bus(Name=self._bus)


class MemoryProbe(SinkProbe):
    """A sink in memory; `outer` is what sends to it, if not itself."""

    def __init__(self) -> None:
        self.memory = self.sink = MemorySink()

    async def received(self, count: int) -> list[Event]:
        return await self.memory.wait_for(count)

    async def break_target(self) -> None:
        await self.memory.close()


@dataclass(slots=True)
class Hook:
    """A webhook's receiver; `answer` may say otherwise than 204, or not answer at all."""

    url: str = ""
    requests: list[tuple[str, Mapping[str, str], bytes]] = field(default_factory=list)
    #: Called with the handler after a request was read whole; returns the status to send.
    answer: Callable[[BaseHTTPRequestHandler], int | None] = lambda _: 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stop: Callable[[], None] = lambda: None


@contextmanager
def run_hook(tls: ssl.SSLContext | None = None) -> Iterator[Hook]:
    """Run an HTTP server on a free port until the block ends, HTTPS where there is a context."""
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            body = self.rfile.read(length)
            if len(body) < length:  # broken off by the sender
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            hook.requests.append((self.path, headers, body))
            status = hook.answer(self)
            if status is None:
                return
            self.send_response(status)
            for name, value in hook.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(hook.body)))
            self.end_headers()
            self.wfile.write(hook.body)

        def log_message(self, *_: object) -> None:
            """Say nothing: the path of a webhook is a secret."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    port = server.server_address[1]
    scheme = "https" if tls else "http"
    hook.url = f"{scheme}://127.0.0.1:{port}/hooks/path-secret-1?key=query-secret-2"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def stop() -> None:
        server.shutdown()
        thread.join()
        server.server_close()

    hook.stop = stop
    try:
        yield hook
    finally:
        if thread.is_alive():
            stop()


class WebhookProbe(SinkProbe):
    """A webhook."""

    secrets = ("path-secret-1", "query-secret-2")

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.sink = WebhookSink(hook.url)

    async def received(self, count: int) -> list[Event]:
        assert len(self._hook.requests) >= count  # each was received before it was answered
        return [decode_event(body) for _, _, body in self._hook.requests]

    async def break_target(self) -> None:
        await asyncio.to_thread(self._hook.stop)
