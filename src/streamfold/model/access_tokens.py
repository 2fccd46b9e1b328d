"""Access tokens and their scopes. `grants` decides what a caller may do with one.

A token allows the operations of its groups, and single named operations, on the resources in its sets.
An omitted set is empty.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Final

from streamfold.errors import InvalidError

#: Maximum bytes of UTF-8 in an access token's id.
TOKEN_ID_MAX = 96
#: Prefix of every secret, which makes leaked secrets recognizable.
SECRET_PREFIX: Final = "sf_"  # noqa: S105 - how secrets begin, not one


class Right(enum.StrEnum):
    """A right that a token may carry: the name of one of S2's operations."""

    LIST_BASINS = "list-basins"
    CREATE_BASIN = "create-basin"
    DELETE_BASIN = "delete-basin"
    RECONFIGURE_BASIN = "reconfigure-basin"
    GET_BASIN_CONFIG = "get-basin-config"
    ISSUE_ACCESS_TOKEN = "issue-access-token"  # noqa: S105 - an operation, not a secret
    REVOKE_ACCESS_TOKEN = "revoke-access-token"  # noqa: S105
    LIST_ACCESS_TOKENS = "list-access-tokens"
    LIST_STREAMS = "list-streams"
    CREATE_STREAM = "create-stream"
    DELETE_STREAM = "delete-stream"
    GET_STREAM_CONFIG = "get-stream-config"
    RECONFIGURE_STREAM = "reconfigure-stream"
    CHECK_TAIL = "check-tail"
    APPEND = "append"
    READ = "read"
    TRIM = "trim"
    FENCE = "fence"
    ACCOUNT_METRICS = "account-metrics"
    BASIN_METRICS = "basin-metrics"
    STREAM_METRICS = "stream-metrics"
    LIST_LOCATIONS = "list-locations"
    GET_DEFAULT_LOCATION = "get-default-location"
    SET_DEFAULT_LOCATION = "set-default-location"


class Group(enum.StrEnum):
    """The group of an operation."""

    ACCOUNT = "account"
    BASIN = "basin"
    STREAM = "stream"


#: The operations of each group, reads first, then writes. Reconfiguring a basin is in two groups:
#: an account's writer may reconfigure any basin, a basin's writer only its own.
GROUP_OPERATIONS: Final[dict[Group, tuple[frozenset[Right], frozenset[Right]]]] = {
    Group.ACCOUNT: (
        frozenset(
            {
                Right.LIST_BASINS,
                Right.LIST_ACCESS_TOKENS,
                Right.ACCOUNT_METRICS,
                Right.LIST_LOCATIONS,
                Right.GET_DEFAULT_LOCATION,
            }
        ),
        frozenset(
            {
                Right.CREATE_BASIN,
                Right.DELETE_BASIN,
                Right.RECONFIGURE_BASIN,
                Right.ISSUE_ACCESS_TOKEN,
                Right.REVOKE_ACCESS_TOKEN,
                Right.SET_DEFAULT_LOCATION,
            }
        ),
    ),
    Group.BASIN: (
        frozenset({Right.GET_BASIN_CONFIG, Right.LIST_STREAMS, Right.BASIN_METRICS}),
        frozenset(
            {
                Right.CREATE_STREAM,
                Right.DELETE_STREAM,
                Right.RECONFIGURE_STREAM,
                Right.RECONFIGURE_BASIN,
            }
        ),
    ),
    Group.STREAM: (
        frozenset(
            {
                Right.GET_STREAM_CONFIG,
                Right.CHECK_TAIL,
                Right.READ,
                Right.STREAM_METRICS,
            }
        ),
        frozenset({Right.APPEND, Right.TRIM, Right.FENCE}),
    ),
}


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """A set of names: exactly one, or all with a prefix."""

    text: str = ""
    is_prefix: bool = False

    @classmethod
    def exact(cls, name: str) -> ResourceSet:
        """Return the set of one name. "" gives the empty set, because no name is empty."""
        return cls(name)

    @classmethod
    def prefix(cls, prefix: str) -> ResourceSet:
        """Return the set of all names with a prefix. "" gives the set of all names."""
        return cls(prefix, is_prefix=True)

    def contains(self, name: str) -> bool:
        if self.is_prefix:
            return name.startswith(self.text)
        return bool(self.text) and name == self.text

    def meets(self, prefix: str) -> bool:
        """Return whether any name with this prefix can be in the set."""
        if self.is_prefix and prefix.startswith(self.text):
            return True
        return self != NOTHING and self.text.startswith(prefix)

    def covers(self, other: ResourceSet) -> bool:
        """Return whether this set contains all of `other`."""
        if other == NOTHING:
            return True
        if other.is_prefix and not self.is_prefix:
            return False
        return self.contains(other.text)


NOTHING: Final = ResourceSet()
EVERYTHING: Final = ResourceSet.prefix("")


@dataclass(frozen=True, slots=True)
class Permission:
    """Which half of a group's operations is allowed."""

    read: bool = False
    write: bool = False

    def operations(self, group: Group) -> frozenset[Right]:
        reading, writing = GROUP_OPERATIONS[group]
        return (reading if self.read else frozenset()) | (writing if self.write else frozenset())


_NEITHER: Final = Permission()


@dataclass(frozen=True, slots=True)
class OperationGroups:
    account: Permission = _NEITHER
    basin: Permission = _NEITHER
    stream: Permission = _NEITHER


@dataclass(frozen=True, slots=True)
class Scope:
    """The operations and resources that a token allows."""

    basins: ResourceSet = NOTHING
    streams: ResourceSet = NOTHING
    access_tokens: ResourceSet = NOTHING
    op_groups: OperationGroups = OperationGroups()
    ops: frozenset[Right] = frozenset()

    @property
    def operations(self) -> frozenset[Right]:
        """All allowed operations, by group or by name."""
        return self.ops.union(
            self.op_groups.account.operations(Group.ACCOUNT),
            self.op_groups.basin.operations(Group.BASIN),
            self.op_groups.stream.operations(Group.STREAM),
        )


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token without its secret, as requested and listed."""

    id: str
    scope: Scope
    #: Whether stream names in requests get the prefix of `scope.streams`, and lose it in listings.
    auto_prefix_streams: bool = False
    #: Milliseconds since the Unix epoch, or None for never.
    expires_at: int | None = None
    #: The same as requested (RFC 3339), possibly more exact and in another time zone.
    expires_at_text: str | None = None

    def expired(self, now: int) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Secret:
    """A token's secret. Its repr hides it, so that it is never logged."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return repr(self)

    @property
    def digest(self) -> bytes:
        """SHA-256 of the secret, which is random and long, so a slow hash would add nothing."""
        return hashlib.sha256(self.text.encode(errors="replace")).digest()


def parse_token_id(text: str) -> str:
    """Return `text` as an access token id. Raises InvalidError with the rule it breaks."""
    if text in ("", ".", ".."):
        raise InvalidError(f"access token id {text!r} is not allowed: it may not be empty, . or ..")
    return parse_token_id_prefix(text, what="access token id")


def parse_token_id_prefix(text: str, what: str = "access token prefix") -> str:
    """Return `text` as a prefix or lower bound of access token ids. It may be empty."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidError(f"{what} {text[:TOKEN_ID_MAX]!r} is not valid Unicode text") from None
    if size > TOKEN_ID_MAX or "\0" in text:
        raise InvalidError(
            f"{what} {text[:TOKEN_ID_MAX]!r} must have at most {TOKEN_ID_MAX} bytes of UTF-8 "
            "without NUL"
        )
    return text
