"""A WebSocket client that sends whatever bytes a test likes, over TLS with any certificate."""

import asyncio
import base64
import contextlib
import ssl
import struct
from types import TracebackType
from typing import Self

MASK = b"\x00\x00\x00\x00"


def frame(opcode: int, payload: bytes, *, length: int | None = None, rsv: int = 0) -> bytes:
    """One final masked frame; ``length`` is what the header claims, if not the truth."""
    claimed = len(payload) if length is None else length
    if claimed < 126:
        head = struct.pack("!BB", 0x80 | rsv | opcode, 0x80 | claimed)
    elif claimed < 65_536:
        head = struct.pack("!BBH", 0x80 | rsv | opcode, 0x80 | 126, claimed)
    else:
        head = struct.pack("!BBQ", 0x80 | rsv | opcode, 0x80 | 127, claimed)
    return head + MASK + payload


class RawLink:
    """``async with RawLink(address, tls, name)``; then ``ask`` for the upgrade and ``write`` frames."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext, server_hostname: str) -> None:
        self._address = address
        self._tls = tls
        self._name = server_hostname

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(
            *self._address, ssl=self._tls, server_hostname=self._name
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(AttributeError):  # asyncio of Python 3.11.2: a TLS transport closed twice
            self.writer.transport.abort()

    async def ask(
        self, path: str = "/mesh/v1/link", protocol: str = "pairmesh.v1", method: str = "GET"
    ) -> int:
        """The status the server answers to an upgrade request."""
        key = base64.b64encode(bytes(16)).decode()
        lines = (
            f"{method} {path} HTTP/1.1",
            "Host: mesh",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {key}",
            f"Sec-WebSocket-Protocol: {protocol}",
            "Sec-WebSocket-Extensions: permessage-deflate",
            "",
            "",
        )
        self.writer.write("\r\n".join(lines).encode())
        self.answer = await self.reader.readuntil(b"\r\n\r\n")
        return int(self.answer.split()[1])

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def close_code(self) -> int | None:
        """Read frames until the server closes; its close code, or None if it just went away."""
        try:
            while True:
                first, second = await self.reader.readexactly(2)
                length = second & 0x7F
                if length == 126:
                    (length,) = struct.unpack("!H", await self.reader.readexactly(2))
                payload = await self.reader.readexactly(length)
                if first & 0x0F == 8:
                    return int.from_bytes(payload[:2], "big")
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            return None
