"""Hand-written histories, right and wrong, with the expected verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.testing.linearizability.script import HistoryScript

Build = Callable[[HistoryScript], object]


@dataclass(frozen=True, slots=True)
class HandmadeHistory:
    build: Build
    #: Part of the sentence about a wrong history; empty for a right one.
    sentence: str = ""
    #: Whether the public model of S2 sees the fault: it knows no producers, and believes all refusals.
    public: bool = True

    def script(self) -> HistoryScript:
        script = HistoryScript()
        self.build(script)
        return script


def stale_read_after_an_ack(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.appended("b", 2)
    s.has("a")


def lost_ack(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.appended("b", 2)
    s.appended("c", 2)
    s.has("ac", contents=True)


def lost_ack_at_the_end(s: HistoryScript) -> None:
    read = s.read()
    s.appended("ab", 2)
    s.got(read, "a", contents=True)


def replaced_ack(s: HistoryScript) -> None:
    s.append("x")
    s.appended("a", 1)
    s.has("x", contents=True)


def doubled_unknown_append(s: HistoryScript) -> None:
    s.append("a")
    s.appended("b", 2)
    s.has("aba", contents=True)


def doubled_unknown_append_by_hashes(s: HistoryScript) -> None:
    s.append("a")
    s.appended("b", 2)
    s.has("aba")


def half_of_an_unknown_append(s: HistoryScript) -> None:
    s.append("ab")
    s.appended("c", 2)
    s.has("ac", contents=True)


def reordered_acks(s: HistoryScript) -> None:
    s.appended("b", 2)
    s.appended("a", 1)


def two_acks_of_one_place(s: HistoryScript) -> None:
    first, second = s.append("a"), s.append("b")
    s.ack(first, 1)
    s.ack(second, 1)


def reordered_records(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.appended("b", 2)
    s.has("ba")


def torn_append(s: HistoryScript) -> None:
    append = s.append("ab")
    s.tail(1)
    s.ack(append, 2)


def fence_ignored(s: HistoryScript) -> None:
    s.appended("f", 1, fence="new")
    s.appended("a", 2, token="old")


def fence_of_an_unknown_append_ignored(s: HistoryScript) -> None:
    s.append("f", fence="new")
    s.appended("a", 2, token="")
    s.has("fa", contents=True)


def fence_forgotten(s: HistoryScript) -> None:
    s.appended("f", 1, fence="new")
    append = s.append("a", token="new")
    s.refuse(append, fencing_token="")


def refused_with_the_token_that_it_had(s: HistoryScript) -> None:
    s.appended("f", 1, fence="new")
    append = s.append("a", token="new")
    s.refuse(append, fencing_token="new")


def match_seq_num_accepted_wrongly(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.appended("b", 2, match=0)


def match_seq_num_of_an_unknown_append_ignored(s: HistoryScript) -> None:
    s.append("a", match=1)
    s.appended("b", 2)
    s.has("ab", contents=True)


def refused_because_of_a_tail_that_never_was(s: HistoryScript) -> None:
    s.appended("ab", 2)
    append = s.append("c", match=0)
    s.refuse(append, tail=1)
    s.has("ab", contents=True)


def refused_because_of_something_lost(s: HistoryScript) -> None:
    s.append("a")
    append = s.append("b", match=0)
    s.refuse(append, tail=1)
    s.has("", contents=True)


def tail_going_back(s: HistoryScript) -> None:
    append = s.append("a")
    s.tail(1)
    s.tail(0)
    s.ack(append, 1)


def tail_before_its_append_began(s: HistoryScript) -> None:
    s.tail(1)
    s.appended("a", 1)


def tail_without_an_ack(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.tail(0)


def tail_beyond_everything(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.tail(2)


def unknown_append_that_came_and_went(s: HistoryScript) -> None:
    s.append("a")
    s.has("a")
    s.appended("b", 1)


def unknown_append_seen_before_it_was_sent(s: HistoryScript) -> None:
    s.has("a")
    s.append("a")


def refused_append_visible(s: HistoryScript) -> None:
    append = s.append("a")
    s.refuse(append)
    s.has("a", contents=True)


def record_of_nobody(s: HistoryScript) -> None:
    s.appended("a", 1)
    s.has("az", contents=True)


def ack_with_a_tail_that_was_lost(s: HistoryScript) -> None:
    append, other = s.append("a"), s.append("b")
    s.ack(append, 1, tail=2)
    s.has("a", contents=True)
    assert other.unknown


def duplicate_applied_twice(s: HistoryScript) -> None:
    s.append("a", producer=("p", 0, 0))
    s.appended("a", 2, producer=("p", 0, 0))
    s.has("aa", contents=True)


def duplicate_denied(s: HistoryScript) -> None:
    """A producer's append was called a duplicate, but nothing was there before."""
    append = s.append("a", producer=("p", 0, 0))
    s.refuse(append, producer_epoch=0, producer_seq=0)
    s.has("", contents=True)


def gap_accepted(s: HistoryScript) -> None:
    s.appended("a", 1, producer=("p", 0, 0))
    s.appended("b", 2, producer=("p", 0, 2))


def old_epoch_accepted(s: HistoryScript) -> None:
    s.appended("a", 1, producer=("p", 1, 0))
    s.appended("b", 2, producer=("p", 0, 1))


def producer_forgotten(s: HistoryScript) -> None:
    s.appended("a", 1, producer=("p", 0, 0))
    append = s.append("b", producer=("p", 0, 1))
    s.refuse(append, producer_epoch=0, producer_seq=-1)


WRONG = {
    build.__name__: HandmadeHistory(build, sentence, public)
    for build, sentence, public in [
        (stale_read_after_an_ack, "it missed append 1", True),
        (lost_ack, "append 2 lies before append 1, but began after append 1 had ended", True),
        (lost_ack_at_the_end, "append 1 was acknowledged at seq_nums 0 to 1, but read 0", True),
        (replaced_ack, "but read 2 has other records at seq_num 0", True),
        (doubled_unknown_append, "append 0 took effect once more, at seq_num 2", True),
        (doubled_unknown_append_by_hashes, "nothing was appended at seq_num 2", True),
        (half_of_an_unknown_append, "append 0 got no answer, but read 2 has other records", True),
        (reordered_acks, "append 1 lies before append 0, but began after append 0 had ended", True),
        (two_acks_of_one_place, "append 1 and append 0 were both acknowledged at seq_num 0", True),
        (reordered_records, "with other records than the log has", True),
        (torn_append, "that is inside of append 0, which lies at seq_nums 0 to 1", True),
        (fence_ignored, "had the fencing token 'old'", True),
        (fence_of_an_unknown_append_ignored, "where the stream had 'new'", True),
        (fence_forgotten, "it missed append 0", False),
        (refused_with_the_token_that_it_had, "but that is what it asked for", False),
        (match_seq_num_accepted_wrongly, "append 1 asked for match_seq_num 0, and took", True),
        (match_seq_num_of_an_unknown_append_ignored, "append 0 asked for match_seq_num 1", True),
        (refused_because_of_a_tail_that_never_was, "it missed append 0", False),
        (refused_because_of_something_lost, "the stream went back", False),
        (tail_going_back, "check-tail 2 began, and answered tail 0: the stream went back", True),
        (tail_before_its_append_began, "includes append 1, but that began only after", True),
        (tail_without_an_ack, "it missed append 0", True),
        (tail_beyond_everything, "nothing was appended at seq_num 1", True),
        (unknown_append_that_came_and_went, "which includes append 2, but that began only", True),
        (unknown_append_seen_before_it_was_sent, "that began only after read 0 had ended", True),
        (refused_append_visible, "append 0 was refused, but its record is at seq_num 0", True),
        (record_of_nobody, "the record at seq_num 1 was appended by nobody", True),
        (ack_with_a_tail_that_was_lost, "append 0 was told that the tail is 2; then read 2", False),
        (duplicate_applied_twice, "is epoch 0, number 0 of producer p", False),
        (duplicate_denied, "which the stream never was", False),
        (gap_accepted, "is epoch 0, number 2 of producer p", False),
        (old_epoch_accepted, "where the producer was at epoch 1, number 0", False),
        (producer_forgotten, "it missed append 0", False),
    ]
}


def read_beside_an_append(s: HistoryScript) -> None:
    append = s.append("a")
    s.has("a")
    late = s.read()
    s.ack(append, 1)
    s.got(late, "a")


def old_tail_while_a_newer_one_is_read(s: HistoryScript) -> None:
    append = s.append("a")
    slow = s.ask_tail()
    s.tail(1)
    s.told(slow, 0)
    s.ack(append, 1)


def acks_in_another_order_than_seq_nums(s: HistoryScript) -> None:
    first, second = s.append("a"), s.append("b")
    s.ack(second, 1)
    s.ack(first, 2)


def unknown_append_that_takes_effect_much_later(s: HistoryScript) -> None:
    s.append("z")
    for number, letter in enumerate("abc", 1):
        s.appended(letter, number)
    s.has("abc")
    s.has("abcz", contents=True)


def unknown_appends_that_never_take_effect(s: HistoryScript) -> None:
    for letter in "vwxyz":
        s.append(letter)
    s.appended("a", 1)
    s.has("a", contents=True)


def unknown_appends_that_only_hashes_tell_apart(s: HistoryScript) -> None:
    for letter in "vwxyz":
        s.append(letter)
    s.appended("a", 4)
    s.has("xvza")


def unknown_appends_that_nobody_tells_apart(s: HistoryScript) -> None:
    for letter in "vwxyz":
        s.append(letter)
    s.appended("a", 4)
    s.tail(5)


def refusal_that_shows_an_unknown_append(s: HistoryScript) -> None:
    s.append("a")
    append = s.append("b", match=0)
    s.refuse(append, tail=1)
    s.has("a", contents=True)


def token_that_came_and_went_during_an_append(s: HistoryScript) -> None:
    s.appended("f", 1, fence="old")
    slow = s.append("x", token="old")
    s.appended("g", 2, fence="new")
    s.appended("h", 3, fence="old")
    s.refuse(slow, fencing_token="new")


def two_refusals_that_share_a_moment(s: HistoryScript) -> None:
    fence = s.append("f", fence="new")
    first, second = s.append("a", token="x"), s.append("b", token="x")
    s.refuse(first, fencing_token="new")
    s.refuse(second, fencing_token="")
    s.ack(fence, 1)


def duplicate_of_an_unknown_append(s: HistoryScript) -> None:
    s.append("a", producer=("p", 0, 0))
    again = s.append("a", producer=("p", 0, 0))
    s.refuse(again, producer_epoch=0, producer_seq=0)
    s.has("a", contents=True)


def repeated_append_that_takes_effect(s: HistoryScript) -> None:
    s.append("a", producer=("p", 0, 0))
    s.appended("a", 1, producer=("p", 0, 0))
    s.has("a", contents=True)


def epoch_taken_over_during_an_append(s: HistoryScript) -> None:
    slow = s.append("a", producer=("p", 0, 0))
    s.appended("b", 1, producer=("p", 1, 0))
    s.refuse(slow, producer_epoch=1)
    s.has("b", contents=True)


def ack_that_mentions_a_later_tail(s: HistoryScript) -> None:
    first, second = s.append("a"), s.append("b")
    s.ack(first, 1, tail=2)
    s.ack(second, 2, tail=2)


def nothing_at_all(s: HistoryScript) -> None:
    s.tail(0)
    s.has("", contents=True)


RIGHT = {
    build.__name__: HandmadeHistory(build)
    for build in [
        read_beside_an_append,
        old_tail_while_a_newer_one_is_read,
        acks_in_another_order_than_seq_nums,
        unknown_append_that_takes_effect_much_later,
        unknown_appends_that_never_take_effect,
        unknown_appends_that_only_hashes_tell_apart,
        unknown_appends_that_nobody_tells_apart,
        refusal_that_shows_an_unknown_append,
        token_that_came_and_went_during_an_append,
        two_refusals_that_share_a_moment,
        duplicate_of_an_unknown_append,
        repeated_append_that_takes_effect,
        epoch_taken_over_during_an_append,
        ack_that_mentions_a_later_tail,
        nothing_at_all,
    ]
}
