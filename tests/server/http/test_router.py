from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfold.model.positions import U64_MAX
from streamfold.server.http.headers import parse_content_length
from streamfold.server.http.request import Request
from streamfold.server.http.router import KEPT, PUBLIC, SHORT_MAX, Router, memoize_short
from streamfold.wire.text import from_bytes, parse_unsigned


async def first(request: Request, *segments: str) -> None: ...


async def second(request: Request, *segments: str) -> None: ...


@pytest.fixture
def router() -> Router:
    router = Router()
    router.add("GET", "/v1/things", PUBLIC, first)
    router.add("GET", "/v1/things/default", PUBLIC, second)
    router.add("GET", "/v1/things/{}", PUBLIC, first)
    router.add("PUT", "/v1/things/{}", PUBLIC, second)
    router.add("GET", "/v1/things/{}/parts/{}", PUBLIC, second)
    router.add("GET", "/v1/things/{}/files/{...}", PUBLIC, first)
    return router


@pytest.mark.parametrize(
    ("path", "method", "handler", "segments"),
    [
        ("/v1/things", "GET", first, ()),
        ("/v1/things/a", "GET", first, ("a",)),
        ("/v1/things/a", "PUT", second, ("a",)),
        ("/v1/things/a%2Fb", "GET", first, ("a%2Fb",)),
        ("/v1/things/default", "GET", second, ()),
        ("/v1/things/", "GET", first, ("",)),
        ("/v1/things/a/parts/b", "GET", second, ("a", "b")),
        ("/v1/things/a/files/b", "GET", first, ("a", "b")),
        ("/v1/things/a/files/b/c", "GET", first, ("a", "b/c")),
        ("/v1/things/a", "DELETE", None, ("a",)),
    ],
)
def test_a_path_leads_to_its_handler(
    router: Router, path: str, method: str, handler: object, segments: tuple[str, ...]
) -> None:
    match = router.match(path)
    assert match is not None
    assert match.handlers.get(method) is handler
    assert match.segments == segments


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/other", "/v1/things/a/b", "/v1/things/a/files", "//v1"]
)
def test_other_paths_lead_nowhere(router: Router, path: str) -> None:
    assert router.match(path) is None


def test_a_match_names_the_methods_of_its_path(router: Router) -> None:
    match = router.match("/v1/things/a")
    assert match is not None
    assert match.allowed == "GET, PUT"


@given(st.lists(st.tuples(st.sampled_from(["a", "", "x" * SHORT_MAX]), st.text(max_size=3))))
def test_a_memoized_function_returns_what_the_function_returns(
    calls: list[tuple[str, str]],
) -> None:
    def look_at(texts: tuple[str, str]) -> tuple[int, str]:
        return len(texts[0]), texts[1]

    memoized = memoize_short(look_at)
    for texts in calls * 2:
        assert memoized(texts) == look_at(texts)


def test_results_for_short_texts_are_computed_once_and_those_for_long_ones_each_time() -> None:
    computed: list[str] = []
    memoized = memoize_short(computed.append)
    for text in ("short", "short", "x" * (SHORT_MAX + 1), "x" * (SHORT_MAX + 1)):
        memoized(text)
    assert list(map(len, computed)) == [5, SHORT_MAX + 1, SHORT_MAX + 1]


def test_a_client_that_sends_ever_new_texts_fills_no_memory() -> None:
    computed: list[str] = []
    memoized = memoize_short(computed.append)
    for number in range(KEPT + 1):
        memoized(str(number))
    memoized(str(KEPT))
    memoized("0")
    assert len(computed) == KEPT + 2


@given(
    st.binary(max_size=24)
    | st.integers(0, 2**70).map(lambda number: b"%d" % number)
    | st.from_regex(rb"[0-9 +_-]{0,24}", fullmatch=True)
)
def test_a_declared_size_is_read_as_every_other_number_of_a_client(raw: bytes) -> None:
    assert parse_content_length(raw) == parse_unsigned(from_bytes(raw), U64_MAX)
