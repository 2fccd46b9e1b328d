"""The lease of a store: one object on storage that names the active server, and how others judge it.

The active server writes the object again and again, each time on the condition that nobody else has
(compare-and-swap). Another server that sees one version for the whole expiry claims the lease in the
same way. Nobody compares the clocks of two machines: each server measures how long *it* has seen that
version. Their clocks only have to run about equally fast, because the active server stops a quarter of
the expiry before another one may claim.

No two versions of the object have the same bytes, since an etag may depend on the bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from streamfold.errors import DataCorruptError, FormatUnsupportedError

#: The object's key, below the folder of the store's database.
KEY: Final = "server.lease"
#: An object that a starting server writes to learn what time it is for storage.
CLOCK_KEY: Final = "server.clock"
#: Seconds for which a version of the lease may stay before another server claims it.
EXPIRY: Final = 8.0
EXPIRY_MIN, EXPIRY_MAX = 1.0, 300.0
#: Heartbeats in an expiry: one every 2 s by default, and 0.5 PUT/s.
HEARTBEATS: Final = 4
#: Part of an expiry after which the active server trusts its own lease no more.
TRUST: Final = 0.75
#: Longest pause in seconds between two looks of a standby at the lease.
LOOK_MAX: Final = 1.0
#: What this version writes, and the newest that it reads.
VERSION: Final = 1
#: Bytes of a name that are shown.
_NAME_MAX = 200


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The server that a lease names."""

    #: Unique to each start of a server: two servers of one name are two owners.
    id: str
    #: For people.
    name: str
    process: int
    #: By which a process on the same machine recognizes that this one has ended; see process_identity.
    evidence: str = ""

    def __str__(self) -> str:
        shown = "".join(each if each.isprintable() else "?" for each in self.name[:_NAME_MAX])
        return f"{shown} (process {self.process})"


class StoreLease(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the object."""

    owner: LeaseOwner
    #: How often the owner has written the object.
    sequence: int
    #: Seconds for which a version may stay, as the owner has promised.
    expiry: float
    #: Whether the owner has closed the store and given the lease up.
    released: bool = False
    version: int = VERSION


class _AnyVersion(msgspec.Struct):
    version: int


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(StoreLease)
_ANY_VERSION = msgspec.json.Decoder(_AnyVersion)


def encode_lease(lease: StoreLease) -> bytes:
    """Return the bytes of the object."""
    return _ENCODER.encode(lease)


def decode_lease(data: bytes) -> StoreLease:
    """Decode the object's bytes.

    DataCorruptError if they are no lease, FormatUnsupportedError if a newer version wrote them.
    """
    try:
        version = _ANY_VERSION.decode(data).version
        if version > VERSION:
            raise FormatUnsupportedError(
                f"the lease {KEY} of the store has format {version}, but this version reads up to "
                f"{VERSION}: a newer Streamfold serves the store; upgrade this server"
            )
        lease = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataCorruptError(f"the lease {KEY} cannot be decoded: {error}") from None
    if not EXPIRY_MIN <= lease.expiry <= EXPIRY_MAX:
        raise DataCorruptError(
            f"the lease {KEY} has an expiry of {lease.expiry} seconds: it must be {EXPIRY_MIN:g} to "
            f"{EXPIRY_MAX:g}"
        )
    return lease


class LeaseWatch:
    """Says for how long a standby has seen the same version of the lease."""

    def __init__(self) -> None:
        self._etag: str | None = None
        self._since: float | None = None
        #: Whether a version was ever seen.
        self.has_looked = False

    def observe(self, etag: str | None, now: float, age: float = 0.0) -> None:
        """Note the version at `now`; None if there is no object. A new one has this age already."""
        self.has_looked = True
        if self._since is None or etag != self._etag:
            self._etag, self._since = etag, now - age

    def lose_sight(self) -> None:
        """Begin anew: while storage does not answer, the active server cannot renew its lease."""
        self._since = None

    def unchanged(self, now: float) -> float:
        """Return the seconds for which the version has not changed."""
        return 0.0 if self._since is None else now - self._since
