"""A daemon under a supervisor: a notification socket that stays open and remembers when it heard what."""

import asyncio
import socket
import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.cluster import Node
from tests.support.until import until

WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Heard:
    at_s: float
    text: str


@dataclass(kw_only=True)
class Supervised:
    """``async with`` starts the daemon and ends it whatever happens."""

    node: Node
    watchdog_ms: int = 300
    heard: list[Heard] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = self.node.base / "supervisor"
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._hear)
        with self.node.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.node.prefix,
                sys.executable,
                *self.node.entry,
                env=self.node.env
                | self.node.more_env
                | {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": str(self.watchdog_ms * 1_000)},
                stdout=log,
                stderr=log,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _hear(self) -> None:
        self.heard.append(Heard(asyncio.get_running_loop().time(), self._socket.recv(4096).decode()))

    def said(self, line: str) -> list[float]:
        """When ``line`` was said, by itself or as one line of a message."""
        return [heard.at_s for heard in self.heard if line in heard.text.split("\n")]

    async def says(self, line: str, times: int = 1) -> list[float]:
        """Wait until ``line`` was said that often; when."""

        def enough() -> bool:
            assert self.process.returncode is None or len(self.said(line)) >= times, self.node.log_tail()
            return len(self.said(line)) >= times

        await until(enough, WITHIN_S, picture=lambda: [heard.text for heard in self.heard[-5:]])
        return self.said(line)

    async def pings_again(self, more: int = 3) -> None:
        await self.says("WATCHDOG=1", len(self.said("WATCHDOG=1")) + more)

    async def status(self) -> int:
        """Wait for the end; the exit status."""
        return await asyncio.wait_for(self.process.wait(), WITHIN_S)
