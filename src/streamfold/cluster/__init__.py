"""Which of several servers is active: leases on object storage."""

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
