"""Access tokens and their scopes. What a caller may do with one is in `grants`.

A token allows the operations of its groups and those it names one by one, on the resources that its
sets cover. A set that is not given covers nothing.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field
from typing import Final

from streamfold.errors import InvalidError

#: Bytes of UTF-8 in the id of an access token.
TOKEN_ID_MAX = 96
#: The prefix of every secret, so that a leaked one is recognized.
SECRET_PREFIX: Final = "sf_"  # noqa: S105 - how secrets begin, not one


class Operation(enum.StrEnum):
    """The operations that a token may allow."""

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


#: The operations of each group, first those that read, then those that write. Reconfiguring a basin
#: is in two: an account's writer may do it to any basin, a basin's writer to that one.
GROUP_OPERATIONS: Final[dict[Group, tuple[frozenset[Operation], frozenset[Operation]]]] = {
    Group.ACCOUNT: (
        frozenset(
            {
                Operation.LIST_BASINS,
                Operation.LIST_ACCESS_TOKENS,
                Operation.ACCOUNT_METRICS,
                Operation.LIST_LOCATIONS,
                Operation.GET_DEFAULT_LOCATION,
            }
        ),
        frozenset(
            {
                Operation.CREATE_BASIN,
                Operation.DELETE_BASIN,
                Operation.RECONFIGURE_BASIN,
                Operation.ISSUE_ACCESS_TOKEN,
                Operation.REVOKE_ACCESS_TOKEN,
                Operation.SET_DEFAULT_LOCATION,
            }
        ),
    ),
    Group.BASIN: (
        frozenset({Operation.GET_BASIN_CONFIG, Operation.LIST_STREAMS, Operation.BASIN_METRICS}),
        frozenset(
            {
                Operation.CREATE_STREAM,
                Operation.DELETE_STREAM,
                Operation.RECONFIGURE_STREAM,
                Operation.RECONFIGURE_BASIN,
            }
        ),
    ),
    Group.STREAM: (
        frozenset(
            {
                Operation.GET_STREAM_CONFIG,
                Operation.CHECK_TAIL,
                Operation.READ,
                Operation.STREAM_METRICS,
            }
        ),
        frozenset({Operation.APPEND, Operation.TRIM, Operation.FENCE}),
    ),
}


@dataclass(frozen=True, slots=True)
class ResourceSet:
    """Names: exactly one, or all that begin with a prefix."""

    text: str = ""
    is_prefix: bool = False

    @classmethod
    def exact(cls, name: str) -> ResourceSet:
        """The set of one name; "" gives the empty set, because no name is empty."""
        return cls(name)

    @classmethod
    def prefix(cls, prefix: str) -> ResourceSet:
        """All names that begin with `prefix`; every name does with ""."""
        return cls(prefix, is_prefix=True)

    def contains(self, name: str) -> bool:
        if self.is_prefix:
            return name.startswith(self.text)
        return bool(self.text) and name == self.text

    def meets(self, prefix: str) -> bool:
        """Whether a name that begins with `prefix` can be in this set."""
        if self.is_prefix and prefix.startswith(self.text):
            return True
        return self != NOTHING and self.text.startswith(prefix)

    def covers(self, other: ResourceSet) -> bool:
        """Whether every name in `other` is in this set."""
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

    def operations(self, group: Group) -> frozenset[Operation]:
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
    ops: frozenset[Operation] = frozenset()

    @property
    def operations(self) -> frozenset[Operation]:
        """Every allowed operation, by its group or by name."""
        return self.ops.union(
            self.op_groups.account.operations(Group.ACCOUNT),
            self.op_groups.basin.operations(Group.BASIN),
            self.op_groups.stream.operations(Group.STREAM),
        )


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token as requested and as listed, without its secret."""

    id: str
    scope: Scope
    #: Names of streams in requests get the prefix of `scope.streams`, names in listings lose it.
    auto_prefix_streams: bool = False
    #: Milliseconds since the Unix epoch; never, if None.
    expires_at: int | None = None
    #: The same as given (RFC 3339): perhaps more exact, and in another time zone.
    expires_at_text: str | None = None

    def expired(self, now: int) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Secret:
    """The secret that proves a token; its repr hides it, so that it is never logged."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return repr(self)

    @property
    def digest(self) -> bytes:
        """SHA-256. A secret is random and long, so that a slow hash would not protect it better."""
        return hashlib.sha256(self.text.encode(errors="replace")).digest()


def parse_token_id(text: str) -> str:
    """Return `text` as the id of an access token, or refuse it with the rule it breaks."""
    if text in ("", ".", ".."):
        raise InvalidError(f"access token id {text!r} is not allowed: it may not be empty, . or ..")
    return parse_token_id_prefix(text, what="access token id")


def parse_token_id_prefix(text: str, what: str = "access token prefix") -> str:
    """Return `text` as a prefix or lower bound of access token ids; it may be empty."""
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
