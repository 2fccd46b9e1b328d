"""The connector's calls to an S2 endpoint: names, tails, first records, positions, appends."""

from __future__ import annotations

from urllib.parse import urlencode

from streamfold import errors
from streamfold.model.positions import StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.columns import read_columns
from streamfold.spark.stream.connection import (
    Answer,
    Connection,
    TransientError,
    code_of,
    error_from_response,
    stream_path,
)

PROTOBUF = "application/protobuf"
_UNWRITTEN, _CONDITION_FAILED, _REDIRECT = 416, 412, 307


class Streams:
    """The streams of one basin."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def names(self, prefix: str = "") -> list[str]:
        """Return all streams that begin with `prefix` and are not being deleted, in order."""
        names: list[str] = []
        after, more = "", True
        while more:
            query = urlencode({"prefix": prefix, "start_after": after})
            page = self._ask(f"/v1/streams?{query}", "listing streams").json()
            names += [stream["name"] for stream in page["streams"] if not stream["deleted_at"]]
            more = bool(page["has_more"] and page["streams"])
            after = page["streams"][-1]["name"] if more else ""
        return names

    def tail(self, stream: str) -> StreamPosition:
        """Return the position after the last durable record."""
        answer = self._ask(stream_path(stream, "records/tail"), f"the tail of {stream!r}")
        found = answer.json()["tail"]
        return StreamPosition(found["seq_num"], found["timestamp"])

    def first(self, stream: str, at: int = 0) -> int:
        """Return the first record at or after `at` that exists; the tail if none does."""
        return self._first(stream, seq_num=at)

    def first_since(self, stream: str, timestamp: int) -> int:
        """Return the first record that is not older; the tail if all are."""
        return self._first(stream, timestamp=timestamp)

    def page_bytes(self, stream: str, at: int, count: int = BATCH_RECORDS_MAX) -> bytes | None:
        """Return a ReadBatch from `at` on, as much as one answer holds; None at and beyond the tail."""
        wanted = min(count, BATCH_RECORDS_MAX)
        answer = self._read(stream, seq_num=at, count=wanted, bytes=BATCH_BYTES_MAX)
        return None if answer.status == _UNWRITTEN else answer.body

    def snapshot_cursor(self, stream: str) -> int | None:
        """Return the first record that the newest snapshot does not cover; None without a snapshot."""
        answer = self._connection.get(stream_path(stream, "snapshot"))
        if answer.status == _REDIRECT:
            return int(answer.headers["stream-snapshot-offset"])
        if answer.status == 404 and code_of(answer.body) != "stream_not_found":
            return None
        raise error_from_response(f"the newest snapshot of {stream!r}", answer.status, answer.body)

    def append(self, stream: str, raw: bytes, match_seq_num: int | None = None) -> int:
        """Append an AppendInput, once; returns the seq_num after its last record.

        `OutcomeUnknownError` when it may or may not have been appended.
        """
        headers = {"content-type": PROTOBUF, "accept": "application/json"}
        path = stream_path(stream, "records")
        try:
            answer = self._connection.attempt("POST", path, headers, raw)
        except TransientError as error:
            raise errors.OutcomeUnknownError(error.message) from error
        if answer.status == _CONDITION_FAILED and match_seq_num is not None:
            following = answer.json()["seq_num_mismatch"]
            raise errors.SeqNumMismatchError(match_seq_num, following)
        if answer.status != 200:
            raise error_from_response(f"an append to {stream!r}", answer.status, answer.body)
        return int(answer.json()["end"]["seq_num"])

    def _first(self, stream: str, **start: int) -> int:
        answer = self._read(stream, **start, count=1)
        if answer.status == _UNWRITTEN:
            return int(answer.json()["tail"]["seq_num"])
        found = read_columns(answer.body, headers=False, bodies=False)
        return int(found.seq_nums[0]) if len(found.seq_nums) else int(self.tail(stream).seq_num)

    def _read(self, stream: str, **query: int) -> Answer:
        path = f"{stream_path(stream, 'records')}?{urlencode(query)}"
        answer = self._connection.get(path, {"accept": PROTOBUF})
        if answer.status not in (200, _UNWRITTEN):
            raise error_from_response(f"a read of {stream!r}", answer.status, answer.body)
        return answer

    def _ask(self, path: str, what: str) -> Answer:
        answer = self._connection.get(path)
        if answer.status != 200:
            raise error_from_response(what, answer.status, answer.body)
        return answer
