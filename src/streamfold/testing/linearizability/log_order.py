"""Search for the order of appends in the log, guided by acknowledgements, contents and hashes.

The tail in its answer fixes the place of an acknowledged append. Unanswered appends lie in between, and
the contents or hashes of reads identify them. So there is nearly always a single candidate, and the
search walks the log once. Without contents it may have to try several candidates; `STEPS` limits the
attempts.

The walk tracks the state of the stream (tail, hash, fencing token, producers) and the earliest event at
which the log can have reached it: the latest start of any operation that must come before.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from streamfold.testing.linearizability.contradiction import (
    Contradiction,
    answer,
    name,
    out_of_order,
    seq_nums,
)
from streamfold.testing.linearizability.history import (
    OperationHistory,
    OperationResult,
    StreamOperation,
    chain_hash,
)
from streamfold.testing.linearizability.schedule import (
    contradiction_in_time,
    unjustified,
    went_back,
)

#: Placements to try before a history counts as undecided.
STEPS = 200_000


class UndecidedError(Exception):
    """The search exceeded its limit of steps."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The stream after an append, and the earliest event at which it can have this state."""

    tail: int = 0
    stream_hash: int = 0
    fencing_token: str = ""
    earliest: int = -1
    #: No later state can have begun before this event.
    next_earliest: int = -1


@dataclass(slots=True)
class _Frame:
    """A place in the log: the append before it and the candidates for the next one."""

    state: StreamState
    append: StreamOperation | None
    former_number: tuple[int, int] | None
    candidates: Iterator[StreamOperation]


@dataclass
class LogSearch:
    """Finds append orders that agree with all answers on places, contents and conditions."""

    history: OperationHistory
    #: The contradiction found furthest along the log.
    contradiction: Contradiction | None = None
    _furthest: int = -1
    _steps: int = 0
    _used: set[int] = field(default_factory=set)
    #: Current epoch and sequence number of each producer.
    _producers: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        operations = self.history.operations
        self._starts: dict[int, StreamOperation] = {}
        self._unknown = [operation for operation in operations if operation.unknown]
        self._seen: dict[int, list[StreamOperation]] = defaultdict(list)
        self._contents: tuple[int, ...] | None = None
        self._closed = False
        for operation in operations:
            if operation.acknowledged:
                self._place(operation)
            elif operation.result is OperationResult.OK:
                assert operation.tail is not None
                self._seen[operation.tail].append(operation)
                self._take_contents(operation)
        self._marks = sorted({*self._starts, *self._seen})
        ends = [start + operation.count for start, operation in self._starts.items()]
        told = [operation.observed.get("tail", 0) for operation in operations]
        self._ceiling = max([*ends, *self._seen, *told], default=0)
        # Only rejections reveal an append beyond the last tail that any client saw.
        self._hidden = any(
            "fencing_token" in operation.observed or "producer_epoch" in operation.observed
            for operation in operations
        )
        by_first: dict[int, list[StreamOperation]] = defaultdict(list)
        for operation in self._unknown:
            by_first[operation.record_hashes[0]].append(operation)
        self._unknown_by_first = by_first

    def _place(self, operation: StreamOperation) -> None:
        assert operation.tail is not None
        start = operation.tail - operation.count
        other = self._starts.setdefault(start, operation)
        if other is not operation:
            text = f"{name(operation)} and {name(other)} were both acknowledged at seq_num {start}"
            self._refute(start, Contradiction(text, (other, operation)))
        if start < 0:
            text = f"{name(operation)} {answer(operation)}: no stream has such seq_nums"
            self._refute(0, Contradiction(text, (operation,)))

    def _take_contents(self, operation: StreamOperation) -> None:
        contents = operation.contents
        if contents is None:
            return
        if len(contents) != operation.tail or chain_hash(0, contents) != operation.stream_hash:
            text = f"{name(operation)} {answer(operation)}, but its records have another hash or number"
            self._refute(operation.tail or 0, Contradiction(text, (operation,)))
        if self._contents is None or len(contents) >= len(self._contents):
            self._contents = contents
            ends = (other.ended for other in self.history.operations if other is not operation)
            self._closed = all(end is None or end < operation.began for end in ends)

    def _refute(self, tail: int, contradiction: Contradiction) -> None:
        if tail > self._furthest:
            self._furthest, self.contradiction = tail, contradiction

    def orders(self) -> Iterator[list[StreamOperation]]:
        """Yield orders of the appends that took effect. Raises UndecidedError after STEPS attempts."""
        if self.contradiction is not None:
            return
        state = self._observe(StreamState())
        if state is None:
            return
        frames = [_Frame(state, None, None, self._candidates(state))]
        if state.tail >= self._ceiling:
            yield []
        while frames:
            frame = frames[-1]
            append = next(frame.candidates, None)
            if append is None:
                self._undo(frames.pop())
                continue
            self._steps += 1
            if self._steps > STEPS:
                raise UndecidedError
            following = self._apply(frame.state, append)
            if following is None:
                continue
            former = self._enter(append)
            frames.append(_Frame(following, append, former, self._candidates(following)))
            if following.tail >= self._ceiling:
                yield [frame.append for frame in frames if frame.append is not None]

    def _enter(self, append: StreamOperation) -> tuple[int, int] | None:
        self._used.add(append.id)
        producer = append.producer
        if producer is None:
            return None
        former = self._producers.get(producer.id)
        self._producers[producer.id] = producer.epoch, producer.seq
        return former

    def _undo(self, frame: _Frame) -> None:
        append = frame.append
        if append is None:
            return
        self._used.discard(append.id)
        if append.producer is not None:
            if frame.former_number is None:
                del self._producers[append.producer.id]
            else:
                self._producers[append.producer.id] = frame.former_number

    def _candidates(self, state: StreamState) -> Iterator[StreamOperation]:
        tail = state.tail
        if tail in self._starts:
            yield self._starts[tail]
            return
        if tail >= self._ceiling and (self._closed or not self._hidden):
            return
        contents = self._contents
        if contents is not None and tail < len(contents):
            unknown = self._unknown_by_first[contents[tail]]
        else:
            unknown = self._unknown
        fitting = [append for append in unknown if append.id not in self._used]
        yield from fitting
        if tail < self._ceiling and not fitting:
            self._refute(tail, self._nothing_fits(tail))

    def _nothing_fits(self, tail: int) -> Contradiction:
        """Return why no append fits at a place that cannot be the end of the log."""
        contents = self._contents
        if contents is None or tail >= len(contents):
            return self._lost(tail)
        record_hash = contents[tail]
        authors = [item for item in self.history.operations if record_hash in item.record_hashes]
        if not authors:
            return Contradiction(f"the record at seq_num {tail} was appended by nobody")
        refused = [item for item in authors if item.result is OperationResult.REFUSED]
        for author in authors:
            if author.id in self._used:
                text = f"{name(author)} took effect once more, at {seq_nums(tail, author.count)}"
                return Contradiction(text, (author,))
        if refused:
            text = f"{name(refused[0])} {answer(refused[0])}, but its record is at seq_num {tail}"
            return Contradiction(text, (refused[0],))
        author = authors[0]
        index = author.record_hashes.index(record_hash)
        text = f"seq_num {tail} has record {index} of {name(author)}, which {answer(author)}"
        return Contradiction(text, (author,))

    def _lost(self, tail: int) -> Contradiction:
        behind = [item for start, item in self._starts.items() if start > tail]
        behind += [item for seen, items in self._seen.items() if seen > tail for item in items]
        behind += [item for item in self.history.operations if item.observed.get("tail", 0) > tail]
        witness = min(behind, key=lambda item: item.began)
        text = f"nothing was appended at seq_num {tail}, but {name(witness)} {answer(witness)}"
        return Contradiction(text, (witness,))

    def _apply(self, state: StreamState, append: StreamOperation) -> StreamState | None:
        """Return the state after an append, or None if the append cannot be at this place."""
        tail, end = state.tail, state.tail + append.count
        contradiction = self._broken_condition(state, append) or self._misplaced(tail, end, append)
        if contradiction is not None:
            self._refute(tail, contradiction)
            return None
        earliest = max(state.next_earliest, append.began)
        if append.ended is not None and earliest > append.ended:
            self._refute(tail, out_of_order(self.history.events[earliest], append))
            return None
        token = state.fencing_token
        return self._observe(
            StreamState(
                end,
                chain_hash(state.stream_hash, append.record_hashes),
                token if append.set_fencing_token is None else append.set_fencing_token,
                earliest,
                earliest,
            )
        )

    def _observe(self, state: StreamState) -> StreamState | None:
        """Apply what readers saw of a state. Return None if they contradict it."""
        following = state.next_earliest
        for operation in self._seen.get(state.tail, ()):
            if operation.stream_hash not in (None, state.stream_hash):
                text = f"{name(operation)} {answer(operation)}, but with other records than the log has"
                self._refute(state.tail, Contradiction(text, (operation,)))
                return None
            assert operation.ended is not None
            if state.earliest > operation.ended:
                first = self.history.events[state.earliest]
                self._refute(state.tail, out_of_order(first, operation))
                return None
            following = max(following, operation.began)
        return StreamState(
            state.tail, state.stream_hash, state.fencing_token, state.earliest, following
        )

    def _broken_condition(
        self, state: StreamState, append: StreamOperation
    ) -> Contradiction | None:
        """Return how an append at this place would violate its own condition, or None."""
        place = f"took effect at {seq_nums(state.tail, append.count)}"
        if append.match_seq_num not in (None, state.tail):
            text = f"{name(append)} asked for match_seq_num {append.match_seq_num}, and {place}"
        elif append.fencing_token not in (None, state.fencing_token):
            text = (
                f"{name(append)} had the fencing token {append.fencing_token!r}, and {place}, where "
                f"the stream had {state.fencing_token!r}"
            )
        elif append.producer is not None and not self._next_number(append):
            producer = append.producer
            epoch, seq = self._producers.get(producer.id, (None, None))
            text = (
                f"{name(append)} is epoch {producer.epoch}, number {producer.seq} of producer "
                f"{producer.id}, and {place}, where the producer was at epoch {epoch}, number {seq}"
            )
        else:
            return None
        return Contradiction(text, (*self._rivals(state, append), append))

    def _rivals(self, state: StreamState, append: StreamOperation) -> list[StreamOperation]:
        """Return earlier appends that make the condition fail at this place."""
        return [
            other
            for other in self.history.operations
            if other.id in self._used
            and (
                (append.producer is not None and other.producer == append.producer)
                or (
                    append.match_seq_num is not None
                    and other is self._starts.get(append.match_seq_num)
                )
                or (append.fencing_token and other.set_fencing_token == state.fencing_token)
            )
        ]

    def _next_number(self, append: StreamOperation) -> bool:
        """Return whether the append has its producer's next number."""
        assert append.producer is not None
        number = append.producer
        current = self._producers.get(number.id)
        if current is None or number.epoch > current[0]:
            return number.seq == 0
        return (number.epoch, number.seq) == (current[0], current[1] + 1)

    def _misplaced(self, tail: int, end: int, append: StreamOperation) -> Contradiction | None:
        """Return how an append from `tail` to `end` contradicts contents, other appends or tails."""
        contents = self._contents
        inside = contents is not None and tail < len(contents)
        if contents is not None and inside and contents[tail:end] != append.record_hashes:
            return self._replaced(tail, end, append, contents)
        following = bisect_right(self._marks, tail)
        if following == len(self._marks) or self._marks[following] >= end:
            return None
        mark = self._marks[following]
        others = self._seen.get(mark) or [self._starts[mark]]
        whole = f"{name(append)}, which lies at {seq_nums(tail, append.count)}"
        text = f"{name(others[0])} {answer(others[0])}: that is inside of {whole}"
        return Contradiction(text, (append, others[0]))

    def _replaced(
        self, tail: int, end: int, append: StreamOperation, contents: tuple[int, ...]
    ) -> Contradiction:
        last = max(
            (item for item in self.history.operations if item.contents == contents),
            key=lambda item: item.began,
        )
        if end > len(contents):
            text = f"{name(append)} {answer(append)}, but {name(last)} {answer(last)}: it is lost"
        else:
            text = (
                f"{name(append)} {answer(append)}, but {name(last)} has other records at "
                f"{seq_nums(tail, append.count)}"
            )
        return Contradiction(text, (append, last))


class Judgement(enum.StrEnum):
    LINEARIZABLE = "linearizable"
    VIOLATION = "violation"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judgement and its evidence."""

    judgement: Judgement
    #: The appends that took effect, in log order, if the history is linearizable.
    log: tuple[StreamOperation, ...] = ()
    contradiction: Contradiction | None = None


def check(history: OperationHistory) -> Verdict:
    """Judge the history of one stream. Takes near-linear time if one of its reads has contents."""
    refusals = filter(None, map(unjustified, history.operations))
    contradiction = next(refusals, None) or went_back(history)
    if contradiction is not None:
        return Verdict(Judgement.VIOLATION, contradiction=contradiction)
    search = LogSearch(history)
    late: Contradiction | None = None
    try:
        for order in search.orders():
            contradiction = contradiction_in_time(history, order)
            if contradiction is None:
                return Verdict(Judgement.LINEARIZABLE, tuple(order))
            late = late or contradiction
    except UndecidedError:
        return Verdict(Judgement.UNDECIDED)
    return Verdict(Judgement.VIOLATION, contradiction=late or search.contradiction)
