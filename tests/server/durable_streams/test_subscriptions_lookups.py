"""A name server that never answers delays the webhooks of one owner alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from streamfold.model.access_tokens import EVERYTHING, Right
from streamfold.model.grants import Grant
from streamfold.server.durable_streams.subscriptions import fairness, runner, webhooks
from streamfold.server.durable_streams.subscriptions.webhooks import (
    LOOKUPS_MAX,
    LOOKUPS_PER_OWNER,
    HostLookups,
    Reply,
    WebhookAddress,
    WebhookClient,
)
from streamfold.server.http.request import Request
from streamfold.store.store import open_store
from tests.server.durable_streams.subscribing import BASIN, Clock, create, receiving, serving

PUBLIC = "8.8.8.8"


class LocalNetwork(WebhookClient):
    """Connects to this machine, without TLS, in place of the public address."""

    async def post(
        self,
        target: WebhookAddress,
        addresses: Sequence[str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        assert list(addresses) == [PUBLIC]
        return await super().post(replace(target, secure=False), ["127.0.0.1"], headers, body)


class NameServer:
    """Knows good.example, and answers for no other name before `answer` is set."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.asked = threading.Semaphore(0)
        self.hanging = 0

    def __call__(self, host: str, port: int) -> Sequence[str]:
        if host != "good.example":
            self.hanging += 1
            self.asked.release()
            self.answer.wait()
            raise OSError("unknown")
        return [PUBLIC]


async def authorise(request: Request) -> Grant:
    return await grant_of(request.header("authorization"))


async def grant_of(owner: str | None) -> Grant:
    return Grant(frozenset({Right.READ}), EVERYTHING, EVERYTHING, token_id=owner)


async def test_lookups_that_hang_do_not_delay_the_webhooks_of_other_owners() -> None:
    names = NameServer()
    async with open_store("memory:") as store, receiving() as receiver:
        await store.create_basin(BASIN)
        async with serving(
            store,
            Clock(),
            authorise,
            grant_of=grant_of,
            look_up=names,
            webhooks=LocalNetwork(),
        ) as bench:
            urls = {f"bad{n}": f"https://bad{n}.example/" for n in range(40)}
            urls["good"] = f"https://good.example:{receiver.port}/"
            try:
                await create(store, "a")
                for id_, url in urls.items():
                    owner = id_.rstrip("0123456789")
                    body = {"type": "webhook", "pattern": "*", "webhook": {"url": url}}
                    created = await bench.client.put(
                        f"/subscriptions/{id_}", json=body, headers={"authorization": owner}
                    )
                    assert created.status_code == 201, created.text
                assert names.hanging == 0  # a creation looks nothing up
                await create(store, "b", 1)
                for _ in range(LOOKUPS_PER_OWNER):
                    assert await asyncio.to_thread(names.asked.acquire, timeout=60)
                assert (await receiver.hook()).body["subscription_id"] == "good"
                assert names.hanging == LOOKUPS_PER_OWNER
            finally:
                names.answer.set()


async def test_lookups_of_many_owners_that_hang_leave_half_of_the_threads_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairness, "SLOW_AFTER", 0.0)
    monkeypatch.setattr(webhooks, "LOOKUP_TIMEOUT", 600.0)
    names = NameServer()
    lookups = HostLookups(names)
    owners = [f"bad{number}" for number in range(LOOKUPS_MAX // LOOKUPS_PER_OWNER)]

    async def hang(expected: int, prefix: str) -> list[asyncio.Task[Sequence[str]]]:
        before, tasks = names.hanging, []
        for owner in owners:
            hosts = (f"{prefix}{number}.example" for number in range(LOOKUPS_PER_OWNER))
            tasks += [asyncio.create_task(lookups.addresses(owner, host, 443)) for host in hosts]
        for _ in range(expected):
            assert await asyncio.to_thread(names.asked.acquire, timeout=60)
        assert names.hanging - before == expected
        return tasks

    first = await hang(LOOKUPS_MAX, "first")
    names.answer.set()
    await asyncio.gather(*first, return_exceptions=True)
    names.answer.clear()
    second = await hang(LOOKUPS_MAX // 2, "second")
    try:
        assert await lookups.addresses("good", "good.example", 443) == [PUBLIC]
    finally:
        names.answer.set()
        await asyncio.gather(*second, return_exceptions=True)


async def test_receivers_that_do_not_answer_leave_deliveries_to_other_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "DELIVERIES_MAX", 4)
    monkeypatch.setattr(runner, "DELIVERIES_PER_OWNER", 2)
    async with (
        open_store("memory:") as store,
        receiving() as silent,
        receiving() as receiver,
    ):
        silent.answer = None
        await store.create_basin(BASIN)
        patient = WebhookClient(timeout=600)
        async with serving(store, Clock(), authorise, grant_of=grant_of, webhooks=patient) as bench:
            await create(store, "a")
            urls = {f"bad{number}": silent.url for number in range(8)} | {"good": receiver.url}
            for id_, url in urls.items():
                body = {"type": "webhook", "pattern": "*", "webhook": {"url": url}}
                headers = {"authorization": id_.rstrip("0123456789")}
                created = await bench.client.put(
                    f"/subscriptions/{id_}", json=body, headers=headers
                )
                assert created.status_code == 201, created.text
            await create(store, "b", 1)
            for _ in range(2):
                assert (await silent.hook()).body["subscription_id"].startswith("bad")
            assert (await receiver.hook()).body["subscription_id"] == "good"
            assert silent.hooks.empty()
