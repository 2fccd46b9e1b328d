"""Every error has one response, and an unknown outcome never looks clean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from streamfold import errors
from streamfold.blob.blob_store import BlobChangedError
from streamfold.server.http.problems import ClientHangupError, RequestTimeoutError
from streamfold.wire.s2 import errors as failures
from streamfold.wire.s2.errors import CODES, code_of, describe_failure

#: The protocol's table: code, status, and whether the code promises that nothing happened.
TABLE = """
authn 401 yes
bad_frame 400 yes
bad_header 400 yes
bad_json 400 yes
bad_path 400 yes
bad_proto 400 yes
bad_query 400 yes
decryption_failed 400 yes
permission_denied 403 yes
quota_exhausted 403 yes
access_token_not_found 404 yes
basin_not_found 404 yes
stream_not_found 404 yes
request_timeout 408 no
basin_deletion_pending 409 yes
resource_already_exists 409 yes
stream_deletion_pending 409 yes
transaction_conflict 409 yes
invalid 422 yes
rate_limited 429 yes
client_hangup 499 no
other 500 no
storage 500 no
not_implemented 501 yes
hot_server 502 yes
server_draining 503 yes
unavailable 503 no
upstream_timeout 504 no
"""
ROWS = [line.split() for line in TABLE.split("\n") if line]

ANSWERS = [
    (errors.UnauthenticatedError("m"), "authn"),
    (failures.BadFrameError("m"), "bad_frame"),
    (failures.BadHeaderError("m"), "bad_header"),
    (failures.BadJsonError("m"), "bad_json"),
    (failures.BadPathError("m"), "bad_path"),
    (failures.BadProtoError("m"), "bad_proto"),
    (failures.BadQueryError("m"), "bad_query"),
    (errors.DecryptionFailedError(), "decryption_failed"),
    (errors.KeyRequiredError("aegis-256"), "bad_header"),
    (errors.PermissionDeniedError("m"), "permission_denied"),
    (failures.WireError("m", code="quota_exhausted"), "quota_exhausted"),
    (errors.AccessTokenNotFoundError("m"), "access_token_not_found"),
    (errors.BasinNotFoundError("b"), "basin_not_found"),
    (errors.StreamNotFoundError("b", "s"), "stream_not_found"),
    (RequestTimeoutError("m"), "request_timeout"),
    (errors.BasinDeletingError("b"), "basin_deletion_pending"),
    (errors.AlreadyExistsError("basin", "b"), "resource_already_exists"),
    (errors.StreamDeletingError("b", "s"), "stream_deletion_pending"),
    (failures.WireError("m", code="transaction_conflict"), "transaction_conflict"),
    (errors.InvalidError("m"), "invalid"),
    (failures.WireError("m", code="rate_limited"), "rate_limited"),
    (ClientHangupError("m"), "client_hangup"),
    (errors.StreamfoldError("m"), "other"),
    (failures.OversizedError("m"), "other"),
    (errors.OutcomeUnknownError("m"), "storage"),
    (errors.BlobOutcomeUnknownError("m"), "storage"),
    (errors.StorageError("m"), "storage"),
    (errors.DataCorruptError("m"), "storage"),
    (errors.FormatUnsupportedError("m"), "storage"),
    (errors.BlobNotFoundError("m"), "storage"),
    (failures.WireError("m", code="not_implemented"), "not_implemented"),
    (failures.WireError("m", code="hot_server"), "hot_server"),
    (errors.StoreClosingError(), "server_draining"),
    (errors.WriterFencedError(), "unavailable"),
    (errors.RetryLaterError("m"), "unavailable"),
    (errors.StoreRecoveringError("m"), "unavailable"),
    (errors.BlobUnavailableError("m"), "unavailable"),
    (failures.WireError("m", code="upstream_timeout"), "upstream_timeout"),
    (errors.MalformedError("m"), "bad_proto"),
]


def subclasses(root: type[errors.StreamfoldError]) -> Iterator[type[errors.StreamfoldError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from subclasses(kind)


@pytest.mark.parametrize(("code", "status", "clean"), ROWS)
def test_codes_have_the_protocols_status_and_promise(code: str, status: str, clean: str) -> None:
    assert CODES[code] == (int(status), clean == "yes")


def test_no_codes_exist_beyond_the_protocols() -> None:
    assert set(CODES) == {code for code, _, _ in ROWS}


@pytest.mark.parametrize(
    ("error", "code"), ANSWERS, ids=[f"{type(error).__name__} {error.code}" for error, _ in ANSWERS]
)
def test_errors_are_answered_with_their_code(error: errors.StreamfoldError, code: str) -> None:
    status, body = describe_failure(error)
    assert status == CODES[code].status
    assert json.loads(body) == {"code": code, "message": error.public_message or error.message}


@pytest.mark.parametrize(
    "kind",
    [
        errors.BlobNotFoundError,
        errors.BlobExistsError,
        errors.BlobUnavailableError,
        errors.BlobOutcomeUnknownError,
        errors.OutcomeUnknownError,
        errors.StoreRecoveringError,
        errors.StorageError,
        errors.DataCorruptError,
        errors.DeviceFailedError,
        BlobChangedError,
    ],
)
def test_failures_of_storage_show_nothing_of_its_files_and_keys(
    kind: Callable[[str], errors.StreamfoldError],
) -> None:
    error = kind("cannot read '0000/1-ab' in /var/lib/streamfold: Too many open files")
    shown = json.loads(describe_failure(error).body)["message"]
    assert "0000/1-ab" not in shown
    assert "/var/lib" not in shown
    assert "/var/lib" in str(error)


def test_every_code_can_be_answered() -> None:
    assert {code for _, code in ANSWERS} == set(CODES)


def test_no_error_of_unknown_outcome_gets_a_code_that_promises_no_effect() -> None:
    indefinite = [kind for kind in subclasses(errors.StreamfoldError) if not kind.definite]
    assert len(indefinite) >= 6
    for kind in indefinite:
        error = kind.__new__(kind)
        assert not CODES[code_of(error)].clean, kind


def test_a_clean_code_on_an_indefinite_error_is_not_believed() -> None:
    class LyingError(errors.InvalidError):
        definite = False

    class UnheardOfError(errors.StreamfoldError):
        code = "unheard_of"
        definite = False

    assert code_of(LyingError("m")) == "storage"
    assert code_of(UnheardOfError("m")) == "storage"


def test_a_wrong_fencing_token_is_answered_with_the_current_one() -> None:
    failure = describe_failure(errors.FencingTokenMismatchError("mine", "theirs"))
    assert failure == (412, b'{"fencing_token_mismatch":"theirs"}')


def test_a_wrong_seq_num_is_answered_with_the_next_one() -> None:
    failure = describe_failure(errors.SeqNumMismatchError(7, 2**64 - 1))
    assert failure == (412, b'{"seq_num_mismatch":18446744073709551615}')


def test_an_unwritten_position_is_answered_with_the_tail() -> None:
    failure = describe_failure(errors.PositionUnwrittenError(3, 1700000000000))
    assert failure == (416, b'{"tail":{"seq_num":3,"timestamp":1700000000000}}')


def test_an_error_of_another_kind_shows_nothing_of_its_insides() -> None:
    status, body = describe_failure(RuntimeError("password=hunter2"))
    assert status == 500
    assert json.loads(body)["code"] == "other"
    assert b"hunter2" not in body


def test_a_message_that_is_not_valid_unicode_is_still_answered() -> None:
    status, body = describe_failure(errors.InvalidError("name \ud800"))
    assert status == 422
    assert json.loads(body)["message"] == "name ?"
