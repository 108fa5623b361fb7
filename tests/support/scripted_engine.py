"""An OpenAI-compatible engine of bytes: what it writes for a model is a script, well-formed or not.

It lists its scripts as models, answers everything else with 404, and reads requests as leniently as it can: what
is wrong is what it says, never what it hears.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

Wire = asyncio.StreamWriter
Script = Callable[[Wire, bytes], Awaitable[None]]
"""Writes the answer to a request with this body."""


def whole(status: int, body: bytes, *, kind: bytes = b"application/json", more: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\n%s\r\n"
    return head % (status, kind, len(body), more) + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """One chunk with one event of a streamed chat."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    told = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return chunk(b"data: " + json.dumps(told).encode() + b"\n\n")


class ScriptedEngine:
    """``async with`` listens on loopback; ``scripts`` are by model name; ``head`` is that of the newest request. Its API lies
    at ``base``."""

    def __init__(self, scripts: Mapping[str, Script], base: bytes = b"/v1") -> None:
        self.scripts = dict(scripts)
        self._base = base
        self.asked: list[str] = []
        self.head = b""
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Serve for the length of the block; the base URL."""
        server = await asyncio.start_server(self._accept, host, 0, ssl=tls)
        try:
            yield f"http{'s' if tls else ''}://{host}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: Wire) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: Wire) -> None:
        try:
            while not writer.is_closing():
                head = self.head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length:")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                await self._answer(writer, method, path, body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, writer: Wire, method: bytes, path: bytes, body: bytes) -> None:
        if method == b"GET" and path == self._base + b"/models":
            models = [{"id": name, "object": "model"} for name in self.scripts]
            writer.write(whole(200, json.dumps({"object": "list", "data": models}).encode()))
        elif method == b"POST" and path.startswith(self._base + b"/chat/completions"):
            model = json.loads(body.decode("latin-1"))["model"]
            self.asked.append(model)
            await self.scripts[model](writer, body)
        else:
            writer.write(whole(404, b"{}"))
