"""Every response of both faces forbids browsers to guess content types."""

from __future__ import annotations

import pytest

from streamfold.server.main import Server
from tests.server.conftest import BASIN, STREAM
from tests.server.curl import curl

PAGE = "<script>alert(1)</script>"
S2 = f"/v1/streams/{STREAM}"
DURABLE = f"/{BASIN}/{STREAM}"


@pytest.mark.parametrize("face", [S2, DURABLE])
async def test_every_answer_with_stored_content_says_nosniff(server: Server, face: str) -> None:
    here = f"http://127.0.0.1:{server.port}"
    basin = ("-H", f"s2-basin: {BASIN}")
    html = ("-H", "content-type: text/html", "-d", PAGE)
    published = await curl("-X", "PUT", f"{here}{face}/snapshot/0", *basin, *html)
    assert published.status == 204
    live = ("-H", "accept: text/event-stream") if face == S2 else ()
    reads = {
        S2: ["/records?seq_num=0&clamp=true", "/records?seq_num=0&count=0"],
        DURABLE: ["", "?offset=-1", "?offset=-1&live=sse"],
    }
    await curl("-X", "POST", f"{here}{DURABLE}", "-H", "content-type: application/octet-stream",
               "-d", PAGE)  # fmt: skip
    await curl("-X", "POST", f"{here}{DURABLE}", "-H", "stream-closed: true")
    for path in ("/snapshot/0", "/snapshot", "/snapshots", "/bootstrap", *reads[face]):
        answer = await curl(f"{here}{face}{path}", *basin, *(live if "records" in path else ()))
        assert answer.status in (200, 307), path
        assert answer.headers["x-content-type-options"] == "nosniff", path
