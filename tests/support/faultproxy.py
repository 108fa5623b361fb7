"""A TCP proxy on loopback that hurts what passes through it.

Each direction (``"up"`` = towards the target, ``"down"`` = back to the client) has its own faults, which take
effect at once on live connections and stay until ``heal``:

* ``delay(ms)`` holds every piece back, order kept;
* ``cut(direction)`` swallows bytes while both sockets stay open, as a silent loss would;
* ``half_open()`` swallows both ways and hides the end of either side from the other;
* ``trickle(size, ms)`` passes at most ``size`` bytes each ``ms``;
* ``corrupt(offset)`` flips one bit of the byte at that offset of the direction, once;
* ``reset()`` aborts every connection with RST.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]
Sleep = Callable[[float], Awaitable[object]]
_PIECE = 16_384
_RST = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Fault:
    delay_s: float = 0.0
    cut: bool = False
    size: int = _PIECE
    every_s: float = 0.0
    corrupt_at: int | None = None


class FaultProxy:
    """``async with FaultProxy(("127.0.0.1", port)) as proxy:`` then connect to ``proxy.address``."""

    def __init__(
        self, target: tuple[str, int], *, host: str = "127.0.0.1", sleep: Sleep = asyncio.sleep
    ) -> None:
        self.target = target
        self.accepted = 0
        self.hidden = 0
        """Grows while the end of a side is hidden from the other."""
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.swallowed: dict[Direction, int] = {"up": 0, "down": 0}
        self._host = host
        self._sleep = sleep
        self._faults: dict[Direction, _Fault] = {"up": _Fault(), "down": _Fault()}
        self._hide_ends = False
        self._refusing = False
        self._pairs: dict[asyncio.Task[None], tuple[asyncio.StreamWriter, ...]] = {}
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._pairs):
            task.cancel()
        await asyncio.gather(*self._pairs, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def live(self) -> int:
        """Connections open now."""
        return len(self._pairs)

    def delay(self, ms: int, direction: Direction | None = None) -> None:
        for fault in self._of(direction):
            fault.delay_s = ms / 1000

    def cut(self, direction: Direction | None = None) -> None:
        for fault in self._of(direction):
            fault.cut = True

    def half_open(self) -> None:
        self.cut()
        self._hide_ends = True

    def trickle(self, size: int, ms: int, direction: Direction | None = None) -> None:
        for fault in self._of(direction):
            fault.size, fault.every_s = size, ms / 1000

    def corrupt(self, offset: int, direction: Direction) -> None:
        self._faults[direction].corrupt_at = offset

    def refuse(self) -> None:
        """Reset every connection, present and future."""
        self._refusing = True
        self.reset()

    def reset(self) -> None:
        for task, writers in list(self._pairs.items()):
            for writer in writers:
                sock = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
                writer.transport.abort()
            task.cancel()

    def heal(self) -> None:
        """Take every fault away. What was swallowed is gone."""
        self._hide_ends = self._refusing = False
        for fault in self._faults.values():
            fault.delay_s, fault.cut, fault.size, fault.every_s, fault.corrupt_at = (
                0.0,
                False,
                _PIECE,
                0.0,
                None,
            )

    def _of(self, direction: Direction | None) -> list[_Fault]:
        return [self._faults[direction]] if direction else list(self._faults.values())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._pairs[task] = (writer,)
        try:
            if self._refusing:
                writer.transport.abort()
                return
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            self._pairs[task] = (writer, far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(reader, far_writer, "up"))
                both.create_task(self._pump(far_reader, writer, "down"))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass
        finally:
            for end in self._pairs.pop(task):
                end.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        fault = self._faults[direction]
        while data := await reader.read(_PIECE):
            while data:
                piece, data = data[: fault.size], data[fault.size :]
                if fault.delay_s or fault.every_s:
                    await self._sleep(fault.delay_s + fault.every_s)
                if fault.cut:
                    self.swallowed[direction] += len(piece)
                    continue
                writer.write(self._corrupted(piece, direction))
                await writer.drain()
        while self._hide_ends:
            self.hidden += 1
            await asyncio.sleep(0.02)
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    def _corrupted(self, piece: bytes, direction: Direction) -> bytes:
        """``piece`` as it goes on: with the one byte flipped if that is in it."""
        fault = self._faults[direction]
        start = self.passed[direction]
        self.passed[direction] += len(piece)
        at = fault.corrupt_at
        if at is None or not start <= at < start + len(piece):
            return piece
        fault.corrupt_at = None
        flipped = bytearray(piece)
        flipped[at - start] ^= 1
        return bytes(flipped)
