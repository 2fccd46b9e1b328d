"""All errors that Streamfold raises, grouped by what a caller does next.

`code` is stable and sent to clients. `definite` says whether the failed call certainly changed
nothing. An error that nobody catches by name has a `code` but no class of its own. Independent
packages (`archive`, `follow`, `ingest`, `snapshotter`, `spark`) add leaves to these groups in their
`errors.py`. Errors cross process boundaries unchanged, pickled or as JSON (`to_wire`, `from_wire`).

    StreamfoldError
    ├── InvalidError                      fix the request
    │   ├── MalformedError
    │   ├── KeyRequiredError
    │   └── TooLargeError
    ├── NotFoundError                     name something that exists, or create it
    │   ├── BasinNotFoundError
    │   ├── StreamNotFoundError
    │   ├── AccessTokenNotFoundError
    │   ├── SnapshotNotFoundError
    │   └── BlobNotFoundError
    ├── ConflictError                     read what exists, then decide
    │   ├── AlreadyExistsError
    │   ├── BasinDeletingError
    │   ├── StreamDeletingError
    │   ├── StreamForkedError
    │   ├── SnapshotConflictError
    │   ├── BlobExistsError
    │   └── TermsError                    the stream's own terms reject this append
    │       ├── StreamClosedError
    │       ├── ContentTypeMismatchError
    │       ├── StreamSeqError
    │       ├── ProducerStaleError
    │       ├── ProducerGapError
    │       └── ProducersExhaustedError
    ├── ConditionFailedError              a condition did not hold: read again, then decide
    │   ├── FencingTokenMismatchError
    │   └── SeqNumMismatchError
    ├── PositionUnwrittenError            wait, or read from before the tail
    ├── PositionTrimmedError              start from a snapshot, or from the first remaining record
    ├── DecryptionFailedError             use the key that the records were written with
    ├── UnauthenticatedError              present a known token that has not expired
    ├── PermissionDeniedError             use a token with this right
    ├── RetryLaterError                   nothing happened: try again later
    │   ├── StoreClosingError
    │   ├── StoreRecoveringError
    │   ├── StorageFullError
    │   ├── ServerBusyError
    │   ├── NotActiveError
    │   └── BlobUnavailableError
    ├── OutcomeUnknownError               may or may not have happened: read back before repeating
    │   └── BlobOutcomeUnknownError
    ├── WriterFencedError                 another process owns the store now: stop
    │   └── LeaseLostError
    └── StorageError                      stored bytes are unusable: an operator must look
        ├── DataCorruptError
        ├── DeviceFailedError
        ├── FormatUnsupportedError
        └── StoreInUseError
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar


class StreamfoldError(Exception):
    """Root of all errors that Streamfold raises on purpose."""

    code: str = "other"
    #: Whether the failed call certainly changed nothing.
    definite: ClassVar[bool] = True
    #: URI of the archive destination that failed, if any.
    destination: str | None = None
    #: Message for a server's clients, if the full one may name files, keys or buckets.
    public_message: str | None = None

    def __init__(
        self, message: str, *, code: str | None = None, public_message: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code  # for an error without a class of its own
        if public_message is not None:
            self.public_message = public_message

    def to_wire(self) -> str:
        """Encode the error as one line of ASCII JSON, for `from_wire` in another process.

        Values without a JSON form, such as column types, become text.
        """
        kinds = [_name(kind) for kind in type(self).__mro__ if issubclass(kind, StreamfoldError)]
        fields = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        wire = {"code": self.code, "definite": self.definite, "kinds": kinds, "fields": fields}
        return json.dumps(wire, default=str)

    @staticmethod
    def from_wire(wire: str) -> StreamfoldError:
        """Decode the output of `to_wire`. Raises ValueError for anything else.

        A class that is not loaded here becomes its nearest loaded ancestor, with the same code, message
        and fields.
        """
        try:
            data = json.loads(wire)
            loaded = {_name(kind): kind for kind in _with_subclasses(StreamfoldError)}
            kind = next(loaded[name] for name in data["kinds"] if name in loaded)
            fields = data["fields"]
            if kind.code != data["code"] or kind.definite != data["definite"]:
                fields |= {"code": data["code"], "definite": data["definite"]}
            error = _restore(kind, fields["message"])
            for name, value in fields.items():
                vars(error)[name] = tuple(value) if isinstance(value, list) else value
        except (AttributeError, KeyError, StopIteration, TypeError):
            raise ValueError(f"not the JSON of an error: {wire[:200]!r}") from None
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # The default passes the message to the constructor, and most constructors take other arguments.
        return _restore, (type(self), self.message), vars(self)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _with_subclasses(kind: type[StreamfoldError]) -> Iterator[type[StreamfoldError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _with_subclasses(child)


def _restore(kind: type[StreamfoldError], message: str) -> StreamfoldError:
    error = kind.__new__(kind)
    StreamfoldError.__init__(error, message)
    return error


class InvalidError(StreamfoldError):
    """The request breaks a rule. The message names the value, the rule and the way out."""

    code = "invalid"


class MalformedError(InvalidError):
    """The request's bytes cannot be decoded."""

    code = "malformed"


class KeyRequiredError(InvalidError):
    """The stream is encrypted and the call has no key."""

    code = "key_required"

    def __init__(self, cipher: str) -> None:
        super().__init__(f"this stream is encrypted with {cipher}: give the encryption key")
        self.cipher = cipher


class TooLargeError(InvalidError):
    """The request is too large."""

    code = "too_large"


class NotFoundError(StreamfoldError):
    """A thing named in the request does not exist."""

    code = "not_found"


class BasinNotFoundError(NotFoundError):
    code = "basin_not_found"

    def __init__(self, basin: str, way_out: str = "create it first") -> None:
        super().__init__(f"basin {basin!r} does not exist: {way_out}")


class StreamNotFoundError(NotFoundError):
    code = "stream_not_found"

    def __init__(
        self,
        basin: str,
        stream: str,
        way_out: str = "create it, or let the basin create streams on append or on read",
    ) -> None:
        super().__init__(f"stream {stream!r} does not exist in basin {basin!r}: {way_out}")


class AccessTokenNotFoundError(NotFoundError):
    code = "access_token_not_found"

    def __init__(self, token_id: str) -> None:
        super().__init__(f"access token {token_id!r} does not exist: list the tokens to see which")


class SnapshotNotFoundError(NotFoundError):
    code = "snapshot_not_found"


class BlobNotFoundError(NotFoundError):
    code = "blob_not_found"
    public_message = (
        "storage has lost the data of this read: the operator finds details in the server's log"
    )


class ConflictError(StreamfoldError):
    """The thing already exists or is being deleted."""

    code = "conflict"


class AlreadyExistsError(ConflictError):
    code = "resource_already_exists"

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(
            f"{kind} {name!r} exists already: choose another name, or ensure it instead of creating "
            "it (PUT; `--ensure` on the command line)"
        )


class BasinDeletingError(ConflictError):
    code = "basin_deletion_pending"

    def __init__(self, basin: str) -> None:
        super().__init__(f"basin {basin!r} is being deleted: wait for that, or use another name")


class StreamDeletingError(ConflictError):
    code = "stream_deletion_pending"

    def __init__(self, basin: str, stream: str) -> None:
        super().__init__(
            f"stream {stream!r} in basin {basin!r} is being deleted: wait until it is gone, "
            "or use another name"
        )


class StreamForkedError(ConflictError):
    """The stream is deleted, but its forks still need its records."""

    code = "stream_forked"

    def __init__(self, basin: str, stream: str) -> None:
        super().__init__(
            f"stream {stream!r} in basin {basin!r} is deleted, and kept for its forks only: use "
            "another name, or delete the forks first"
        )


class SnapshotConflictError(ConflictError):
    code = "snapshot_conflict"


class BlobExistsError(ConflictError):
    code = "blob_exists"
    public_message = "storage has this already: nothing was changed"


class TermsError(ConflictError):
    """The stream's own terms reject the append. Nothing was appended."""

    code = "terms"


class StreamClosedError(TermsError):
    code = "stream_closed"

    def __init__(self, stream: str) -> None:
        super().__init__(f"stream {stream!r} is closed: it takes no more records")


class ContentTypeMismatchError(TermsError):
    code = "content_type_mismatch"

    def __init__(self, content_type: str, stream_type: str) -> None:
        super().__init__(
            f"content type {content_type!r} is not the stream's, which is {stream_type!r}"
        )


class StreamSeqError(TermsError):
    code = "stream_seq_conflict"

    def __init__(self, stream_seq: str, last: str) -> None:
        super().__init__(
            f"sequence conflict: Stream-Seq {stream_seq!r} is not greater than {last!r}"
        )


class ProducerStaleError(TermsError):
    """A newer instance of the producer has taken over."""

    code = "producer_stale"

    def __init__(self, producer: str, epoch: int, current: int) -> None:
        super().__init__(
            f"epoch {epoch} of producer {producer!r} is over, the current one is {current}: "
            "another instance took over; claim the next epoch to continue"
        )
        self.current_epoch = current


class ProducerGapError(TermsError):
    """An earlier append of the producer is missing."""

    code = "producer_gap"

    def __init__(self, producer: str, expected: int, received: int) -> None:
        super().__init__(
            f"producer {producer!r} must send {expected} next, this is {received}: send what is "
            "missing first"
        )
        self.expected = expected
        self.received = received


class ProducersExhaustedError(TermsError):
    code = "producers_exhausted"


class ConditionFailedError(StreamfoldError):
    """An append condition did not hold against durable state. Nothing was appended."""

    code = "condition_failed"


class FencingTokenMismatchError(ConditionFailedError):
    code = "fencing_token_mismatch"

    def __init__(self, token: str, current: str) -> None:
        super().__init__(
            f"fencing token {token!r} is not the stream's current token {current!r}: "
            "another writer took over, or the stream was never fenced with it"
        )
        self.current = current


class SeqNumMismatchError(ConditionFailedError):
    code = "seq_num_mismatch"

    def __init__(self, match_seq_num: int, following: int) -> None:
        super().__init__(
            f"match_seq_num {match_seq_num} is not the next sequence number {following}: "
            "other records were appended in between, or fewer than assumed"
        )
        self.next_seq_num = following


class PositionUnwrittenError(StreamfoldError):
    """The read starts at or beyond the tail and may not wait."""

    code = "position_unwritten"

    def __init__(self, tail_seq_num: int, tail_timestamp: int) -> None:
        super().__init__(
            f"nothing is written at that position yet: the tail is seq_num {tail_seq_num}, "
            f"timestamp {tail_timestamp}; start before it, or wait"
        )
        self.tail_seq_num = tail_seq_num
        self.tail_timestamp = tail_timestamp


class PositionTrimmedError(StreamfoldError):
    """The read starts before the first remaining record."""

    code = "position_trimmed"

    def __init__(self, seq_num: int, first_seq_num: int) -> None:
        super().__init__(
            f"records before {first_seq_num} are no longer kept, this starts at {seq_num}: start "
            "from a snapshot (bootstrap gives it with all that follows), or from there"
        )
        self.first_seq_num = first_seq_num


class DecryptionFailedError(StreamfoldError):
    """The records were written with another key, or the stored bytes changed."""

    code = "decryption_failed"

    def __init__(self) -> None:
        super().__init__("the records cannot be decrypted with the given encryption key")


class UnauthenticatedError(StreamfoldError):
    """The caller is unknown. The message never repeats the presented secret."""

    code = "authn"


class PermissionDeniedError(StreamfoldError):
    """The caller is known but may not do this."""

    code = "permission_denied"


class RetryLaterError(StreamfoldError):
    """Nothing happened. The same call may succeed later."""

    code = "unavailable"


class StoreClosingError(RetryLaterError):
    code = "server_draining"

    def __init__(self) -> None:
        super().__init__("the store is closing and takes no new work: connect again")


class StoreRecoveringError(RetryLaterError):
    code = "store_recovering"
    public_message = "the store is reopening its storage after a failure: try again later"

    def __init__(self, cause: str) -> None:
        super().__init__(f"the store is reopening its storage after a failure: {cause}")


class StorageFullError(RetryLaterError):
    """Storage has no room for more records. Trims and deletions still work and free some."""

    code = "storage_full"


class ServerBusyError(RetryLaterError):
    """The server already handles its maximum number of requests."""

    code = "server_busy"

    def __init__(self, most: int, where: str, what: str = "are running") -> None:
        super().__init__(
            f"{most} requests {what}, which is the most that one {where} may have now: end "
            "sessions that are not needed, or try again later"
        )


class NotActiveError(RetryLaterError):
    """Another server has, or may have, the store. This server stands by."""


class BlobUnavailableError(RetryLaterError):
    code = "blob_unavailable"
    public_message = "storage did not answer, or refused: nothing was changed; try again later"
    #: Whether the same request may succeed a moment later, because storage did not reject it.
    transient = False


class OutcomeUnknownError(StreamfoldError):
    """The write may or may not have taken effect. Only reading back shows which."""

    code = "outcome_unknown"
    definite = False
    public_message = (
        "storage failed during this write, which may or may not have happened: read back before you "
        "repeat it"
    )


class BlobOutcomeUnknownError(OutcomeUnknownError):
    code = "blob_outcome_unknown"


class WriterFencedError(StreamfoldError):
    """Another process opened this store for writing. This process may never write to it again."""

    code = "writer_fenced"
    definite = False

    def __init__(self) -> None:
        super().__init__(
            "another process opened this store and took over as its writer: stop this process"
        )


class LeaseLostError(WriterFencedError):
    """Another server has the store's lease. This server no longer acknowledges anything."""

    def __init__(self, owner: str) -> None:
        StreamfoldError.__init__(
            self,
            "another process opened this store and took over as its writer: "
            f"{owner} has its lease; stop this process",
        )


class StorageError(StreamfoldError):
    """Storage failed, or its contents are unusable."""

    code = "storage"
    public_message = "storage failed, or its data cannot be used: the server's log has details"


class DataCorruptError(StorageError):
    code = "data_corrupt"


class DeviceFailedError(StorageError):
    """The device failed to store a write. The device's contents are now unknown."""

    code = "device_failed"
    definite = False


class FormatUnsupportedError(StorageError):
    code = "format_unsupported"


class StoreInUseError(StorageError):
    code = "store_in_use"
