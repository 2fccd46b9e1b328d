"""A store's lease: one object on storage that names the active server, and rules for judging it.

The active server rewrites the object regularly, each time on the condition that nobody else has
(compare-and-swap). If another server sees the same version for the whole expiry, it claims the
lease in the same way. Clocks of two machines are never compared: each server measures how long *it*
has seen that version. Their clocks only have to run at about the same rate, because the active
server stops a quarter of the expiry before another one may claim.

No two versions of the object have the same bytes, since an etag may depend on the bytes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from streamfold.errors import DataCorruptError, FormatUnsupportedError

#: The object's key, below the folder of the store's database.
KEY: Final = "server.lease"
#: A starting server writes this object to learn the storage service's current time.
CLOCK_KEY: Final = "server.clock"
#: Seconds for which a version of the lease may remain before another server claims it.
EXPIRY: Final = 8.0
EXPIRY_MIN, EXPIRY_MAX = 1.0, 300.0
#: Heartbeats per expiry. By default, one every 2 s, which is 0.5 PUT/s.
HEARTBEATS: Final = 4
#: Fraction of the expiry after which the active server no longer trusts its own lease.
TRUST: Final = 0.75
#: Longest pause, in seconds, between a standby's checks of the lease.
LOOK_MAX: Final = 1.0
#: The format version that this version writes, and the newest that it reads.
VERSION: Final = 1
#: Maximum bytes of a name that are shown.
_NAME_MAX = 200


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The server named by a lease."""

    #: Unique to each start of a server: two servers with one name are two owners.
    id: str
    #: Shown to people.
    name: str
    process: int
    #: Lets a process on the same machine recognize that this one has ended: see `process_identity`.
    evidence: str = ""

    def __str__(self) -> str:
        shown = "".join(each if each.isprintable() else "?" for each in self.name[:_NAME_MAX])
        return f"{shown} (process {self.process})"


class StoreLease(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the lease object."""

    owner: LeaseOwner
    #: How often the owner has written the object.
    sequence: int
    #: Seconds for which a version may remain unchanged, as promised by the owner.
    expiry: float
    #: Whether the owner has closed the store and released the lease.
    released: bool = False
    version: int = VERSION


class _AnyVersion(msgspec.Struct):
    version: int


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(StoreLease)
_ANY_VERSION = msgspec.json.Decoder(_AnyVersion)


def encode_lease(lease: StoreLease) -> bytes:
    """Return the bytes of the lease object."""
    return _ENCODER.encode(lease)


def decode_lease(data: bytes) -> StoreLease:
    """Decode the lease object's bytes.

    Raises DataCorruptError if they are not a lease, and FormatUnsupportedError if a newer version
    wrote them.
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
    """Measures how long a standby has seen the same version of the lease."""

    def __init__(self) -> None:
        self._etag: str | None = None
        self._since: float | None = None
        #: Whether the lease was ever observed.
        self.has_looked = False

    def observe(self, etag: str | None, now: float, age: float = 0.0) -> None:
        """Record the etag seen at `now`, or None if there is no object.

        A version not seen before is already `age` seconds old.
        """
        self.has_looked = True
        if self._since is None or etag != self._etag:
            self._etag, self._since = etag, now - age

    def lose_sight(self) -> None:
        """Restart the measurement: while storage is unreachable, the active server cannot renew."""
        self._since = None

    def unchanged(self, now: float) -> float:
        """Return for how many seconds the version has not changed."""
        return 0.0 if self._since is None else now - self._since
