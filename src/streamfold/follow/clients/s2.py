"""Client for streams on any S2 endpoint, using the official SDK. Needs the extra `client`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from streamfold import errors
from streamfold.errors import StreamfoldError
from streamfold.extras import needing_extra
from streamfold.follow.clients.client import Appended, EncodedBatch, StreamRecord
from streamfold.follow.clients.feed import cancel_until_done, cancellable
from streamfold.model.names import endpoint_url
from streamfold.model.positions import SeqNum, StreamPosition, Timestamp
from streamfold.model.records import Record
from streamfold.records.protobuf import delimited, varint
from streamfold.wording import reason_of

with needing_extra("client"):
    import s2_sdk

    from streamfold.follow.clients.s2_internals import (
        AppendIndefiniteFailureError,
        ConnectError,
        TransportError,
        append_input,
        append_inputs,
        has_no_side_effects,
        retire_silent_connections,
    )

#: Errors by HTTP status. Any other status is the caller's mistake.
_BY_STATUS: dict[int, type[StreamfoldError]] = {
    401: errors.UnauthenticatedError,
    403: errors.PermissionDeniedError,
    404: errors.NotFoundError,
    409: errors.ConflictError,
}
_RETRYABLE = frozenset({408, 429, 500, 502, 503, 504})


#: Sent when there is no token: the SDK requires some text, and a server without `--auth` accepts
#: any.
_NO_TOKEN = "none"  # noqa: S105


def connect(endpoint: str | None = None, *, token: str | None = None) -> s2_sdk.S2:
    """Return a client for the server at `endpoint`, a URL or `host:port`, without connecting yet.

    `endpoint` defaults to S2_ACCOUNT_ENDPOINT and S2_BASIN_ENDPOINT, and `token` to S2_ACCESS_TOKEN.
    Close the client after use, or use it as a context manager:

        async with streamfold.connect("http://localhost:8080") as s2:
            stream = s2.basin("my-basin").stream("orders")
    """
    names = ("S2_ACCOUNT_ENDPOINT", "S2_BASIN_ENDPOINT")
    account, basin = (endpoint_url(endpoint or os.environ.get(name, "")) for name in names)
    if not (account and basin):
        raise errors.InvalidError(
            'no server is named: call connect("http://localhost:8080"), or set S2_ACCOUNT_ENDPOINT and '
            "S2_BASIN_ENDPOINT, which `streamfold serve` prints"
        )
    endpoints = s2_sdk.Endpoints(account=account, basin=basin)
    return s2_sdk.S2(token or os.environ.get("S2_ACCESS_TOKEN") or _NO_TOKEN, endpoints=endpoints)


class S2Client:
    """A `StreamClient` for the S2 SDK's `s2.basin(...).stream(...)`. Leaves the SDK's retries on."""

    def __init__(self, stream: s2_sdk.S2Stream) -> None:
        self._stream = stream

    def __repr__(self) -> str:
        return f"<S2Client {self.name}>"

    @property
    def name(self) -> str:
        return str(self._stream.name)

    async def check_tail(self) -> StreamPosition:
        try:
            tail = await cancellable(self._stream.check_tail())
        except s2_sdk.S2Error as error:
            raise self._translate(error) from error
        return StreamPosition(SeqNum(tail.seq_num), Timestamp(tail.timestamp))

    async def peek(self, seq_num: int, count: int) -> Sequence[StreamRecord]:
        try:
            batch = await cancellable(
                self._stream.read(start=s2_sdk.SeqNum(seq_num), limit=s2_sdk.ReadLimit(count=count))
            )
        except s2_sdk.ReadUnwrittenError:
            return []
        except s2_sdk.S2Error as error:
            raise self._translate(error) from error
        records: Sequence[StreamRecord] = batch.records
        return records

    async def read(self, seq_num: int) -> AsyncGenerator[Sequence[StreamRecord]]:
        session = self._stream.read_session(start=s2_sdk.SeqNum(seq_num))
        try:
            async for batch in session:
                yield batch.records
        except s2_sdk.S2Error as error:
            raise self._translate(error) from error
        finally:
            closing = asyncio.create_task(session.close())
            await cancel_until_done(closing)
            if not closing.cancelled():
                closing.result()

    async def append(
        self,
        records: Sequence[Record],
        *,
        match_seq_num: int | None = None,
        fencing_token: str | None = None,
    ) -> Appended:
        batch = s2_sdk.AppendInput(
            [_record(record) for record in records],
            match_seq_num=match_seq_num,
            fencing_token=fencing_token,
        )
        try:
            ack = await cancellable(self._stream.append(batch))
        except s2_sdk.SeqNumMismatchError as error:
            raise errors.SeqNumMismatchError(match_seq_num or 0, error.expected_seq_num) from error
        except s2_sdk.FencingTokenMismatchError as error:
            raise errors.FencingTokenMismatchError(
                fencing_token or "", error.expected_fencing_token
            ) from error
        except s2_sdk.S2Error as error:
            raise self._translate(error, appending=True) from error
        return Appended(ack.start.seq_num, ack.end.seq_num)

    async def append_encoded(
        self, batches: Sequence[EncodedBatch], *, match_seq_num: int, fencing_token: str
    ) -> int:
        """Append encoded batches in order without waiting in between, and return the tail.

        Stops at the first that fails: no later batch is appended. Avoids the SDK's own append
        session, which can wait forever for a server that has gone away.
        """
        start, inputs = match_seq_num, []
        token = delimited(b"\x1a", fencing_token.encode())
        for batch in batches:
            inputs.append(b"%b\x10%b%b" % (batch.records, varint(start), token))
            start += batch.record_count
        try:
            if len(inputs) != 1:
                await append_inputs(self._stream, inputs)
            elif (end := await append_input(self._stream, inputs[0])) != start:
                raise errors.OutcomeUnknownError(
                    f"the server acknowledged an append up to {end}, which ends at {start}"
                )
        except s2_sdk.SeqNumMismatchError as error:
            raise errors.SeqNumMismatchError(match_seq_num, error.expected_seq_num) from error
        except s2_sdk.FencingTokenMismatchError as error:
            raise errors.FencingTokenMismatchError(
                fencing_token, error.expected_fencing_token
            ) from error
        except s2_sdk.S2Error as error:
            raise self._translate(error, appending=True) from error
        return start

    def _translate(self, error: s2_sdk.S2Error, *, appending: bool = False) -> StreamfoldError:
        retire_silent_connections(self._stream, error)
        return translate(error, appending=appending)


def _record(record: Record) -> Any:
    headers = [(name, value) for name, value in record.headers]
    return s2_sdk.Record(record.body, headers, record.timestamp)


def translate(error: s2_sdk.S2Error, *, appending: bool = False) -> StreamfoldError:
    """Translate an SDK error. For an append, the result shows whether it may have taken effect."""
    if isinstance(error, AppendIndefiniteFailureError):
        return errors.OutcomeUnknownError(str(error))
    if isinstance(error, s2_sdk.ReadUnwrittenError):
        return errors.PositionUnwrittenError(error.tail.seq_num, error.tail.timestamp)
    cause = error.__cause__
    transport = cause if isinstance(cause, TransportError) else None
    message = f"{getattr(error, 'code', 'transport')}: {reason_of(error)}"
    if isinstance(cause, ConnectError):
        message = (
            f"the server cannot be reached: {reason_of(cause)}; is it running, and is its address "
            "right? `streamfold doctor` looks further"
        )
    if transport is not None or _is_retryable(error):
        # A refused connection had no effect. A broken one may have.
        if appending and not has_no_side_effects(transport or error):
            return errors.OutcomeUnknownError(message)
        return errors.RetryLaterError(message)
    status = getattr(error, "status_code", None)
    return (
        _BY_STATUS.get(status, errors.InvalidError)(message)
        if status
        else (errors.InvalidError(message))
    )


def _is_retryable(error: s2_sdk.S2Error) -> bool:
    status = getattr(error, "status_code", None)
    return status in _RETRYABLE or getattr(error, "code", "") == "transaction_conflict"
