"""Resolves the hosts of webhooks, so that a name server that never answers delays one owner alone.

The system's resolver cannot be interrupted. Each lookup has a thread of its own, and its slot is free
only when that thread ends, however long ago the caller gave up.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final, TypeAlias

from streamfold.server.durable_streams.subscriptions.owner_slots import OwnerSlots

#: Lookups under way at once: each is a thread.
LOOKUPS_MAX: Final = 16
#: Those of one access token; and of root, which stands for all clients of a server without --auth.
LOOKUPS_PER_OWNER: Final = 2
LOOKUPS_OF_ROOT: Final = 8
#: Seconds that a delivery waits for a slot and the answer.
LOOKUP_TIMEOUT: Final = 5.0
#: Seconds for which a host that could not be resolved is not looked up again for the same owner.
FAILURE_KEPT: Final = 5.0
#: Such hosts that are remembered.
_FAILURES_MAX: Final = 1_000
#: Resolved without a lookup, as RFC 6761 has it.
_LOCALHOST: Final = "localhost"

#: Blocks until it has the addresses of a host and port, as text; OSError if there are none.
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int, flags: int = 0) -> list[str]:
    """The addresses that the machine's resolver gives."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"{host[:80]!r} cannot be a host's name: {error}") from error
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def literal_addresses(host: str, port: int) -> Sequence[str]:
    """The addresses that a host is known to have without asking a name server; none for a name."""
    if host == _LOCALHOST:
        return ("127.0.0.1", "::1")
    try:
        return resolve(host, port, socket.AI_NUMERICHOST)
    except OSError:
        return ()


class HostLookups:
    """Looks hosts up in threads, few at a time for each owner."""

    def __init__(self, look_up: Resolve = resolve) -> None:
        self._look_up = look_up
        self._slots = OwnerSlots(LOOKUPS_MAX, LOOKUPS_PER_OWNER, LOOKUPS_OF_ROOT)
        #: Until when, by the monotonic clock, an owner's host is not looked up again; oldest first.
        self._failures: dict[tuple[str | None, str], float] = {}

    async def addresses(self, owner: str | None, host: str, port: int) -> Sequence[str]:
        """The host's addresses; OSError (TimeoutError among them) if there are none in time."""
        known = literal_addresses(host, port)
        if known:
            return known
        if self._failures.get((owner, host), 0.0) > monotonic():
            raise OSError(f"{host[:80]!r} could not be resolved less than {FAILURE_KEPT:g} s ago")
        async with asyncio.timeout(LOOKUP_TIMEOUT):
            release = await self._slots.take(owner)
            try:
                return await self._start(host, port, release)
            except (OSError, asyncio.CancelledError):
                self._remember_failure(owner, host)
                raise

    def _start(
        self, host: str, port: int, release: Callable[[], None]
    ) -> asyncio.Future[Sequence[str]]:
        """Look a host up in a thread, which is a daemon so that it does not delay the process's end."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Sequence[str]] = loop.create_future()

        def finish(found: Sequence[str] | OSError) -> None:
            release()
            if answer.done():
                return  # the caller gave up
            if isinstance(found, OSError):
                answer.set_exception(found)
            else:
                answer.set_result(found)

        def run() -> None:
            found: Sequence[str] | OSError = OSError(f"the lookup of {host[:80]!r} failed")
            try:
                found = self._look_up(host, port)
            except OSError as error:
                found = error
            finally:
                with suppress(RuntimeError):  # the loop is closed: no caller is left
                    loop.call_soon_threadsafe(finish, found)

        try:
            threading.Thread(target=run, name="webhook-lookup", daemon=True).start()
        except RuntimeError as error:
            finish(OSError(f"no thread for the lookup of {host[:80]!r}: {error}"))
        return answer

    def _remember_failure(self, owner: str | None, host: str) -> None:
        self._failures.pop((owner, host), None)
        self._failures[owner, host] = monotonic() + FAILURE_KEPT
        if len(self._failures) > _FAILURES_MAX:
            del self._failures[next(iter(self._failures))]
