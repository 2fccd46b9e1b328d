"""Where webhooks may go, and that they go exactly there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from streamfold.server.config import write_self_signed
from streamfold.server.durable_streams.subscriptions.problems import WebhookUrlRejectedError
from streamfold.server.durable_streams.subscriptions.webhooks import (
    BODY_MAX,
    HostLookups,
    Reply,
    WebhookAddress,
    WebhookClient,
    WebhookError,
    is_public,
    parse_webhook_url,
    require_allowed,
)
from streamfold.store.store import open_store
from tests.server.durable_streams.subscribing import (
    BASIN,
    Clock,
    Receiver,
    answer,
    create,
    receiving,
    serving,
)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "100.100.100.200",  # metadata
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",  # metadata
        "169.254.169.254",  # metadata
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",  # metadata
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",  # NAT64 of 127.0.0.1
        "64:ff9b:1::7f00:1",
        "100::1",
        "2001::1",  # Teredo
        "2001:db8::1",
        "2002:7f00:1::",  # 6to4 of 127.0.0.1
        "3fff::1",
        "fc00::1",
        "fd00:ec2::254",  # metadata
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700::1111"])
def test_a_public_address_is_fine(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/hook",
        "//example.com/hook",
        "file:///etc/passwd",
        "gopher://example.com/",
        "https://",
        "https:///hook",
        "https://user:secret@example.com/",
        "https://@example.com/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:x/",
        "https://example.com\\@127.0.0.1/",
        "https://exa mple.com/",
        "https://example.com/\r\nx: y",
        "https://example.com/\u00e4",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "https://" + "x" * 2048,
        "http://example.com/",
        "http://10.0.0.1/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://[::1]/",
        "http://localhost.example.com/",
        "http://127.0.0.1.example.com/",
        "http://localhost./",
    ],
)
def test_a_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(WebhookUrlRejectedError) as refusal:
        parse_webhook_url(url, local=True)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://example.com", WebhookAddress(True, "example.com", 443, "/", "example.com")),
        (
            "https://Example.com:8443/a?b=c#d",
            WebhookAddress(True, "example.com", 8443, "/a?b=c", "Example.com:8443"),
        ),
        ("https://[2606::1]/x", WebhookAddress(True, "2606::1", 443, "/x", "[2606::1]")),
        ("http://localhost:81/x", WebhookAddress(False, "localhost", 81, "/x", "localhost:81")),
        ("http://127.0.0.9/", WebhookAddress(False, "127.0.0.9", 80, "/", "127.0.0.9")),
    ],
)
def test_a_url_is_taken_apart(url: str, target: WebhookAddress) -> None:
    assert parse_webhook_url(url, local=True) == target


def test_http_is_for_this_machine_and_only_if_allowed() -> None:
    with pytest.raises(WebhookUrlRejectedError):
        parse_webhook_url("http://localhost/", local=False)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f.0.0.1", "017700000001", "localhost"])
async def test_other_ways_to_write_an_address_do_not_help(host: str) -> None:
    target = parse_webhook_url(f"https://{host}/", local=True)
    addresses = await HostLookups().addresses(None, host, 443)
    with pytest.raises(WebhookUrlRejectedError):
        require_allowed(target, addresses)


def test_one_bad_address_among_good_ones_is_enough() -> None:
    target = parse_webhook_url("https://example.com/", local=True)
    with pytest.raises(WebhookUrlRejectedError):
        require_allowed(target, ["8.8.8.8", "10.0.0.1"])


async def test_localhost_and_literals_need_no_lookup() -> None:
    def look_up(host: str, port: int) -> Sequence[str]:
        raise AssertionError(host)

    lookups = HostLookups(look_up)
    assert await lookups.addresses("me", "localhost", 80) == ("127.0.0.1", "::1")
    assert await lookups.addresses("me", "8.8.8.8", 80) == ["8.8.8.8"]


async def test_a_name_that_cannot_be_one_has_no_address() -> None:
    with pytest.raises(OSError):  # noqa: PT011 - each resolver says it in its own words
        await HostLookups().addresses(None, "x" * 64 + ".example", 443)


async def test_a_name_that_changes_its_address_is_judged_at_each_delivery() -> None:
    """At first it is public, then it leads into the server's own network: nothing is sent there."""
    addresses = ["8.8.8.8"]

    def look_up(host: str, port: int) -> Sequence[str]:
        return addresses

    async with open_store("memory:") as store, receiving() as receiver:
        await store.create_basin(BASIN)
        async with serving(store, Clock(), look_up=look_up) as bench:
            url = f"https://rebinding.example:{receiver.port}/"
            created = await bench.put("s", type="webhook", pattern="**", webhook={"url": url})
            assert created.status_code == 201
            addresses[:] = ["127.0.0.1"]
            await create(store, "a", 1)
            await bench.stored("s", lambda state: state.failures == 1)
            assert receiver.hooks.empty()


def local(receiver: Receiver, host: str = "localhost") -> WebhookAddress:
    return WebhookAddress(False, host, receiver.port, "/hook?x=1", f"{host}:{receiver.port}")


async def test_the_connection_goes_to_the_address_that_was_judged() -> None:
    """The name is not resolved again: this one cannot be."""
    async with receiving() as receiver:
        target = local(receiver, "no-such-host.invalid")
        reply = await WebhookClient().post(target, ["127.0.0.1"], {"x-test": "yes"}, b"body")
        hook = await receiver.hook()
    assert reply == Reply(200, b"")
    assert (hook.path, hook.raw, hook.headers["x-test"]) == ("/hook?x=1", b"body", "yes")
    assert hook.headers["host"] == f"no-such-host.invalid:{receiver.port}"


async def test_the_next_address_is_tried_if_one_does_not_answer() -> None:
    async with receiving() as receiver:
        reply = await WebhookClient().post(local(receiver), ["127.0.0.2", "127.0.0.1"], {}, b"")
    assert reply.status == 200


async def test_with_https_the_certificate_must_be_of_the_name(tmp_path: Path) -> None:
    files = write_self_signed(tmp_path)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(files.certificate, files.key)
    trusting = ssl.create_default_context(cafile=str(files.certificate))
    receiver = Receiver()
    server = await asyncio.start_server(receiver.take, "127.0.0.1", 0, ssl=served)
    port = server.sockets[0].getsockname()[1]
    async with server:
        good = WebhookAddress(True, "localhost", port, "/", "localhost")
        reply = await WebhookClient(tls=trusting).post(good, ["127.0.0.1"], {}, b"{}")
        assert reply.status == 200
        assert (await receiver.hook()).raw == b"{}"
        other = WebhookAddress(True, "example.com", port, "/", "example.com")
        with pytest.raises(ssl.SSLCertVerificationError):
            await WebhookClient(tls=trusting).post(other, ["127.0.0.1"], {}, b"{}")
        with pytest.raises(ssl.SSLCertVerificationError):
            await WebhookClient().post(good, ["127.0.0.1"], {}, b"{}")
        assert receiver.hooks.empty()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        (answer(200, "hello"), Reply(200, b"hello")),
        (answer(302, "", "location: /x"), Reply(302, b"")),
        (b"HTTP/1.1 204\r\n\r\n", Reply(204, b"")),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", Reply(200, b"to the end")),
        (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + answer(201), Reply(201, b"")),
        (CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n", Reply(200, b"abcde")),
        (answer(200, "x" * BODY_MAX), Reply(200, b"x" * BODY_MAX)),
        (answer(200, "x" * (BODY_MAX + 1)), Reply(200, b"")),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_MAX + 1), Reply(200, b"")),
        (CHUNKED + b"%x\r\n" % (BODY_MAX + 1) + b"x" * (BODY_MAX + 1), Reply(200, b"")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n", Reply(200, b"")),
    ],
)
async def test_an_answer_is_read_as_far_as_it_is_of_interest(said: bytes, reply: Reply) -> None:
    async with receiving() as receiver:
        receiver.answer = said
        assert await WebhookClient().post(local(receiver), ["127.0.0.1"], {}, b"") == reply


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nhello",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"5\r\nhel",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
    ],
)
async def test_an_answer_that_is_not_http_is_none(said: bytes) -> None:
    async with receiving() as receiver:
        receiver.answer = said
        with pytest.raises((WebhookError, OSError)):
            await WebhookClient().post(local(receiver), ["127.0.0.1"], {}, b"")


async def test_a_receiver_that_answers_byte_by_byte_runs_out_of_time() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.01)  # it is slowness that is tested
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    async with server:
        target = WebhookAddress(
            False, "localhost", server.sockets[0].getsockname()[1], "/", "localhost"
        )
        with pytest.raises(TimeoutError):
            await WebhookClient(timeout=0.2).post(target, ["127.0.0.1"], {}, b"")


async def test_a_port_without_a_listener_is_an_error() -> None:
    async with receiving() as receiver:
        pass
    with pytest.raises(ConnectionRefusedError):
        await WebhookClient().post(local(receiver), ["127.0.0.1"], {}, b"")
