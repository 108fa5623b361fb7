"""The fault proxy hurts as it says: a fault that does nothing would make its tests pass for nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.support.faultproxy import FaultProxy
from tests.support.until import until


class Echo:
    """A server that answers what it hears, and a client of it through the proxy."""

    def __init__(self) -> None:
        self.heard = b""
        self.ended = False
        self.back = b""
        self.back_ended = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await self._read(reader):
            self.heard += piece
            writer.write(piece)
        self.ended = True
        writer.transport.abort()

    async def listen(self, reader: asyncio.StreamReader) -> None:
        while piece := await self._read(reader):
            self.back += piece
        self.back_ended = True

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(100)
        except ConnectionError:
            return b""


class Line:
    """One echo connection through a proxy whose delays are recorded instead of waited for."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.echo = Echo()
        self.slept: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def open(self) -> "Line":
        server = await asyncio.start_server(self.echo.serve, "127.0.0.1", 0)
        self._stack.push_async_callback(server.wait_closed)
        self._stack.callback(server.close)
        target = server.sockets[0].getsockname()[:2]
        self.proxy = await self._stack.enter_async_context(FaultProxy(target, sleep=self._sleep))
        reader, self.writer = await asyncio.open_connection(*self.proxy.address)
        listening = asyncio.create_task(self.echo.listen(reader))
        self._stack.callback(listening.cancel)
        self._stack.callback(self.writer.transport.abort)
        await self.say(b"hello")
        await until(lambda: self.echo.back == b"hello")
        return self

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        yield await Line(stack).open()


async def test_a_cut_swallows_one_direction_and_keeps_both_ends_open(line: Line) -> None:
    line.proxy.cut("down")
    await line.say(b" up")
    await until(lambda: line.proxy.swallowed["down"] == 3)
    assert line.echo.heard == b"hello up"
    line.proxy.cut("up")
    await line.say(b" lost")
    await until(lambda: line.proxy.swallowed["up"] == 5)
    line.proxy.heal()
    await line.say(b" again")
    await until(lambda: line.echo.back == b"hello again")
    assert line.echo.heard == b"hello up again"
    assert not line.echo.ended


async def test_a_half_open_line_hides_the_end_of_the_other_side(line: Line) -> None:
    line.proxy.half_open()
    await line.say(b"gone")
    line.writer.write_eof()
    await until(lambda: line.proxy.hidden)
    assert not line.echo.ended
    line.proxy.heal()
    await until(lambda: line.echo.ended)
    assert line.echo.heard == b"hello"


async def test_delays_and_trickles_hold_every_piece_back(line: Line) -> None:
    line.proxy.delay(70, "up")
    await line.say(b"x")
    await until(lambda: line.echo.heard == b"hellox")
    assert line.slept == [0.07]
    line.proxy.trickle(1, 10, "up")
    await line.say(b"abcd")
    await until(lambda: line.echo.heard == b"helloxabcd")
    assert len(line.slept) >= 4


async def test_exactly_one_byte_is_flipped(line: Line) -> None:
    line.proxy.corrupt(line.proxy.passed["up"] + 1, "up")
    await line.say(b"aaaa")
    await line.say(b"aaaa")
    await until(lambda: len(line.echo.heard) == 13)
    assert line.echo.heard == b"hello" + b"a`aaaaaa"


async def test_a_reset_ends_both_sides(line: Line) -> None:
    line.proxy.reset()
    await until(lambda: line.echo.ended and line.echo.back_ended)
    await until(lambda: line.proxy.live == 0)
