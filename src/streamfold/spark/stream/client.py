"""The connector's client for an S2 endpoint: one connection that retries transient failures."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import httpx

from streamfold import errors
from streamfold.backoff import pause_after
from streamfold.errors import RetryLaterError, StreamfoldError
from streamfold.http_client import build_request, cause_of, open_transport
from streamfold.model.positions import StreamPosition
from streamfold.model.records import BATCH_BYTES_MAX, BATCH_RECORDS_MAX
from streamfold.records.columns import read_columns
from streamfold.spark.errors import EndpointUnavailableError, OptionError
from streamfold.wording import reason_of

_PLACEHOLDER = "{basin}"
#: Seconds to connect and to wait for the next bytes: above the 15 s heartbeat interval.
IO_TIMEOUT = 20.0
#: Minimum seconds to wait for the response to a short request. Servers' pauses are shorter.
_ANSWER_TIMEOUT_MIN = 3.0
#: Seconds before the second attempt, and the maximum between later attempts.
_WAIT_MIN, _WAIT_MAX = 0.05, 2.0
#: Statuses of transient failures. 409 is transient only with this code.
_PASSING, _PASSING_CONFLICT = frozenset({408, 429, 500, 502, 503, 504}), "transaction_conflict"
_BY_STATUS: dict[int, type[StreamfoldError]] = {
    401: errors.UnauthenticatedError,
    403: errors.PermissionDeniedError,
    404: errors.NotFoundError,
    409: errors.ConflictError,
}
PROTOBUF = "application/protobuf"
_UNWRITTEN, _CONDITION_FAILED, _REDIRECT = 416, 412, 307
_NO_ROUTE = (404, 405)
#: Maximum streams per tails request, and bytes of their JSON names: a body may have 64 KiB.
_TAILS_MAX, _TAILS_BYTES = 1000, 64_000


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A basin at an S2 endpoint. Pickled with a plan for its tasks, so it holds no connection."""

    #: Origin of the server, in which `{basin}` stands for the basin's name.
    template: str
    basin: str
    token: str = field(default="", repr=False)
    encryption_key: str = field(default="", repr=False)
    #: Seconds for which a failed request is retried.
    retry_timeout: float = 60.0
    #: Certificates (PEM) to trust instead of the system's.
    trusted: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        parts = self._parts()
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise OptionError("endpoint", "must be an origin such as https://host:port, alone")
        if parts.path not in ("", "/", "/v1") or parts.query:
            raise OptionError("endpoint", "must be an origin such as https://host:port, no path")

    @property
    def url(self) -> httpx.URL:
        parts = self._parts()
        return httpx.URL(scheme=parts.scheme, host=parts.hostname, port=parts.port)

    @property
    def origin(self) -> str:
        """The server's origin, for messages."""
        return self.template.replace(_PLACEHOLDER, self.basin)

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        headers = {}
        if _PLACEHOLDER not in self.template:
            headers["s2-basin"] = self.basin
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        if self.encryption_key:
            headers["s2-encryption-key"] = self.encryption_key
        return headers

    def _parts(self) -> SplitResult:
        return urlsplit(self.origin)


def stream_path(stream: str, *rest: str) -> str:
    return "/".join(("/v1/streams", quote(stream, safe=""), *rest))


class HttpResponse(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class TransientError(RetryLaterError):
    """The request failed in a way that may pass, so another attempt is worthwhile."""


@dataclass(slots=True)
class RetryDeadline:
    """Stops retries after `seconds` without progress."""

    seconds: float
    _since: float | None = None
    _failures: int = 0

    @classmethod
    def from_now(cls, seconds: float) -> RetryDeadline:
        """Start the clock now, since a silent server may use up the time in the first attempt."""
        return cls(seconds, time.monotonic())

    def reset(self) -> None:
        self._since, self._failures = None, 0

    def wait(self, endpoint: Endpoint, error: StreamfoldError) -> None:
        """Sleep before the next attempt. Raises EndpointUnavailableError after the deadline."""
        now = time.monotonic()
        self._since = self._since if self._since is not None else now
        if now - self._since >= self.seconds:
            raise EndpointUnavailableError(endpoint.origin, self.seconds, error.message) from error
        self._failures += 1
        time.sleep(pause_after(self._failures, _WAIT_MIN, _WAIT_MAX))


class ServerConnection:
    """Sends requests to one endpoint, one at a time. Close it or use it as a context manager."""

    def __init__(self, endpoint: Endpoint, io_timeout: float = IO_TIMEOUT) -> None:
        """`io_timeout`: seconds to connect, and to wait for the next bytes."""
        self.endpoint = endpoint
        #: Whether the server lacks `POST /v1/tails`, as other S2 implementations do.
        self.lacks_tails = False
        self._timeout = io_timeout
        self._url = endpoint.url
        trusted = endpoint.trusted
        tls = ssl.create_default_context(cadata=trusted) if trusted else None
        self._http = open_transport(self._url, tls)

    def __enter__(self) -> ServerConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> HttpResponse:
        """Send a GET, retrying transient failures."""
        return self.repeat("GET", path, headers)

    def repeat(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> HttpResponse:
        """Send a request that changes nothing, retrying transient failures."""
        deadline = RetryDeadline.from_now(self.endpoint.retry_timeout)
        while True:
            try:
                return self.attempt(method, path, headers, body)
            except TransientError as error:
                deadline.wait(self.endpoint, error)

    def attempt(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> HttpResponse:
        """Send once. After a TransientError the request may or may not have taken effect."""
        response = self.open(method, path, headers, body)
        answer = HttpResponse(response.status_code, response.headers, read_body(response))
        if is_transient(answer.status, answer.body):
            raise TransientError(f"status {answer.status}: {message_of(answer.body)}")
        return answer

    def open(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> httpx.Response:
        """Send once and return the response with its body unread. The caller must close it."""
        sent = {**self.endpoint.headers(), **(headers or {})}
        try:
            return self._http.handle_request(
                build_request(method, self._url, path, sent, body, timeout=self._timeout)
            )
        except httpx.TransportError as error:
            cause = cause_of(error)
            if not isinstance(cause, ssl.SSLCertVerificationError):
                raise TransientError(reason_of(cause)) from error
            raise OptionError(
                "endpoint",
                f"is {self.endpoint.origin}, whose certificate is not trusted ({cause.verify_message}):"
                " name its authority in the option caFile, or in the variable SSL_CERT_FILE",
            ) from error


def read_body(response: httpx.Response) -> bytes:
    """Read and close a response. Raises TransientError if the connection breaks."""
    try:
        return b"".join(response.iter_raw())
    except httpx.TransportError as error:
        raise TransientError(reason_of(cause_of(error))) from error
    finally:
        response.close()


def answer_timeout(endpoint: Endpoint) -> float:
    """Return the seconds to wait for the response to a short request.

    At most the retry timeout, but at least 3 s, so a server that drops packets is reported as soon
    as one that refuses connections.
    """
    return min(IO_TIMEOUT, max(_ANSWER_TIMEOUT_MIN, endpoint.retry_timeout))


def is_transient(status: int, body: bytes) -> bool:
    return status in _PASSING or (status == 409 and code_of(body) == _PASSING_CONFLICT)


def error_from_response(what: str, status: int, body: bytes) -> StreamfoldError:
    """Return the error for a response that retries would not change."""
    kind = _BY_STATUS.get(status, errors.InvalidError)
    return kind(f"{what} was refused with status {status}: {message_of(body)}")


def code_of(body: bytes) -> str:
    return str(_members(body).get("code", ""))


def message_of(body: bytes) -> str:
    """Return the message in an error response, truncated to fit a log line."""
    members = _members(body)
    if "message" in members:
        return f"{members.get('code', '')}: {members['message']}"[:500]
    return body[:200].decode(errors="replace")


def _members(body: bytes) -> dict[str, Any]:
    try:
        members = json.loads(body)
    except ValueError:
        return {}
    return members if isinstance(members, dict) else {}


class StreamCalls:
    """Calls on the streams of one basin."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all streams with this prefix that are not being deleted, in order."""
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
        tail = answer.json()["tail"]
        return StreamPosition(tail["seq_num"], tail["timestamp"])

    def tails(self, streams: Iterable[str]) -> dict[str, int | StreamfoldError]:
        """Return each stream's durable tail as a seq_num, or the error that prevents it.

        Asks for up to 1,000 streams per request. If the server lacks this request, asks for each
        stream separately for the rest of the connection. Raises only errors that concern all
        streams. A stream with a `RetryLaterError` is worth another call, because its failure
        was not retried.
        """
        tails: dict[str, int | StreamfoldError] = {}
        for batch in _tail_batches(dict.fromkeys(streams)):
            if not self._connection.lacks_tails:
                tails |= self._tails_at_once(batch)
            if self._connection.lacks_tails:
                tails |= {stream: self._tail_or_error(stream) for stream in batch}
        return tails

    def first(self, stream: str, at: int = 0) -> int:
        """Return the first existing record at or after `at`, or the tail if none exists."""
        return self._first(stream, seq_num=at)

    def first_since(self, stream: str, timestamp: int) -> int:
        """Return the first record with at least this timestamp, or the tail if none has it."""
        return self._first(stream, timestamp=timestamp)

    def timestamp(self, stream: str, at: int) -> int | None:
        """Return a record's timestamp in milliseconds, or None if it no longer exists."""
        answer = self._read(stream, seq_num=at, count=1)
        if answer.status == _UNWRITTEN:
            return None
        columns = read_columns(answer.body, headers=False, bodies=False)
        exists = len(columns.seq_nums) and int(columns.seq_nums[0]) == at
        return int(columns.timestamps[0]) if exists else None

    def page_bytes(self, stream: str, at: int, count: int = BATCH_RECORDS_MAX) -> bytes | None:
        """Return one response's ReadBatch starting at `at`, or None at and beyond the tail."""
        records = min(count, BATCH_RECORDS_MAX)
        answer = self._read(stream, seq_num=at, count=records, bytes=BATCH_BYTES_MAX)
        return None if answer.status == _UNWRITTEN else answer.body

    def snapshot_cursor(self, stream: str) -> int | None:
        """Return the first seq_num after the newest snapshot, or None without a snapshot."""
        answer = self._connection.get(stream_path(stream, "snapshot"))
        if answer.status == _REDIRECT:
            return int(answer.headers["stream-snapshot-offset"])
        if answer.status == 404 and code_of(answer.body) != "stream_not_found":
            return None
        raise error_from_response(f"the newest snapshot of {stream!r}", answer.status, answer.body)

    def append(self, stream: str, raw: bytes, match_seq_num: int | None = None) -> int:
        """Send an AppendInput once and return the seq_num after its last record.

        Raises OutcomeUnknownError if it may or may not have been appended.
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

    def _tails_at_once(self, streams: list[str]) -> dict[str, int | StreamfoldError]:
        """Return the server's answer for each stream, or nothing if it lacks the request."""
        body = json.dumps({"streams": streams}).encode()
        headers = {"content-type": "application/json"}
        answer = self._connection.repeat("POST", "/v1/tails", headers, body)
        if answer.status in _NO_ROUTE:
            self._connection.lacks_tails = True
            return {}
        if answer.status != 200:
            what = f"the tails of {len(streams)} streams"
            raise error_from_response(what, answer.status, answer.body)
        return {entry["stream"]: _tail_of_entry(entry) for entry in answer.json()["tails"]}

    def _tail_or_error(self, stream: str) -> int | StreamfoldError:
        try:
            return self.tail(stream).seq_num
        except (EndpointUnavailableError, errors.UnauthenticatedError):
            raise
        except StreamfoldError as error:
            return error

    def _first(self, stream: str, **start: int) -> int:
        answer = self._read(stream, **start, count=1)
        if answer.status == _UNWRITTEN:
            return int(answer.json()["tail"]["seq_num"])
        columns = read_columns(answer.body, headers=False, bodies=False)
        return int(columns.seq_nums[0]) if len(columns.seq_nums) else int(self.tail(stream).seq_num)

    def _read(self, stream: str, **query: int) -> HttpResponse:
        path = f"{stream_path(stream, 'records')}?{urlencode(query)}"
        answer = self._connection.get(path, {"accept": PROTOBUF})
        if answer.status not in (200, _UNWRITTEN):
            raise error_from_response(f"a read of {stream!r}", answer.status, answer.body)
        return answer

    def _ask(self, path: str, what: str) -> HttpResponse:
        answer = self._connection.get(path)
        if answer.status != 200:
            raise error_from_response(what, answer.status, answer.body)
        return answer


def _tail_batches(streams: Iterable[str]) -> Iterator[list[str]]:
    """Yield names in batches that each fit one tails request."""
    batch: list[str] = []
    size = 0
    for stream in streams:
        length = len(json.dumps(stream)) + 2
        if batch and (len(batch) == _TAILS_MAX or size + length > _TAILS_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(stream)
        size += length
    if batch:
        yield batch


def _tail_of_entry(entry: dict[str, Any]) -> int | StreamfoldError:
    """Return one stream's tail, or the error that a request for it alone would have raised."""
    if "tail" in entry:
        return int(entry["tail"]["seq_num"])
    status, body = entry["status"], json.dumps(entry["error"]).encode()
    if is_transient(status, body):
        return TransientError(f"status {status}: {message_of(body)}")
    return error_from_response(f"the tail of {entry['stream']!r}", status, body)
