"""A plain HTTP client over a raw socket: it says exactly what it is told to and keeps exactly what it hears."""

import asyncio
import contextlib
from dataclasses import dataclass

CHAT = b"/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'


@dataclass(slots=True, kw_only=True)
class Heard:
    """One reply. ``chunks`` is None unless it was chunked; ``clean`` False if its framing was cut short."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] | None
    clean: bool


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next reply; a repeated header fails."""
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)
        line, *rest = raw[:-4].decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for each in rest:
            name, _, value = each.partition(": ")
            name = name.lower()
            assert name not in headers, f"{name} twice"
            headers[name] = value
        return int(line.split(" ")[1]), headers

    async def chunk(self) -> bytes | None:
        """The next chunk, b"" for the last one, None if the connection ended instead."""
        try:
            size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10), 16)
            data = await self.reader.readexactly(size + 2)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def heard(self, *, bodyless: bool = False) -> Heard:
        status, headers = await self.head()
        body, chunks, clean = b"", None, True
        if bodyless or status == 204:
            pass
        elif "content-length" in headers:
            length = int(headers["content-length"])
            try:
                body = await asyncio.wait_for(self.reader.readexactly(length), 20)
            except asyncio.IncompleteReadError as short:
                body, clean = short.partial, False
        elif headers.get("transfer-encoding") == "chunked":
            chunks = []
            while chunk := await self.chunk():
                chunks.append(chunk)
            clean = chunk is not None
            body = b"".join(chunks)
        else:
            body = await asyncio.wait_for(self.reader.read(-1), 10)
        return Heard(status=status, headers=headers, body=body, chunks=chunks, clean=clean)

    async def ended(self) -> None:
        """Return when the other end has closed, having said nothing more."""
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(self.reader.read(1), 10) == b""

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        self.writer.transport.abort()


def post(port: int, body: bytes = BODY, *, path: bytes = CHAT, headers: bytes = b"") -> bytes:
    """A request as bytes."""
    return (
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
        % (path, port, len(body), headers)
    ) + body


def get(port: int, path: bytes = b"/health", *, method: bytes = b"GET", headers: bytes = b"") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%s\r\n" % (method, path, port, headers)


async def ask(port: int, raw: bytes, *, bodyless: bool = False) -> Heard:
    """One request on a connection of its own."""
    client = await Client.to(port)
    try:
        await client.send(raw)
        return await client.heard(bodyless=bodyless)
    finally:
        client.close()
