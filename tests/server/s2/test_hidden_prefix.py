"""Callers with an auto-prefix never see it."""

from __future__ import annotations

import httpx
import pytest
from s2_sdk import AccessTokenScope, Operation, PrefixMatch

from streamfold.errors import InvalidError, StreamNotFoundError
from streamfold.model.access_tokens import Secret
from streamfold.server.main import running_server
from streamfold.wire.s2.errors import shown_message
from tests.server.conftest import BASIN, ROOT, configuration
from tests.server.durable_streams.conftest import JSON, browsing
from tests.server.durable_streams.test_access import bearer, issue
from tests.server.frames import SESSION, append_frame, frames_in
from tests.server.raw_h2 import h2_client

PREFIX = "acme-internal/"
S2 = {"s2-basin": BASIN}
CONTROL = "/v1/stream/__ds/subscriptions/s"


def requests() -> list[tuple[str, str, dict[str, str], bytes, int]]:
    """Requests of every kind that fail, with the status of their answers."""
    in_s2, durable = "/v1/streams", f"/{BASIN}"
    return [
        ("DELETE", f"{in_s2}/orders", S2, b"", 403),
        ("PUT", f"{durable}/orders/retention/0", {}, b"", 403),
        ("GET", f"{in_s2}/missing/records?seq_num=0", S2, b"", 404),
        ("GET", f"{in_s2}/missing/records/tail", S2, b"", 404),
        ("GET", f"{in_s2}/{'x' * 510}/records/tail", S2, b"", 422),
        ("POST", f"{in_s2}/missing/records", S2 | JSON, b'{"records":[{}]}', 404),
        ("POST", f"{in_s2}/closed/records", S2 | JSON, b'{"records":[{}]}', 409),
        ("POST", in_s2, S2 | JSON, b'{"stream":"orders"}', 409),
        ("GET", f"{in_s2}/orders/snapshot", S2, b"", 404),
        ("PUT", f"{in_s2}/orders/snapshot/9", S2, b"x", 409),
        ("GET", f"{durable}/missing", {}, b"", 404),
        ("GET", f"{durable}/orders/snapshot/0", {}, b"", 404),
        ("POST", f"{durable}/missing", JSON, b"1", 404),
        ("PUT", f"{durable}/fork", {"stream-forked-from": f"{durable}/missing"}, b"", 404),
        ("PUT", CONTROL, JSON, b'{"type":"pull-wake","pattern":"**","wake_stream":"w"}', 403),
    ]


async def test_no_failure_reveals_the_prefix_of_the_caller() -> None:
    scope = AccessTokenScope(
        basins=PrefixMatch(BASIN),
        streams=PrefixMatch(PREFIX),
        ops=[Operation.READ, Operation.APPEND, Operation.CHECK_TAIL, Operation.CREATE_STREAM],
    )
    async with running_server(configuration(root_token=Secret(ROOT))) as server:
        await server.store.create_basin(BASIN)
        secret = await issue(server, scope, prefixed=True)
        async with browsing(server, headers=bearer(secret)) as web:
            for stream in ("orders", "closed"):
                created = await web.put(f"/{BASIN}/{stream}")
                assert created.status_code == 201, created.text
            assert (
                await web.post(f"/{BASIN}/closed", headers={"stream-closed": "true"})
            ).is_success
            for method, path, headers, body, status in requests():
                answer = await web.request(method, path, headers=headers, content=body)
                assert answer.status_code == status, (method, path, answer.text)
                assert PREFIX.strip("/") not in seen(answer), (method, path)
        assert PREFIX.encode() not in await ended_session(server.port, secret)


def seen(answer: httpx.Response) -> str:
    return f"{answer.headers} {answer.text}"


async def ended_session(port: int, secret: str) -> bytes:
    """The terminal frame of a session whose batch was refused."""
    headers = (*SESSION, ("authorization", f"Bearer {secret}"))
    async with h2_client(port) as h2:
        session = h2.open("POST", "/v1/streams/closed/records", headers)
        await h2.send(session, append_frame(b"late"))
        (end,) = frames_in(bytes((await h2.whole(session)).body))
    assert end.failure().status == 409
    assert b"closed" in end.failure().body
    return end.failure().body


@pytest.mark.parametrize(
    "prefix", ["a/", "it's/", 'say "hi"/', "both'\"/", "back\\slash/", "ä/\x01"]
)
@pytest.mark.parametrize("name", ["orders", "o'clock", 'in "quotes"', "a/"])
def test_a_message_names_a_stream_as_its_caller_does(prefix: str, name: str) -> None:
    reported = shown_message(StreamNotFoundError("test-basin", prefix + name), prefix)
    assert unquoted(reported) == unquoted(StreamNotFoundError("test-basin", name).message)
    assert shown_message(InvalidError("nothing of it"), prefix) == "nothing of it"


def unquoted(message: str) -> str:
    """The message without what depends on how a name is quoted."""
    return message.translate({ord(mark): None for mark in "\\'\""})
