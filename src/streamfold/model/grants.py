"""A caller's permissions as pure logic, without I/O or clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from streamfold.errors import InvalidError, PermissionDeniedError
from streamfold.model.access_tokens import EVERYTHING, NOTHING, AccessToken, ResourceSet, Right
from streamfold.model.names import StreamName, parse_stream_name
from streamfold.model.resources import BasinInfo, Page, StreamInfo

_ON_BASIN: Final = frozenset(
    {
        Right.CREATE_BASIN,
        Right.DELETE_BASIN,
        Right.RECONFIGURE_BASIN,
        Right.GET_BASIN_CONFIG,
        Right.LIST_STREAMS,
        Right.BASIN_METRICS,
    }
)
_ON_STREAM: Final = frozenset(
    {
        Right.CREATE_STREAM,
        Right.DELETE_STREAM,
        Right.GET_STREAM_CONFIG,
        Right.RECONFIGURE_STREAM,
        Right.CHECK_TAIL,
        Right.APPEND,
        Right.READ,
        Right.TRIM,
        Right.FENCE,
        Right.STREAM_METRICS,
    }
)
_ON_TOKEN: Final = frozenset({Right.ISSUE_ACCESS_TOKEN, Right.REVOKE_ACCESS_TOKEN})

Item = TypeVar("Item")


class Listing(NamedTuple):
    """The range to list in the store, so that a page shows only what the caller may see."""

    prefix: str
    start_after: str
    limit: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A caller's rights: operations on resources, until some time.

    All names are full. `full_stream_name` expands the names of an auto-prefixed caller.
    """

    operations: frozenset[Right]
    basins: ResourceSet = NOTHING
    streams: ResourceSet = NOTHING
    access_tokens: ResourceSet = NOTHING
    #: Prepended to stream names from the caller, and removed from names shown to it.
    stream_prefix: str = ""
    #: Milliseconds since the Unix epoch, or None for never.
    expires_at: int | None = None
    #: The access token that grants it, if any.
    token_id: str | None = None

    @classmethod
    def of(cls, token: AccessToken) -> Grant:
        """Return the token's rights. Raises InvalidError if there are none or they conflict."""
        scope = token.scope
        if not scope.operations:
            raise InvalidError(
                f"access token {token.id!r} would allow no operation: give ops or op_groups"
            )
        if token.auto_prefix_streams and not scope.streams.is_prefix:
            raise InvalidError(
                f"access token {token.id!r} has auto_prefix_streams and no prefix of streams: "
                "give scope.streams.prefix"
            )
        return cls(
            operations=scope.operations,
            basins=scope.basins,
            streams=scope.streams,
            access_tokens=scope.access_tokens,
            stream_prefix=scope.streams.text if token.auto_prefix_streams else "",
            expires_at=token.expires_at,
            token_id=token.id,
        )

    def allows(
        self,
        operation: Right,
        basin: str | None = None,
        stream: str | None = None,
        token_id: str | None = None,
    ) -> bool:
        """Return whether the operation is allowed on the named resources.

        A resource that the operation needs must be named, and every named resource must be covered,
        even if the operation does not need it.
        """
        needs_basin = operation in _ON_BASIN or operation in _ON_STREAM
        return (
            operation in self.operations
            and _covered(self.basins, basin, needed=needs_basin)
            and _covered(self.streams, stream, needed=operation in _ON_STREAM)
            and _covered(self.access_tokens, token_id, needed=operation in _ON_TOKEN)
        )

    def allowed_streams(self, operation: Right, basin: str) -> ResourceSet:
        """Return the streams of a basin on which a stream operation is allowed."""
        allowed = operation in self.operations and self.basins.contains(basin)
        return self.streams if allowed else NOTHING

    def allows_somewhere(self, operation: Right, basin: str | None = None) -> bool:
        """Return whether the operation is allowed on any resource, in `basin` if given."""
        needed = (
            (self.basins, operation in _ON_BASIN or operation in _ON_STREAM),
            (self.streams, operation in _ON_STREAM),
            (self.access_tokens, operation in _ON_TOKEN),
        )
        return (
            operation in self.operations
            and (basin is None or self.basins.contains(basin))
            and all(resources != NOTHING for resources, is_needed in needed if is_needed)
        )

    def require(
        self,
        operation: Right,
        basin: str | None = None,
        stream: str | None = None,
        token_id: str | None = None,
    ) -> None:
        """Raise PermissionDeniedError unless `allows`. The message uses the caller's own names."""
        if self.allows(operation, basin, stream, token_id):
            return
        asked = None if stream is None else stream.removeprefix(self.stream_prefix)
        named = {"basin": basin, "stream": asked, "access token": token_id}
        about = ", ".join(f"{kind} {name!r}" for kind, name in named.items() if name is not None)
        raise PermissionDeniedError(
            f"this access token does not allow {operation}{' on ' if about else ''}{about}"
        )

    def allows_some(self, operation: Right, basin: str, stream_prefix: str) -> bool:
        """Return whether the operation is allowed on any possible stream with this prefix."""
        allowed = operation in self.operations and self.basins.contains(basin)
        return allowed and self.streams.meets(stream_prefix)

    def covers(self, other: Grant) -> bool:
        """Return whether this allows everything that `other` allows, for at least as long."""
        return (
            other.operations <= self.operations
            and self.basins.covers(other.basins)
            and self.streams.covers(other.streams)
            and self.access_tokens.covers(other.access_tokens)
            and _not_later(other.expires_at, self.expires_at)
        )

    def issue(self, token: AccessToken) -> AccessToken:
        """Return `token` as this caller may issue it. By default it expires with the caller's own.

        Raises PermissionDeniedError if it would allow more than the caller may do.
        """
        if token.expires_at is None:
            token = replace(token, expires_at=self.expires_at)
        grant = Grant.of(token)
        self.require(Right.ISSUE_ACCESS_TOKEN, token_id=token.id)
        if not self.covers(grant):
            raise PermissionDeniedError(
                f"access token {token.id!r} would allow more than its issuer's: ask for "
                "operations and resources that are within its own, and for no later expiry"
            )
        return token

    # Names from the caller's point of view.

    def full_stream_name(self, name: str) -> StreamName:
        """Return the full name of the caller's stream `name`."""
        return parse_stream_name(self.stream_prefix + name)

    def visible_stream_name(self, operation: Right, basin: str, stream: str) -> str | None:
        """Return the caller's name for a stream, or None if the operation is not allowed on it."""
        if not self.allows(operation, basin, stream):
            return None
        # A stream of just the prefix has no name that the caller could use.
        return stream.removeprefix(self.stream_prefix) or None

    def list_basins(self, prefix: str, start_after: str, limit: int) -> Listing | None:
        """Return the basins to list for the caller, or None if it may see none."""
        return _narrow(self.basins, Listing(prefix, start_after, limit))

    def list_streams(self, prefix: str, start_after: str, limit: int) -> Listing | None:
        """Return the streams to list for the caller, or None if it may see none."""
        # With an auto-prefix, even the first page starts after the prefix itself: a stream of that
        # name has no name that the caller could use.
        asked = Listing(self.stream_prefix + prefix, self.stream_prefix + start_after, limit)
        return _narrow(self.streams, asked)

    def list_access_tokens(self, prefix: str, start_after: str, limit: int) -> Listing | None:
        """Return the tokens to list for the caller, or None if it may see none."""
        return _narrow(self.access_tokens, Listing(prefix, start_after, limit))

    def show_basins(self, page: Page[BasinInfo]) -> Page[BasinInfo]:
        return _visible(self.basins, page, lambda basin: basin.name)

    def show_streams(self, page: Page[StreamInfo]) -> Page[StreamInfo]:
        """Return the page with the caller's names."""
        page = _visible(self.streams, page, lambda stream: stream.name)
        if not self.stream_prefix:
            return page
        return replace(page, items=tuple(map(self._stripped, page.items)))

    def show_access_tokens(self, page: Page[AccessToken]) -> Page[AccessToken]:
        return _visible(self.access_tokens, page, lambda token: token.id)

    def _stripped(self, stream: StreamInfo) -> StreamInfo:
        return replace(stream, name=StreamName(stream.name.removeprefix(self.stream_prefix)))


#: All rights, forever: the server's owner, and every caller if nothing is enforced.
ROOT: Final = Grant(frozenset(Right), EVERYTHING, EVERYTHING, EVERYTHING)

#: No rights: a revoked or expired token.
NO_RIGHTS: Final = Grant(frozenset())


def _covered(resources: ResourceSet, name: str | None, *, needed: bool) -> bool:
    return not needed if name is None else resources.contains(name)


def _not_later(expiry: int | None, bound: int | None) -> bool:
    return bound is None or (expiry is not None and expiry <= bound)


def _narrow(resources: ResourceSet, asked: Listing) -> Listing | None:
    """Return the part of `asked` that is in `resources`, or None."""
    if resources.is_prefix:
        if asked.prefix.startswith(resources.text):
            return asked
        inside = resources.text.startswith(asked.prefix)
        return asked._replace(prefix=resources.text) if inside else None
    # A name sorts first among names that begin with it, so a page of one shows it if it exists.
    listed = resources.text.startswith(asked.prefix) and resources != NOTHING
    # UTF-8 sorts like its code points, so comparing text compares bytes.
    if not listed or asked.start_after >= resources.text:
        return None
    return Listing(resources.text, asked.start_after, limit=1)


def _visible(
    resources: ResourceSet, page: Page[Item], name_of: Callable[[Item], str]
) -> Page[Item]:
    items = tuple(item for item in page.items if resources.contains(name_of(item)))
    return Page(items, page.has_more and resources.is_prefix)
