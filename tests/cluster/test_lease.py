"""The bytes of a lease, and the proof that a process has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.blob import open_blob_store
from streamfold.cluster import LeaseKeeper, LeaseOwner, StoreLease, process_evidence
from streamfold.cluster.lease import decode_lease, encode_lease
from streamfold.cluster.process_identity import has_ended
from streamfold.errors import DataCorruptError, FormatUnsupportedError, InvalidError

LEASE = StoreLease(owner=LeaseOwner("1f", "a", 7, "boot/7/1"), sequence=3, expiry=8.0)


def test_a_lease_is_read_as_it_was_written() -> None:
    assert decode_lease(encode_lease(LEASE)) == LEASE
    assert encode_lease(LEASE) == (
        b'{"owner":{"id":"1f","name":"a","process":7,"evidence":"boot/7/1"},"sequence":3,'
        b'"expiry":8.0,"released":false,"version":1}'
    )


@given(st.binary())
def test_other_bytes_are_no_lease(data: bytes) -> None:
    with pytest.raises(DataCorruptError):
        decode_lease(data)


@pytest.mark.parametrize("expiry", [b"0.0", b"1e9", b"-8.0"])
def test_an_expiry_for_which_nobody_would_wait_is_no_lease(expiry: bytes) -> None:
    with pytest.raises(DataCorruptError, match="expiry"):
        decode_lease(encode_lease(LEASE).replace(b"8.0", expiry))


def test_the_lease_of_a_newer_version_is_refused_whatever_else_it_has() -> None:
    with pytest.raises(FormatUnsupportedError, match="upgrade this server"):
        decode_lease(b'{"version": 2, "owner": ["of", "another", "form"]}')


def test_an_owner_is_shown_in_one_line() -> None:
    assert str(LeaseOwner("1", "a\n\x1b[2Jb" + "c" * 300, 5)).startswith("a??[2Jb")
    assert len(str(LeaseOwner("1", "c" * 300, 5))) < 230


@pytest.mark.parametrize("expiry", [0.0, 0.5, 301.0, float("nan")])
def test_an_expiry_that_cannot_be_kept_is_refused(expiry: float) -> None:
    with pytest.raises(InvalidError, match="lease that expires"):
        LeaseKeeper(open_blob_store("memory:"), LEASE.owner, expiry, lambda: 0.0)


def test_a_process_on_this_machine_is_known_to_have_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        evidence = process_evidence(process.pid)
        assert evidence
        assert not has_ended(evidence)
        process.kill()
        process.wait()
        assert has_ended(evidence)
        assert not process_evidence(process.pid)


@pytest.mark.parametrize("evidence", ["", "boot", "another-boot:1/1/1", "/1/1"])
def test_nothing_is_known_of_processes_elsewhere(evidence: str) -> None:
    assert not has_ended(evidence)


def test_a_number_that_another_process_has_now_is_no_sign_of_life() -> None:
    evidence = process_evidence(1)
    if_reused = evidence.rpartition("/")[0] + "/1"
    assert not has_ended(evidence)
    assert has_ended(if_reused)
