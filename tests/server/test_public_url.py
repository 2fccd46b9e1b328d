"""Links in responses use the public URL, whatever the request says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamfold.server.main import running_server
from tests.server.conftest import configuration
from tests.server.durable_streams.conftest import JSON, browsing
from tests.server.durable_streams.subscribing import receiving

PUBLIC = "https://streams.example/below"
STREAM = "/v1/stream/orders"


async def test_links_and_callbacks_have_the_public_url() -> None:
    settings = configuration(public_url=PUBLIC, local_webhooks=True)
    async with (
        running_server(settings) as server,
        browsing(server) as web,
        receiving() as receiver,
    ):
        forged = {"host": "127.9.9.9"}
        created = await web.put(STREAM, headers=JSON | forged)
        assert created.headers["location"] == f"{PUBLIC}{STREAM}"
        await web.put(f"{STREAM}/snapshot/0", headers=forged, content=b"state")
        led = await web.get(f"{STREAM}/snapshot", headers=forged)
        assert led.headers["location"].startswith(f"{PUBLIC}{STREAM}/snapshot/")
        asked = {"type": "webhook", "streams": ["orders"], "webhook": {"url": receiver.url}}
        path = "/v1/stream/__ds/subscriptions/s"
        shown = await web.put(path, headers=forged, json=asked)
        assert shown.json()["webhook"]["signing"]["jwks_url"].startswith(PUBLIC)
        await web.post(STREAM, headers=JSON | forged, content=b"1")
        hook = await receiver.hook()
        assert hook.body["callback_url"] == f"{PUBLIC}{path}/callback"


async def test_subscriptions_from_before_call_back_to_the_public_url(tmp_path: Path) -> None:
    path = "/v1/stream/__ds/subscriptions/s"
    settings = configuration(location=tmp_path.as_uri(), local_webhooks=True)
    async with receiving() as receiver:
        async with running_server(settings) as server, browsing(server) as web:
            await web.put(STREAM, headers=JSON)
            asked = {"type": "webhook", "streams": ["orders"], "webhook": {"url": receiver.url}}
            await web.put(path, headers={"host": "127.9.9.9"}, json=asked)
        async with (
            running_server(replace(settings, public_url=PUBLIC)) as server,
            browsing(server) as web,
        ):
            await web.post(STREAM, headers=JSON, content=b"1")
            hook = await receiver.hook()
            assert hook.body["callback_url"] == f"{PUBLIC}{path}/callback"


async def test_without_one_links_have_the_host_of_the_request() -> None:
    async with running_server(configuration()) as server, browsing(server) as web:
        created = await web.put(STREAM, headers=JSON | {"host": "localhost:7"})
        assert created.headers["location"] == f"http://localhost:7{STREAM}"
