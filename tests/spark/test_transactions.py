"""Batches are appended exactly once, whatever happens in between. Without Spark."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest
import s2_sdk

from streamfold.errors import ConflictError, InvalidError
from streamfold.spark.stream.client import ServerConnection
from streamfold.spark.stream.exactly_once import MARKER, MARKER_RESERVE, Marker, Transaction
from streamfold.spark.stream.options import SinkOptions, parse_sink
from streamfold.spark.stream.rows import by_stream, cut_batches, stage

from .server import Server

#: Bytes of a body, so that a few hundred rows need several appends.
SIZE = 20_000


def sink_options(server: Server, stream: str) -> SinkOptions:
    return parse_sink({**server.options, "stream": stream})


def parts_of(options: SinkOptions, bodies: list[bytes]) -> list[list[bytes]]:
    table = stage(pa.record_batch({"body": pa.array(bodies, pa.binary())}), options)
    ((_, rows),) = by_stream(table)
    return list(cut_batches(rows, MARKER_RESERVE))


def bodies_of(numbers: range) -> list[bytes]:
    return [b"%d " % number + b"x" * SIZE for number in numbers]


def run(options: SinkOptions, batch: int, parts: list[list[bytes]], name: str = "query") -> int:
    with ServerConnection(options.endpoint) as connection:
        return Transaction(connection, options.stream or "", name, batch, parts).append()


def test_what_is_in_the_stream_is_not_appended_again(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    options, bodies = sink_options(server, stream), bodies_of(range(120))
    parts = parts_of(options, bodies)
    assert len(parts) == 3
    assert run(options, 0, parts) == 3
    assert run(options, 0, parts) == 0
    assert run(options, 1, parts[:1]) == 1
    assert run(options, 0, parts) == 0, "an older batch is in the stream, too"
    assert run(options, 0, parts, "another query") == 3
    assert server.bodies(stream) == bodies + bodies[:52] + bodies
    markers = [r.headers[-1] for r in server.records(stream) if r.headers]
    assert [name for name, _ in markers] == [MARKER] * 7
    assert Marker.decode(markers[2][1]) is not None


def test_a_batch_that_was_cut_off_is_completed_behind_what_others_wrote(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    options, bodies = sink_options(server, stream), bodies_of(range(120))
    parts = parts_of(options, bodies)
    with ServerConnection(options.endpoint) as connection:
        cut_off = Transaction(connection, stream, "query", 5, parts)
        cut_off._parts = parts[:2]  # its process ends here
        assert cut_off.append() == 2
    others = [s2_sdk.Record(b"other", [(MARKER, b"only looks like one")]) for _ in range(2500)]
    server.append(stream, others)
    assert run(options, 5, parts) == 1
    found = [body for body in server.bodies(stream) if body != b"other"]
    assert found == bodies


def test_a_repeated_batch_with_other_rows_is_refused_before_anything_is_appended(
    server: Server, fresh: Callable[[], str]
) -> None:
    stream = fresh()
    options = sink_options(server, stream)
    run(options, 0, parts_of(options, bodies_of(range(10))))
    with pytest.raises(ConflictError, match=r"batch 0 of 'query'.*orderBy"):
        run(options, 0, parts_of(options, bodies_of(range(1, 11))))
    assert len(server.records(stream)) == 10


def test_batches_survive_a_server_that_is_killed_and_a_rival_writer(own_server: Server) -> None:
    own_server.create("busy")
    options = sink_options(own_server, "busy")
    batches = [bodies_of(range(n * 200, n * 200 + 200)) for n in range(12)]
    done = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for number, bodies in enumerate(batches):
                run(options, number, parts_of(options, bodies))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(3):
        done.wait(0.3)
        own_server.kill()
        own_server.start()
        own_server.append("busy", [s2_sdk.Record(b"rival")])
    writer.join(400)
    assert not failures
    assert done.is_set()
    found = own_server.bodies("busy")
    assert [body for body in found if body != b"rival"] == [body for b in batches for body in b]
    assert found.count(b"rival") == 3


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"body": pa.array([b"x" * (1 << 20)])}, "too large"),
        ({"body": pa.array([1.5])}, "cannot be bytes"),
        ({"body": pa.array(["a"]), "timestamp": pa.array([-1])}, "before 1970"),
        ({"body": pa.array(["a"]), "timestamp": pa.array(["now"])}, "a timestamp or a bigint"),
        ({"body": pa.array(["a"]), "headers": pa.array(["b"])}, "array of structs"),
        (
            {"body": pa.array(["a"]), "headers": pa.array([[{"name": b"", "value": b"trim"}]])},
            "no name",
        ),
    ],
)
def test_rows_that_are_not_records_are_refused(columns: dict[str, pa.Array], words: str) -> None:
    options = parse_sink({"endpoint": "http://host", "basin": "some-basin", "stream": "s"})
    with pytest.raises(InvalidError, match=words):
        stage(pa.record_batch(columns), options)


def test_a_record_with_too_many_digits_is_not_a_marker() -> None:
    assert Marker.decode(b"t\n" + b"9" * 5_000 + b"\n1\n1\nd") is None
