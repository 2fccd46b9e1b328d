"""Copies between two real servers: exact, resumable, compared, or refused with the way out."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import count

import pytest

from tests.cli.commands import Shell
from tests.cli.conftest import create
from tests.interop.serving import serving

_NUMBERS = count(1)


@pytest.fixture(scope="module")
def origin() -> Iterator[Shell]:
    """The server that is copied from."""
    with serving("--host", "127.0.0.1", "--no-access-log", "--trim-grace", "0") as exports:
        yield Shell(exports)


@pytest.fixture
def source(origin: Shell) -> str:
    """A basin on that server."""
    name = f"copied-basin-{next(_NUMBERS)}"
    create(origin.environment, f"basins/{name}")
    return name


@pytest.fixture
def target() -> str:
    return f"target-basin-{next(_NUMBERS)}"


def endpoint(shell: Shell) -> tuple[str, str]:
    return "--from-endpoint", shell.environment["S2_ACCOUNT_ENDPOINT"]


def fill(origin: Shell, stream_uri: str, *bodies: str, stamp: int = 1_000) -> None:
    lines = [
        {"body": body, "headers": [["n", str(at)]], "timestamp": stamp + at}
        for at, body in enumerate(bodies)
    ]
    origin.ok(
        "append", stream_uri, "--format", "json", stdin="\n".join(map(json.dumps, lines)).encode()
    )


def records(shell: Shell, stream_uri: str) -> bytes:
    return shell.ok("read", stream_uri, "--format", "base64").stdout


def test_a_stream_is_copied_with_everything_that_it_has(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri = f"s2://{source}/orders/eu"
    origin.ok("create-stream", stream_uri, "--retention-policy", "30d", "--timestamping-uncapped")
    fill(origin, stream_uri, "a", "b\n", "ä")
    raw = base64.b64encode(bytes(range(256))).decode()
    origin.ok("append", stream_uri, "--format", "base64", stdin=f'{{"body": "{raw}"}}\n'.encode())
    origin.ok("fence", stream_uri, "writer-7")
    done = shell.json("copy", stream_uri, f"s2://{target}", *endpoint(origin))
    copy = f"s2://{target}/orders/eu"
    assert (done["source"], done["target"]) == (stream_uri, copy)
    assert (done["records"], done["start"], done["tail"], done["shift"]) == (5, 0, 5, 0)
    assert (done["verified"], len(done["digest"])) == (5, 64)
    assert records(shell, copy) == records(origin, stream_uri)
    assert shell.json("get-stream-config", copy) == origin.json("get-stream-config", stream_uri)
    refused = shell("append", copy, "--fencing-token", "other", stdin=b"x\n")
    assert refused.status == 3


def test_a_copy_continues_where_it_ended(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri, copy = f"s2://{source}/s", f"s2://{target}/other-name"
    origin.ok("create-stream", stream_uri, "--timestamping-uncapped")
    fill(origin, stream_uri, "a", "b")
    arguments = ("copy", stream_uri, copy, *endpoint(origin))
    assert shell.json(*arguments)["records"] == 2
    again = shell.json(*arguments)
    assert (again["records"], again["start"], again["tail"], again["verified"]) == (0, 2, 2, 0)
    fill(origin, stream_uri, *["more"] * 2_500, stamp=5_000)
    more = shell.json(*arguments, "--verify", "all")
    assert (more["records"], more["start"], more["verified"]) == (2_500, 2, 2_502)
    assert records(shell, copy) == records(origin, stream_uri)


def test_a_basin_is_copied_with_its_streams_or_those_of_a_prefix(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    origin.ok("reconfigure-basin", source, "--create-stream-on-append")
    for name in ("a/1", "a/2", "b"):
        fill(origin, f"s2://{source}/{name}", name)
    done = shell.ok("copy", source, target, "--prefix", "a/", "--json", *endpoint(origin)).objects
    assert [one["target"] for one in done] == [f"s2://{target}/a/1", f"s2://{target}/a/2"]
    shell.ok("copy", f"s2://{source}", f"s2://{target}", *endpoint(origin))
    names = [info["name"] for info in shell.ok("list-streams", target, "--json").objects]
    assert names == ["a/1", "a/2", "b"]
    assert shell.json("get-basin-config", target) == origin.json("get-basin-config", source)
    nothing = shell("copy", source, target, "--prefix", "zz", "--json", *endpoint(origin))
    assert (nothing.status, nothing.error["code"]) == (6, "nothing_to_copy")


def trimmed(origin: Shell, source: str) -> str:
    """A stream whose first two records are gone: c, d, e and the trim are left."""
    stream_uri = f"s2://{source}/trimmed"
    origin.ok("create-stream", stream_uri, "--timestamping-uncapped")
    fill(origin, stream_uri, "a", "b", "c", "d", "e")
    origin.ok("trim", stream_uri, "2", "--yes")
    return stream_uri


def test_a_trimmed_source_is_refused_with_what_can_be_done(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri = trimmed(origin, source)
    refused = shell("copy", stream_uri, target, "--json", *endpoint(origin))
    assert (refused.status, refused.error["code"]) == (1, "source_trimmed")
    for way_out in ("--pad", "--renumber", "seq_num 2"):
        assert way_out in refused.error["message"]
    assert shell.json("check-tail", f"{target}/trimmed")["seq_num"] == 0


def test_padding_keeps_seq_nums_of_a_trimmed_source(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri = trimmed(origin, source)
    done = shell.json("copy", stream_uri, target, "--pad", "--verify", "all", *endpoint(origin))
    assert (done["records"], done["tail"], done["shift"], done["verified"]) == (6, 6, 0, 4)
    shared = shell.ok("read", f"{target}/trimmed", "--seq-num", "2", "--format", "base64").stdout
    assert shared == records(origin, stream_uri)
    fill(origin, stream_uri, "f", stamp=9_000)
    assert shell.json("copy", stream_uri, target, "--pad", *endpoint(origin))["records"] == 1


def test_renumbering_begins_at_0_and_continues_densely(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri, copy = trimmed(origin, source), f"{target}/trimmed"
    done = shell.json("copy", stream_uri, target, "--renumber", *endpoint(origin))
    assert (done["records"], done["tail"], done["shift"], done["verified"]) == (4, 4, 2, 4)
    fill(origin, stream_uri, "f", stamp=9_000)
    origin.ok("trim", stream_uri, "4", "--yes")
    more = shell.json("copy", stream_uri, target, "--renumber", *endpoint(origin))
    assert (more["records"], more["shift"]) == (2, 2)
    bodies = [line for line in shell.ok("read", copy).stdout.splitlines() if line]
    assert bodies[-2:] == [b"e", b"f"]


def test_a_target_with_other_records_is_refused(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri, copy = f"s2://{source}/s", f"s2://{target}/s"
    origin.ok("create-stream", stream_uri, "--timestamping-uncapped")
    fill(origin, stream_uri, "a", "b")
    shell.ok("create-basin", target)
    shell.ok("create-stream", copy)
    shell.ok("append", copy, stdin=b"mine\n")
    config = shell.json("get-stream-config", copy)
    refused = shell("copy", stream_uri, copy, "--json", *endpoint(origin))
    assert (refused.status, refused.error["code"]) == (1, "copy_unrelated")
    shell.ok("append", copy, stdin=b"mine\n" * 4)
    ahead = shell("copy", stream_uri, copy, "--json", *endpoint(origin))
    assert (ahead.status, ahead.error["code"]) == (1, "copy_unrelated")
    assert shell.json("get-stream-config", copy) == config


def test_what_cannot_be_meant_is_a_usage_error(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    for arguments in (
        (source, f"{target}/stream"),
        (f"{source}/s", target, "--prefix", "a"),
        (f"{source}/s", target, "--pad", "--renumber"),
        ("s2://", target),
    ):
        assert shell("copy", *arguments, *endpoint(origin)).status == 2
    missing = shell("copy", f"{source}/none", target, "--json", *endpoint(origin))
    assert (missing.status, missing.error["code"]) == (4, "stream_not_found")
    assert shell("get-basin-config", target).status == 4


def test_a_copy_stays_on_one_server_by_default(shell: Shell, stream_uri: str) -> None:
    shell.ok("append", stream_uri, stdin=b"one\ntwo\n")
    done = shell.json("copy", stream_uri, f"{stream_uri}-copy")
    assert (done["records"], done["verified"]) == (2, 2)
    assert records(shell, f"{stream_uri}-copy") == records(shell, stream_uri)


def tail_of(shell: Shell, stream_uri: str) -> int:
    """The tail of a stream; 0 if there is no stream."""
    tail = shell("check-tail", stream_uri, "--json")
    return int(tail.objects[0]["seq_num"]) if tail.status == 0 else 0


async def test_a_copy_that_is_killed_is_completed_by_the_next(
    shell: Shell, origin: Shell, source: str, target: str
) -> None:
    stream_uri, copy = f"s2://{source}/s", f"s2://{target}/s"
    origin.ok("create-stream", stream_uri, "--timestamping-uncapped")
    fill(origin, stream_uri, *["x" * 1_000] * 20_000)
    arguments = ("copy", stream_uri, target, *endpoint(origin))
    async with shell.running(*arguments):
        while not tail_of(shell, copy):
            pass  # killed when it has begun, however far it has come by then
    tail = -1
    while tail != (tail := tail_of(shell, copy)):
        pass  # the server takes what the killed copy has sent
    done = shell.json(*arguments, "--verify", "all")
    assert (done["tail"], done["verified"]) == (20_000, 20_000)
