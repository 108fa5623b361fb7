"""A strict upstream over real sockets: it records every request byte for byte and answers as it is told.

Strict: one request line, CRLF alone, exactly one framing, nothing behind a body. What breaks a rule is recorded as a
fault, never repaired.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

_LINE = re.compile(rb"[A-Z]+ /[^\x00-\x20\x7f]* HTTP/1\.1")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\t\x20-\x7e\x80-\xff]*)")


@dataclass(slots=True, kw_only=True)
class Recorded:
    """One request as it arrived. ``connection`` counts sockets from 0."""

    connection: int
    head: bytes
    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""

    def value(self, name: bytes) -> bytes | None:
        found = [value for key, value in self.headers if key.lower() == name]
        assert len(found) <= 1, f"{name!r} was sent {len(found)} times"
        return found[0] if found else None


class Exchange:
    """The upstream's side of one request: write whatever bytes, close, or wait until the other end has left."""

    def __init__(self, request: Recorded, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._reader = reader
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, body: bytes, *, status: int = 200, headers: bytes = b"") -> None:
        """A whole answer with ``Content-Length``."""
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n"
        await self.write(head % (status, len(body), headers) + body)

    async def begin_stream(self, headers: bytes = b"") -> None:
        """The head of a chunked event stream."""
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n%s\r\n"
            % headers
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.write(b"0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Return when the other end has closed or reset the socket."""
        with contextlib.suppress(ConnectionError):
            assert await self._reader.read(1) == b"", "bytes behind the request"


Script = Callable[[Exchange], Awaitable[None]]


async def say_ok(exchange: Exchange) -> None:
    """The default script."""
    await exchange.answer(b'{"ok":true}')


@dataclass(slots=True)
class Recorder:
    """``script`` answers each request; replace it at any time."""

    script: Script = say_ok
    requests: list[Recorded] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    connections: int = 0
    open_sockets: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _serving: set[asyncio.Task[None]] = field(default_factory=set)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> "Recorder":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def arrived(self, count: int = 1) -> None:
        """Return when ``count`` requests have come in whole."""
        while len(self.requests) < count:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 10)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        self.open_sockets += 1
        try:
            while not writer.is_closing():
                request = await self._read(number, reader)
                if request is None:
                    return
                self.requests.append(request)
                self._arrived.set()
                await self.script(Exchange(request, reader, writer))
        except ConnectionError:
            pass
        finally:
            self.open_sockets -= 1
            writer.close()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> Recorded | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as short:
            if short.partial:
                self.faults.append("truncated head")
            return None
        line, *rest = head[:-4].split(b"\r\n")
        fields = [_FIELD.fullmatch(each) for each in rest]
        if not _LINE.fullmatch(line) or b"\n" in head.replace(b"\r\n", b"") or None in fields:
            self.faults.append("malformed head")
            return None
        headers = [(found[1], found[2]) for found in fields if found is not None]
        request = Recorded(connection=number, head=head, line=line, headers=headers)
        length = request.value(b"content-length")
        if length is None or request.value(b"transfer-encoding") is not None or not length.isdigit():
            self.faults.append("framing")
            return None
        try:
            request.body = await reader.readexactly(int(length))
        except asyncio.IncompleteReadError:
            self.faults.append("truncated body")
            return None
        return request
