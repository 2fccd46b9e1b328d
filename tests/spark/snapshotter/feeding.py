"""Changes of a table, made up by a seed, fed to a stream, and replayed in plain Python."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

import s2_sdk

from tests.spark.server import Server

#: Rows by id.
State = dict[int, dict[str, Any]]


class Feed:
    """Random changes in Streamfold's own envelope, the same for the same seed."""

    def __init__(self, seed: int, keys: int = 200) -> None:
        self._rng = random.Random(seed)
        self._keys = keys

    def changes(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            key = self._rng.randrange(self._keys)
            if self._rng.random() < 0.2:
                yield envelope("d", {"id": key})
            else:
                row = {"id": key, "name": f"name {self._rng.randrange(1000)}", "price": key * 1.5}
                yield envelope(self._rng.choice("cu"), {"id": key}, row)


def envelope(op: str, key: dict[str, Any] | None = None, after: Any = None, **more: Any) -> bytes:
    """One change as a record's body."""
    reported = {"op": op, "key": key, "after": after, **more}
    return json.dumps(
        {name: value for name, value in reported.items() if value is not None}
    ).encode()


def feed(server: Server, stream: str, bodies: Iterable[bytes]) -> None:
    server.append(stream, [s2_sdk.Record(body) for body in bodies])


def replayed(bodies: Iterable[bytes]) -> State:
    """The table after these records, by the rules of the envelope."""
    state: State = {}
    for body in bodies:
        apply(state, body)
    return state


def apply(state: State, body: bytes) -> None:
    try:
        change = json.loads(body)
    except ValueError:
        return  # a dead letter
    op = change["op"]
    if op == "t":
        state.clear()
    if op not in "cud":
        return
    key = (change.get("key") or change["after"])["id"]
    old = state.pop(key, {})
    if op != "d":
        row = dict(change["after"])
        row |= {name: old.get(name) for name in change.get("unchanged", ())}
        state[row.get("id", key)] = row
