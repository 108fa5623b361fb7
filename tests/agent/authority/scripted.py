"""An authority that does what a test tells it to: any bytes, in any order, or nothing at all."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Scripted:
    """A listening authority. ``heads`` and ``questions`` are what it was sent; ``most`` how many it served at once."""

    script: Script
    url: str = ""
    heads: list[bytes] = field(default_factory=list)
    questions: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    now: int = 0
    most: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-l")
            )
            body = await reader.readexactly(length)
            self.heads.append(head)
            self.raw.append(body)
            self.questions.append(json.loads(body))
            await self.script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.now -= 1
            writer.close()


@asynccontextmanager
async def listening(script: Script, socket: Path | None = None) -> AsyncIterator[Scripted]:
    """An authority on loopback, or at a unix socket."""
    authority = Scripted(script)
    if socket is None:
        server = await asyncio.start_server(authority.serve, "127.0.0.1", 0)
        authority.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/place"
    else:
        server = await asyncio.start_unix_server(authority.serve, socket)
        authority.url = f"unix:{socket}"
    try:
        yield authority
    finally:
        server.close()


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole response."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def says(raw: bytes) -> Script:
    """Sends these bytes and ends."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()

    return script


def answers(**members: Any) -> Script:
    """A proper answer."""
    return says(http(json.dumps({"v": 1, **members}).encode()))


def says_and_hangs(raw: bytes) -> Script:
    """Sends these bytes and then nothing, until the other side gives up."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await reader.read()

    return script


def says_without_end(head: bytes, again: bytes) -> Script:
    """Sends ``again`` for as long as somebody takes it."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(again)
            await writer.drain()

    return script
