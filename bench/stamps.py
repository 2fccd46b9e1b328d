"""Records that tell when they were sent, and how a follower finds that out with little work."""

from __future__ import annotations

from array import array
from time import monotonic_ns

#: Comes after the number of a record and the nanoseconds at which it was sent. Nothing else in an event
#: or a frame reads like it.
_MARK = b"@sent@"
_NUMBER, _TIME = 7, 19
_STAMP = _NUMBER + _TIME + len(_MARK)


def stamped(number: int, size: int) -> bytes:
    """The body of a record, `size` bytes long, that is sent now; all processes share this clock."""
    return (b"%07d%019d" % (number, monotonic_ns()) + _MARK).ljust(size, b"x")


class Receipts:
    """Counts the records in what one follower receives, cut anywhere.

    Only the last stamp of each piece is read: its number tells whether all before it came, and came
    once. Records before it in the same piece have waited longer than the latency that is noted.
    """

    __slots__ = ("_carry", "_latencies", "count", "in_order")

    def __init__(self, latencies: array[int]) -> None:
        self.count = 0
        self.in_order = True
        self._latencies = latencies
        self._carry = b""

    def take(self, piece: bytes) -> None:
        data = self._carry + piece
        mark = data.rfind(_MARK)
        after = 0
        if mark >= 0:
            sent = mark - _TIME
            self._latencies.append(monotonic_ns() - int(data[sent:mark]))
            self.count += data.count(_MARK)
            self.in_order &= int(data[sent - _NUMBER : sent]) == self.count - 1
            after = mark + len(_MARK)
        self._carry = data[max(after, len(data) - _STAMP + 1) :]
