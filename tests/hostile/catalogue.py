"""All decoders of bytes from outside: `python -m tests.hostile --list` prints them.

| from | decoders |
|---|---|
| clients | `client_decoders.py`: bodies, frames, queries, headers, names and paths of both faces |
| storage | `stored_decoders.py`: rows, chunks, payloads, tables, snapshots |
| other programs | `file_decoders.py`: archives, events, change streams, PostgreSQL, configurations |

Each names the errors that it may raise; anything else is a finding. Some compare two ways of doing the
same: native code and the slow reference of its tests, decoding at once and in steps, frames whole and
in pieces.
"""

from __future__ import annotations

from tests.hostile.client_decoders import client_decoders
from tests.hostile.decoder import Decoder
from tests.hostile.file_decoders import file_decoders
from tests.hostile.stored_decoders import stored_decoders


def decoders() -> list[Decoder]:
    """Every decoder."""
    return [*client_decoders(), *stored_decoders(), *file_decoders()]


def decoder_named(name: str) -> Decoder:
    return next(decoder for decoder in decoders() if decoder.name == name)
