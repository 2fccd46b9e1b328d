"""Access tokens and usage, which belong to the account rather than to a basin."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeVar

from streamfold.errors import BasinNotFoundError, InvalidError, StreamNotFoundError
from streamfold.model import names
from streamfold.model.access_tokens import (
    AccessToken,
    Secret,
    parse_token_id,
    parse_token_id_prefix,
)
from streamfold.model.grants import ROOT, Grant
from streamfold.model.metrics import (
    AccountMetrics,
    BasinMetrics,
    Interval,
    Metric,
    StreamMetrics,
    parse_span,
)
from streamfold.model.names import StreamRef
from streamfold.model.resources import Page
from streamfold.store.catalog.access_tokens import new_secret
from streamfold.store.catalog.listing import LIST_MAX
from streamfold.store.supervisor import Supervisor
from streamfold.store.usage.recorder import ACCOUNT
from streamfold.store.usage.report import UsageReport

Choice = TypeVar("Choice", bound=enum.StrEnum)


class Account:
    """A store's access tokens and usage. Available as `StreamStore.account`."""

    def __init__(self, supervisor: Supervisor, now: Callable[[], int]) -> None:
        self._supervisor = supervisor
        self._now = now

    async def authenticate(self, secret: Secret) -> Grant:
        """Return the rights of a caller that presents `secret`.

        Raises UnauthenticatedError if it has none.
        """
        mounted = self._supervisor.current or await self._supervisor.mounted()
        return await mounted.tokens.authenticate(secret)

    async def grant_of(self, token_id: str) -> Grant:
        """Return the current rights of the token, or NO_RIGHTS if it is unknown or expired."""
        return await (await self._supervisor.mounted()).tokens.grant_of(token_id)

    async def issue_access_token(
        self,
        token: AccessToken,
        issuer: Grant = ROOT,
        *,
        make_secret: Callable[[], Secret] = new_secret,
    ) -> Secret:
        """Issue a token with at most the rights of `issuer`. The secret is returned only here.

        `make_secret` is for tests.
        """
        parse_token_id(token.id)
        tokens = (await self._supervisor.mounted()).tokens
        return await tokens.issue(token, issuer, make_secret=make_secret)

    async def revoke_access_token(self, token_id: str) -> None:
        """Revoke the token. Once this returns, its secret is rejected."""
        await (await self._supervisor.mounted()).tokens.revoke(parse_token_id(token_id))

    async def list_access_tokens(
        self, *, prefix: str = "", start_after: str = "", limit: int = LIST_MAX
    ) -> Page[AccessToken]:
        """List tokens in byte order of their ids. A limit of 0 or above 1000 means 1000."""
        prefix, start_after = parse_token_id_prefix(prefix), parse_token_id_prefix(start_after)
        return await (await self._supervisor.mounted()).tokens.page(prefix, start_after, limit)

    async def account_metrics(
        self, metric_set: str, start: int | None, end: int | None, interval: Interval | None = None
    ) -> tuple[Metric, ...]:
        """Return the usage of the whole account from `start` to `end`, in Unix seconds."""
        chosen = _choose(AccountMetrics, metric_set)
        bills = chosen is AccountMetrics.ESTIMATED_BILLABLE_USAGE
        if bills and interval is Interval.MINUTE:
            raise InvalidError("usage is billed by the hour: choose the interval hour or day")
        span = parse_span(start, end, self._seconds())
        report = await self._report()
        if chosen is AccountMetrics.ACTIVE_BASINS:
            return await report.active_basins(span)
        if bills:
            return report.bill(span, interval)
        return await report.amounts(ACCOUNT, chosen, span, interval)

    async def basin_metrics(
        self,
        basin: str,
        metric_set: str,
        start: int | None,
        end: int | None,
        interval: Interval | None = None,
    ) -> tuple[Metric, ...]:
        """Return a basin's usage. Storage is only available by the hour."""
        name = names.parse_bucket_name(basin)
        chosen = _choose(BasinMetrics, metric_set)
        if chosen is BasinMetrics.STORAGE:
            _check_interval("basin", interval, Interval.HOUR)
        span = parse_span(start, end, self._seconds())
        if await (await self._supervisor.mounted()).mount.basin(name) is None:
            raise BasinNotFoundError(name)
        report = await self._report()
        if chosen is BasinMetrics.STORAGE:
            return await report.basin_storage(name, span)
        return await report.amounts(name, chosen, span, interval)

    async def stream_metrics(
        self,
        basin: str,
        stream: str,
        metric_set: str,
        start: int | None,
        end: int | None,
        interval: Interval | None = None,
    ) -> tuple[Metric, ...]:
        """Return a stream's usage. Storage is only available by the minute."""
        ref = StreamRef.parse(basin, stream)
        _choose(StreamMetrics, metric_set)
        _check_interval("stream", interval, Interval.MINUTE)
        span = parse_span(start, end, self._seconds())
        mount = (await self._supervisor.mounted()).mount
        if (row := await mount.stream(ref)) is None:
            if await mount.basin(ref.basin) is None:
                raise BasinNotFoundError(ref.basin)
            raise StreamNotFoundError(*ref)
        return await (await self._report()).stream_storage(row, span)

    async def _report(self) -> UsageReport:
        mounted = await self._supervisor.mounted()
        return UsageReport(mounted.mount, mounted.usage, self._seconds())

    def _seconds(self) -> int:
        return self._now() // 1000


def _check_interval(owner: str, asked: Interval | None, measured: Interval) -> None:
    if asked not in (None, measured):
        raise InvalidError(
            f"interval {str(asked)!r} is not kept for the storage of a {owner}: choose {measured}, or "
            "leave it out"
        )


def _choose(choices: type[Choice], text: str) -> Choice:
    try:
        return choices(text)
    except ValueError:
        raise InvalidError(
            f"metric set {text[:40]!r} is unknown: choose from {', '.join(choices)}"
        ) from None
