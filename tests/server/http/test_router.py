from __future__ import annotations

import pytest

from streamfold.server.http.request import Request
from streamfold.server.http.router import PUBLIC, Router


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
