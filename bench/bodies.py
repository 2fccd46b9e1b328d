"""Bodies of records to measure with: some that compress as changes of a table do, some that do not."""

from __future__ import annotations

import json
import random

_WORDS = [
    "order",
    "invoice",
    "customer",
    "parcel",
    "refund",
    "transfer",
    "payment",
    "account",
    "balance",
    "delivery",
]
_STATES = ("new", "paid", "packed", "sent", "returned")


def noise(size: int, number: int) -> bytes:
    """Random bytes, the same for the same number: nothing makes them smaller."""
    return random.Random(number).randbytes(size)


def document(size: int, number: int) -> bytes:
    """A change of a table as JSON, with random values, cut or filled with words to `size` bytes."""
    source = random.Random(number)
    row = {
        "id": source.randrange(10**9),
        "customer": f"{source.choice(_WORDS)}-{source.randrange(10**6)}",
        "amount": round(source.random() * 1000, 2),
        "state": source.choice(_STATES),
        "updated_at": 1_700_000_000_000 + source.randrange(10**10),
        "note": " ".join(source.choice(_WORDS) for _ in range(size // 7)),
    }
    return json.dumps({"op": "u", "after": row}).encode()[:size].ljust(size)
