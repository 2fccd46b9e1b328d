"""Stream names with slashes are one path segment below a bucket. Errors suggest the right path."""

from __future__ import annotations

import httpx
import pytest

from tests.server.durable_streams.conftest import JSON


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/some-bucket/a/b", "/some-bucket/a%2Fb"),
        ("/some-bucket/a/b/c", "/some-bucket/a%2Fb%2Fc"),
        ("/some-bucket/a/b/snapshot", "/some-bucket/a%2Fb/snapshot"),
        ("/some-bucket/a/b/snapshot/5", "/some-bucket/a%2Fb/snapshot/5"),
        ("/some-bucket/a/b/bootstrap", "/some-bucket/a%2Fb/bootstrap"),
        ("/some-bucket/%C3%A9/b", "/some-bucket/%C3%A9%2Fb"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
async def test_a_name_written_with_slashes_is_answered_with_what_to_write(
    web: httpx.AsyncClient, method: str, path: str, meant: str
) -> None:
    await web.put("/some-bucket/a%2Fb", headers=JSON, content=b"[1]")
    answer = await web.request(method, path)
    assert answer.status_code == 404
    said = answer.json()
    assert said["code"] == "not_found"
    assert path in said["message"]
    assert said["message"].endswith(meant)
    assert (await web.get("/some-bucket/a%2Fb")).json() == [1]


@pytest.mark.parametrize("path", ["/some-bucket//b", "/some-bucket/a//"])
async def test_a_path_without_names_is_not_a_stream(web: httpx.AsyncClient, path: str) -> None:
    answer = await web.get(path)
    assert answer.status_code == 404
    assert "%2F" not in answer.json()["message"]
