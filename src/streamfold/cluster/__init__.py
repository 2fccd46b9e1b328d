"""Leases on object storage, which decide which of several servers is active."""

from streamfold.cluster.lease import EXPIRY, LeaseOwner, StoreLease
from streamfold.cluster.lease_keeper import LeaseKeeper
from streamfold.cluster.process_identity import process_evidence, steady_clock

__all__ = [
    "EXPIRY",
    "LeaseKeeper",
    "LeaseOwner",
    "StoreLease",
    "process_evidence",
    "steady_clock",
]
