"""What callers may do, delegate and see."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.errors import InvalidError, PermissionDeniedError
from streamfold.model.access_tokens import (
    EVERYTHING,
    NOTHING,
    AccessToken,
    OperationGroups,
    Permission,
    ResourceSet,
    Right,
    Scope,
)
from streamfold.model.grants import ROOT, Grant, Listing
from streamfold.model.names import BasinName, StreamName
from streamfold.model.resources import BasinInfo, Page, StreamInfo

exact, prefix = ResourceSet.exact, ResourceSet.prefix


def scope(*operations: Right, streams: ResourceSet = EVERYTHING) -> Scope:
    return Scope(EVERYTHING, streams, EVERYTHING, ops=frozenset(operations))


def issuer(expires_at: int | None = None, streams: ResourceSet = EVERYTHING) -> Grant:
    return replace(ROOT, expires_at=expires_at, streams=streams)


@pytest.mark.parametrize(
    ("operation", "resources", "allowed"),
    [
        (Right.READ, {"basin": "basin-a", "stream": "s/1"}, True),
        (Right.READ, {"basin": "basin-a", "stream": "t/1"}, False),
        (Right.READ, {"basin": "basin-b", "stream": "s/1"}, False),
        (Right.READ, {"basin": "basin-a"}, False),
        (Right.READ, {"stream": "s/1"}, False),
        (Right.READ, {}, False),
        (Right.APPEND, {"basin": "basin-a", "stream": "s/1"}, False),
        (Right.LIST_STREAMS, {"basin": "basin-a"}, True),
        (Right.LIST_STREAMS, {"basin": "basin-b"}, False),
        (Right.LIST_BASINS, {}, True),
        (Right.LIST_BASINS, {"basin": "basin-b"}, False),
        (Right.REVOKE_ACCESS_TOKEN, {"token_id": "mine"}, True),
        (Right.REVOKE_ACCESS_TOKEN, {"token_id": "yours"}, False),
        (Right.REVOKE_ACCESS_TOKEN, {}, False),
    ],
)
def test_an_operation_is_allowed_on_what_is_covered(
    operation: Right, resources: dict[str, str], allowed: bool
) -> None:
    grant = Grant(frozenset(Right) - {Right.APPEND}, exact("basin-a"), prefix("s/"), exact("mine"))
    assert grant.allows(operation, **resources) is allowed
    if not allowed:
        with pytest.raises(PermissionDeniedError, match=operation):
            grant.require(operation, **resources)


@pytest.mark.parametrize("operation", Right)
def test_root_may_do_everything(operation: Right) -> None:
    assert ROOT.allows(operation, "any-basin", "any stream", "any token")


def test_a_token_without_operations_is_refused() -> None:
    with pytest.raises(InvalidError, match="no operation"):
        ROOT.issue(AccessToken("t", Scope(EVERYTHING, EVERYTHING, EVERYTHING)))


@pytest.mark.parametrize("streams", [NOTHING, exact("a")])
def test_an_auto_prefix_needs_a_prefix(streams: ResourceSet) -> None:
    token = AccessToken("t", scope(Right.READ, streams=streams), auto_prefix_streams=True)
    with pytest.raises(InvalidError, match="prefix"):
        ROOT.issue(token)


def test_a_token_expires_with_its_issuer_unless_it_says_when() -> None:
    token = AccessToken("t", scope(Right.READ))
    assert ROOT.issue(token).expires_at is None
    assert issuer(1000).issue(token).expires_at == 1000
    assert issuer(1000).issue(replace(token, expires_at=999)).expires_at == 999
    assert ROOT.issue(replace(token, expires_at=999)).expires_at == 999
    with pytest.raises(PermissionDeniedError, match="expiry"):
        issuer(1000).issue(replace(token, expires_at=1001))


def test_a_token_cannot_grant_more_than_its_issuer_has() -> None:
    reader = Grant.of(
        AccessToken(
            "reader",
            Scope(
                exact("basin-a"),
                prefix("s/"),
                prefix("reader/"),
                ops=frozenset({Right.READ, Right.ISSUE_ACCESS_TOKEN}),
            ),
        )
    )
    same = Scope(exact("basin-a"), prefix("s/t/"), ops=frozenset({Right.READ}))
    assert reader.issue(AccessToken("reader/1", same)).scope == same
    for more in (
        replace(same, ops=frozenset({Right.READ, Right.APPEND})),
        replace(same, op_groups=OperationGroups(stream=Permission(read=True))),
        replace(same, basins=EVERYTHING),
        replace(same, basins=exact("basin-b")),
        replace(same, streams=prefix("s")),
        replace(same, access_tokens=EVERYTHING),
    ):
        with pytest.raises(PermissionDeniedError, match="more than"):
            reader.issue(AccessToken("reader/1", more))


def test_an_issuer_may_only_give_out_ids_that_it_covers() -> None:
    grant = replace(ROOT, access_tokens=prefix("team/"))
    wanted = scope(Right.READ)
    with pytest.raises(PermissionDeniedError, match="issue-access-token"):
        grant.issue(AccessToken("other", replace(wanted, access_tokens=NOTHING)))
    with pytest.raises(PermissionDeniedError, match="issue-access-token"):
        Grant(frozenset({Right.READ}), EVERYTHING, EVERYTHING, EVERYTHING).issue(
            AccessToken("t", wanted)
        )


TEXTS = st.text("ab/", max_size=3)
SETS = st.builds(ResourceSet, TEXTS, st.booleans())
GRANTS = st.builds(
    Grant,
    st.frozensets(st.sampled_from(Right)),
    SETS,
    SETS,
    SETS,
    expires_at=st.none() | st.integers(0, 3),
)
NAMES = st.none() | st.text("ab/", min_size=1, max_size=4)


@given(GRANTS, GRANTS, st.sampled_from(Right), NAMES, NAMES, NAMES)
def test_whatever_is_covered_allows_no_more(
    larger: Grant,
    smaller: Grant,
    operation: Right,
    basin: str | None,
    stream: str | None,
    token_id: str | None,
) -> None:
    resources = (basin, stream, token_id)
    if larger.covers(smaller) and smaller.allows(operation, *resources):
        assert larger.allows(operation, *resources)


@given(GRANTS, SETS, SETS, SETS, st.frozensets(st.sampled_from(Right), min_size=1))
def test_whatever_is_issued_allows_no_more_for_no_longer(
    larger: Grant,
    basins: ResourceSet,
    streams: ResourceSet,
    tokens: ResourceSet,
    operations: frozenset[Right],
) -> None:
    larger = replace(larger, operations=larger.operations | {Right.ISSUE_ACCESS_TOKEN})
    try:
        issued = larger.issue(AccessToken("a", Scope(basins, streams, tokens, ops=operations)))
    except PermissionDeniedError:
        return
    assert larger.covers(Grant.of(issued))
    assert issued.expires_at == larger.expires_at


@given(GRANTS)
def test_root_covers_everything_and_everything_covers_itself(grant: Grant) -> None:
    assert ROOT.covers(grant)
    assert grant.covers(grant)


def stream_page(*names: str, has_more: bool = False) -> Page[StreamInfo]:
    return Page(tuple(StreamInfo(StreamName(name), 0, None, None) for name in names), has_more)


def basin_page(*names: str, has_more: bool = False) -> Page[BasinInfo]:
    return Page(tuple(BasinInfo(BasinName(name), 0, None) for name in names), has_more)


def prefixed(streams: str) -> Grant:
    return Grant.of(AccessToken("t", scope(Right.READ, streams=prefix(streams)), True))


def test_an_auto_prefix_goes_before_names_in_requests() -> None:
    assert prefixed("team/").full_stream_name("orders") == "team/orders"
    assert ROOT.full_stream_name("orders") == "orders"
    with pytest.raises(InvalidError, match="too long"):
        prefixed("team/").full_stream_name("x" * 510)


def test_an_auto_prefix_goes_before_prefixes_of_listings_and_off_what_they_show() -> None:
    grant = prefixed("team/")
    assert grant.list_streams("or", "order", 10) == Listing("team/or", "team/order", 10)
    shown = grant.show_streams(stream_page("team/orders", "team/team/", has_more=True))
    assert shown == stream_page("orders", "team/", has_more=True)


def test_a_stream_named_like_the_auto_prefix_is_not_listed_for_it_would_have_no_name() -> None:
    assert prefixed("team/").list_streams("", "", 10) == Listing("team/", "team/", 10)


@pytest.mark.parametrize(
    ("names", "asked", "listing"),
    [
        (EVERYTHING, Listing("a", "ab", 5), Listing("a", "ab", 5)),
        (prefix("a"), Listing("", "", 5), Listing("a", "", 5)),
        (prefix("a"), Listing("abc", "", 5), Listing("abc", "", 5)),
        (prefix("abc"), Listing("a", "x", 5), Listing("abc", "x", 5)),
        (prefix("a"), Listing("b", "", 5), None),
        (exact("ab"), Listing("a", "", 5), Listing("ab", "", 1)),
        (exact("ab"), Listing("a", "aa", 5), Listing("ab", "aa", 1)),
        (exact("ab"), Listing("a", "ab", 5), None),
        (exact("ab"), Listing("abc", "", 5), None),
        (NOTHING, Listing("", "", 5), None),
    ],
)
def test_a_listing_asks_only_for_what_may_be_seen(
    names: ResourceSet, asked: Listing, listing: Listing | None
) -> None:
    grant = replace(ROOT, basins=names, streams=names, access_tokens=names)
    assert grant.list_basins(*asked) == listing
    assert grant.list_streams(*asked) == listing
    assert grant.list_access_tokens(*asked) == listing


def test_a_listing_of_one_name_shows_no_neighbour_and_has_no_more() -> None:
    grant = replace(ROOT, basins=exact("basin-a"))
    assert grant.show_basins(basin_page("basin-a", has_more=True)) == basin_page("basin-a")
    assert grant.show_basins(basin_page("basin-ab", has_more=True)) == basin_page()


def test_a_listing_of_tokens_shows_those_covered() -> None:
    tokens = tuple(AccessToken(name, scope(Right.READ)) for name in ("a/1", "a/2"))
    grant = replace(ROOT, access_tokens=prefix("a/"))
    assert grant.show_access_tokens(Page(tokens, True)) == Page(tokens, True)
