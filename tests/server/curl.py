"""curl, as people use it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def curl(*arguments: str, stdin: bytes | None = None) -> Response:
    """Run curl and take its answer apart."""
    process = await asyncio.create_subprocess_exec(
        "curl",
        "--silent",
        "--show-error",
        "--include",
        "--max-time",
        "60",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(stdin)
    assert process.returncode == 0, errors.decode()
    head, _, body = output.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers: dict[str, str] = {}
    for name, value in (line.split(": ", 1) for line in lines):
        held = headers.get(name.lower())
        headers[name.lower()] = value if held is None else f"{held}, {value}"
    return Response(int(first.split()[1]), headers, body)
