"""The server of the chat: the page, the questions, and the answers as they are written.

    python app.py --streamfold http://localhost:8080 --port 8081

The page never talks to Streamfold itself: the access token stays here, in `S2_ACCESS_TOKEN`.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import uvicorn
from chat import Chats
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from streams import Streams, SupersededError

NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
PAGE = Path(__file__).parent / "page" / "dist"


def name(text: object) -> str:
    """A part of a stream's name that a page sends."""
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise HTTPException(400, "a name has 1 to 64 letters, digits and hyphens")
    return text


async def history(request: Request) -> Response:
    chats: Chats = request.app.state.chats
    conversation = await chats.conversation(name(request.path_params["chat"]))
    return JSONResponse(conversation.messages)


async def ask(request: Request) -> Response:
    chats: Chats = request.app.state.chats
    body = await request.json()
    chat, message = name(body["id"]), body["messages"][-1]
    question = name(message["id"])
    if message["role"] != "user":
        raise HTTPException(400, "the last message is not a question")
    if (await chats.conversation(chat)).open_question not in (None, question):
        raise HTTPException(409, "the last question is still being answered")
    await chats.ask(chat, message)
    return location(chat, question, 201)


async def find_answer(request: Request) -> Response:
    """Where the answer to a question is; a page asks for it after a reload."""
    chat, question = (name(request.path_params[part]) for part in ("chat", "question"))
    return location(chat, question, 200)


def location(chat: str, question: str, status: int) -> Response:
    url = f"/api/chat/{chat}/answers/{question}/stream"
    return JSONResponse({"streamUrl": url}, status, {"location": url, "cache-control": "no-store"})


async def read_answer(request: Request) -> Response:
    """Pass the answer's stream on. Whoever reads an open answer has this process work on it."""
    chats: Chats = request.app.state.chats
    chat, question = (name(request.path_params[part]) for part in ("chat", "question"))
    await chats.resume(chat)
    http, path = chats.streams.http, f"chats/{chat}/answers/{question}"
    query = {**request.query_params, "live": "sse"}
    upstream = await http.send(http.build_request("GET", path, params=query), stream=True)
    content_type = upstream.headers.get("content-type")
    return StreamingResponse(pass_on(upstream), upstream.status_code, media_type=content_type)


async def pass_on(upstream: httpx.Response) -> AsyncIterator[bytes]:
    """Pass events on, each together with the control event that says where to go on behind it.

    If Streamfold goes away, the page then connects again without a gap or a repetition.
    """
    rest, pending = b"", b""
    try:
        async for piece in upstream.aiter_raw():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                pending += event + b"\n\n"
                if not event.startswith(b"event: data"):
                    yield pending
                    pending = b""
    except httpx.TransportError as error:
        logging.info("a live read was cut off: %r", error)
    finally:
        await upstream.aclose()


async def stop(request: Request) -> Response:
    chats: Chats = request.app.state.chats
    await chats.stop(name(request.path_params["chat"]))
    return Response(status_code=204)


async def away(_: Request, error: Exception) -> Response:
    logging.warning("Streamfold: %s", error)
    return PlainTextResponse("The chat is unavailable at the moment.", 503)


async def superseded(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 409)


def app(streams: Streams) -> Starlette:
    routes = [
        Route("/api/chat", ask, methods=["POST"]),
        Route("/api/chat/{chat}", history),
        Route("/api/chat/{chat}/stop", stop, methods=["POST"]),
        Route("/api/chat/{chat}/answers/{question}", find_answer),
        Route("/api/chat/{chat}/answers/{question}/stream", read_answer),
        Mount("/", StaticFiles(directory=PAGE, html=True)),
    ]
    handlers = {httpx.HTTPError: away, SupersededError: superseded}
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.state.chats = Chats(streams)
    return application


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streamfold", default="http://localhost:8080")
    parser.add_argument("--port", type=int, default=8081)
    options = parser.parse_args()
    logging.basicConfig(level="INFO")
    logging.getLogger("httpx").setLevel("WARNING")
    streams = Streams(f"{options.streamfold}/v1/stream/", os.environ.get("S2_ACCESS_TOKEN", ""))
    uvicorn.run(app(streams), port=options.port, access_log=False, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
