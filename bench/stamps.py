"""Records that tell when they were sent, and how followers find that out with little work."""

from __future__ import annotations

import re
from array import array
from time import monotonic_ns

import numpy as np

from bench.figures import Latencies

#: Comes after the number of a record and the nanoseconds at which it was sent. Nothing else in an event
#: or a frame reads like it.
_MARK = b"@sent@"
_NUMBER, _TIME = 7, 19
_STAMP = _NUMBER + _TIME + len(_MARK)
_STAMPS = re.compile(rb"(\d{%d})(\d{%d})%b" % (_NUMBER, _TIME, _MARK))


def stamped(number: int, size: int) -> bytes:
    """The body of a record, `size` bytes long, that is sent now; all processes share this clock."""
    return (b"%07d%019d" % (number, monotonic_ns()) + _MARK).ljust(size, b"x")


class Arrivals:
    """When records arrived at any of many followers of the same ones.

    All followers get the same stamps, so each is read once; of the others only how many there are.
    """

    def __init__(self) -> None:
        #: By the number of the record.
        self._sent = array("q")
        #: First number, the number after the last, and the time of arrival; piece after piece.
        self._pieces = array("q")

    def note(self, first: int, end: int, data: bytes) -> None:
        """Records `first` to `end` have arrived in `data`."""
        self._pieces.extend((first, end, monotonic_ns()))
        if end > len(self._sent):
            for number, sent in _STAMPS.findall(data):
                if int(number) == len(self._sent):
                    self._sent.append(int(sent))

    def latencies(self) -> Latencies:
        """Nanoseconds from the sending to the arrival, of every record at every follower."""
        first, end, arrived = np.asarray(self._pieces).reshape(-1, 3).T
        counts = end - first
        before = np.cumsum(counts) - counts
        numbers = np.arange(counts.sum()) + np.repeat(first - before, counts)
        found: Latencies = np.repeat(arrived, counts) - np.asarray(self._sent)[numbers]
        return found


class Receipts:
    """Counts the records in what one follower receives, cut anywhere.

    Of each piece, the number in the last stamp tells whether all before it came, and came once.
    """

    __slots__ = ("_arrivals", "_carry", "count", "in_order")

    def __init__(self, arrivals: Arrivals) -> None:
        self.count = 0
        self.in_order = True
        self._arrivals = arrivals
        self._carry = b""

    def take(self, piece: bytes) -> None:
        data = self._carry + piece
        mark = data.rfind(_MARK)
        after = 0
        if mark >= 0:
            before, sent = self.count, mark - _TIME
            self.count += data.count(_MARK)
            self._arrivals.note(before, self.count, data)
            self.in_order &= int(data[sent - _NUMBER : sent]) == self.count - 1
            after = mark + len(_MARK)
        self._carry = data[max(after, len(data) - _STAMP + 1) :]
