"""Mutates inputs at random, as a fuzzer does without coverage."""

from __future__ import annotations

import random
from collections.abc import Sequence

#: Bytes that grow no further: decoders cost by the byte, and long inputs find little more.
_SIZE_MAX = 16 << 10
_INTERESTING = (
    b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\x00\x00\x00\x00",
    b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x7f",
    b"18446744073709551615", b"18446744073709551616", b"-1", b"1e400", b"NaN", b"null",
    b'"\\ud800"',
    b"\xed\xa0\x80", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"\xef\xbb\xbf", b"[" * 300,
    b"{\"a\":" * 100, b"\\", b'"', b"\n",
    b"9" * 400,
)  # fmt: skip


class Mutator:
    """Mutations of seeds, from a seed of its own."""

    def __init__(self, seeds: Sequence[bytes], seed: int) -> None:
        self._dice = random.Random(seed)
        self._seeds = list(seeds)

    def next(self) -> bytes:
        """Another input: a seed with a few changes."""
        dice = self._dice
        data = bytearray(dice.choice(self._seeds))
        for _ in range(dice.choice((1, 1, 2, 3, 6))):
            self._change(data)
        return bytes(data[:_SIZE_MAX])

    def _change(self, data: bytearray) -> None:
        dice = self._dice
        at = dice.randrange(len(data) + 1)
        match dice.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1 if data:
                data[at % len(data)] = dice.randrange(256)
            case 2:
                data[at:at] = dice.randbytes(dice.randint(1, 4))
            case 3:
                del data[at : at + dice.choice((1, 1, 2, 8, 64))]
            case 4:
                del data[at:]
            case 5:
                data[at:at] = dice.choice(_INTERESTING)
            case 6:
                size = dice.choice((1, 4, 16, 64))
                data[at:at] = data[at : at + size] * dice.choice((1, 2, 20))
            case 7:
                other = dice.choice(self._seeds)
                cut = dice.randrange(len(other) + 1)
                data[at:] = other[cut:]
            case _ if len(data) > 8:
                size = dice.choice((1, 2, 4, 8))
                start = dice.randrange(len(data) - size)
                data[start : start + size] = dice.choice(
                    (bytes(size), b"\xff" * size, b"\x7f" * size)
                )
