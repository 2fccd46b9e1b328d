"""The map of the S2 face."""

from __future__ import annotations

from streamfold.model.access import Secret
from streamfold.server.gate import Gate
from streamfold.server.instruments import AppendInstruments
from streamfold.server.router import Router
from streamfold.server.s2.access import Access
from streamfold.server.s2.account import Account
from streamfold.server.s2.appends import Appends
from streamfold.server.s2.basins import Basins
from streamfold.server.s2.locations import Locations
from streamfold.server.s2.read_session import Followers
from streamfold.server.s2.records import Records
from streamfold.server.s2.streams import Streams
from streamfold.store.store import StreamStore


def add_s2(
    router: Router,
    store: StreamStore,
    gate: Gate,
    instruments: AppendInstruments,
    heartbeat: tuple[float, float],
    root_token: Secret | None,
    location: str,
) -> None:
    """Route everything below /v1."""
    appends, followers = Appends(store, instruments), Followers(store, gate, heartbeat)
    access, locations = Access(store.account, store.usage, root_token), Locations(location)
    _add_records(router, Records(store, access, gate, appends, followers))
    _add_streams(router, Streams(store, access))
    _add_basins(router, Basins(store, access, locations))
    _add_account(router, Account(store.account, access, locations))


def _add_records(router: Router, records: Records) -> None:
    path = "/v1/streams/{}/records"
    router.add("POST", path, records.append)
    router.add("GET", path, records.read)
    router.add("GET", f"{path}/tail", records.tail)


def _add_streams(router: Router, streams: Streams) -> None:
    router.add("GET", "/v1/streams", streams.list)
    router.add("POST", "/v1/streams", streams.create)
    path = "/v1/streams/{}"
    router.add("GET", path, streams.config)
    router.add("PUT", path, streams.ensure)
    router.add("PATCH", path, streams.reconfigure)
    router.add("DELETE", path, streams.delete)


def _add_basins(router: Router, basins: Basins) -> None:
    router.add("GET", "/v1/basins", basins.list)
    router.add("POST", "/v1/basins", basins.create)
    path = "/v1/basins/{}"
    router.add("GET", path, basins.config)
    router.add("PUT", path, basins.ensure)
    router.add("PATCH", path, basins.reconfigure)
    router.add("DELETE", path, basins.delete)


def _add_account(router: Router, account: Account) -> None:
    tokens = "/v1/access-tokens"
    router.add("GET", tokens, account.list_tokens)
    router.add("POST", tokens, account.issue_token)
    router.add("DELETE", f"{tokens}/{{}}", account.revoke_token)
    router.add("GET", "/v1/locations", account.list_locations)
    router.add("GET", "/v1/locations/default", account.default_location)
    router.add("PUT", "/v1/locations/default", account.set_default_location)
    router.add("GET", "/v1/metrics", account.account_metrics)
    router.add("GET", "/v1/metrics/{}", account.basin_metrics)
    router.add("GET", "/v1/metrics/{}/{}", account.stream_metrics)
