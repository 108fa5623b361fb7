"""Connections of the relay without sockets: a transport that keeps what is written, a front that takes everything."""

import asyncio
from typing import Any

from agent.effects.clock import SystemClock
from agent.relay.frontends.codes import status_of
from agent.relay.http.connection import ServerConnection
from agent.relay.http.frontend import Answer, Buffered
from agent.relay.http.frontend import Client as Connection
from agent.relay.http.headers import Dates
from agent.relay.http.parser import Request


class Wire(asyncio.Transport):
    """A transport that takes everything at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever buffered."""

    def get_write_buffer_size(self) -> int:
        return 0


class Taken:
    """A front that takes every request and answers it at once."""

    def __init__(self) -> None:
        self.requests: list[tuple[Request, bytes]] = []

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection) -> None: ...

    def judge(self, connection: Connection, request: Request) -> None: ...

    def serve(self, connection: Connection, request: Request, body: bytes | bytearray) -> Answer:
        self.requests.append((request, bytes(body)))
        return Answer(status=200, headers=[], body=b"")

    def fault(self, connection: Connection, request: Request | None, code: str) -> Answer:
        return Answer(status=status_of(code), headers=[], body=b"", code=code, keep=False)

    def answered(self, connection: Connection, request: Request | None, answer: Answer) -> None: ...


async def taken(pieces: list[bytes]) -> list[tuple[Request, bytes]]:
    """The requests that a connection reads out of ``pieces``."""
    front, wire = Taken(), Wire()
    connection = ServerConnection(front, SystemClock(), Dates(), Buffered())
    connection.connection_made(wire)
    for piece in pieces:
        if wire.closed:
            break
        connection.data_received(piece)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.connection_lost(None)
    return front.requests
