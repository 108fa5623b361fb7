"""Connections between requests: idle ones by target, newest first out, and how many are open.

A socket that might be on its way to be closed is given up rather than used. Refuses to know requests and answers.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from ipaddress import ip_address

from agent.relay.accept import keep_watch
from agent.relay.ports import Admits
from agent.relay.upstream import Options, Target, UpstreamConnection
from router_core import limits
from router_core.exchange.failure import Cause


class ConnectFailed(Exception):
    """No connection. ``cause`` says why."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.value)
        self.cause = cause


class Pool:
    """Idle connections by target, newest first out."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: dict[Target, list[UpstreamConnection]] = {}
        self._open: dict[Target, int] = {}
        self._turns: dict[Target, asyncio.Semaphore] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._shut = False

    @property
    def open_connections(self) -> int:
        return sum(self._open.values())

    def open_to(self, owner: str) -> int:
        """How many are open to an endpoint or a node."""
        return sum(count for target, count in self._open.items() if target.owner == owner)

    def drop(self, is_gone: Callable[[str], bool]) -> None:
        """Close the idle connections of every owner that ``is_gone``."""
        for target in [target for target in self._idle if is_gone(target.owner)]:
            for connection in self._idle.pop(target):
                connection.abort()

    def take(self, target: Target) -> UpstreamConnection | None:
        """An idle connection that should still be good."""
        idle = self._idle.get(target)
        if not idle:
            return None
        now = self._loop.time() * 1000
        while idle:
            connection = idle.pop()
            if connection.expires_ms > now and not connection.transport.is_closing():
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def connect(self, target: Target, options: Options) -> UpstreamConnection:
        """A fresh connection; raises ``ConnectFailed``. How long it may take is the caller's business.

        Few TLS handshakes run with one peer at a time: more at once are what it refuses to strangers.
        """
        if self._open.get(target, 0) >= options.most:
            raise ConnectFailed(Cause.POOL_FULL)
        self._open[target] = self._open.get(target, 0) + 1
        connection = UpstreamConnection(self, target, options)
        turn: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if options.context is not None:
            turn = self._turns.setdefault(target, asyncio.Semaphore(limits.HANDSHAKES_TO_PEER))
        try:
            async with turn:
                transport, _ = await self._loop.create_connection(
                    lambda: connection,
                    target.ip if options.admits is None else await self._resolved(target, options.admits),
                    target.port,
                    ssl=options.context,
                    server_hostname=options.server_name,
                )
        except BaseException as exc:
            self._closed(connection)
            if isinstance(exc, OSError):
                raise ConnectFailed(_cause_of(exc)) from exc
            raise
        if options.pin is not None:
            tls = transport.get_extra_info("ssl_object")
            if tls is None or tls.getpeercert(binary_form=True) != options.pin:
                transport.abort()
                raise ConnectFailed(Cause.IDENTITY)
        if options.off_host:
            keep_watch(transport.get_extra_info("socket"))
        return connection

    async def _resolved(self, target: Target, admits: Admits) -> str:
        """The first address that the target's name leads to and may; raises ``OSError``."""
        for *_, address in await self._loop.getaddrinfo(target.ip, target.port, type=socket.SOCK_STREAM):
            if admits(ip_address(address[0])):
                return str(address[0])
        raise OSError(f"{target.owner}: its name leads nowhere that it may")

    def keep(self, connection: UpstreamConnection, idle_ms: int) -> None:
        """Take a connection back that may serve again."""
        idle = self._idle.setdefault(connection.target, [])
        if self._shut or idle_ms <= 0 or len(idle) >= connection.options.idle_most:
            connection.transport.close()
            return
        connection.expires_ms = self._loop.time() * 1000 + idle_ms
        idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(1.0, self._sweep)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection is closed."""
        idle = self._idle.get(connection.target)
        if idle and connection in idle:
            idle.remove(connection)
        self._closed(connection)

    def close(self) -> None:
        """Close every idle connection and keep none from now on."""
        self._shut = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for idle in self._idle.values():
            for connection in idle:
                connection.transport.close()
        self._idle.clear()

    def _closed(self, connection: UpstreamConnection) -> None:
        if connection.uncounted:
            return
        connection.uncounted = True
        target = connection.target
        left = self._open.get(target, 0) - 1
        if left > 0:
            self._open[target] = left
        else:
            self._open.pop(target, None)
            self._turns.pop(target, None)

    def _sweep(self) -> None:
        now = self._loop.time() * 1000
        self._sweeper = None
        for target, idle in list(self._idle.items()):
            for connection in [each for each in idle if each.expires_ms <= now]:
                idle.remove(connection)
                connection.transport.close()
            if not idle:
                del self._idle[target]
        if self._idle:
            self._sweeper = self._loop.call_later(1.0, self._sweep)


def _cause_of(exc: OSError) -> Cause:
    if isinstance(exc, ConnectionRefusedError):
        return Cause.CONNECT_REFUSED
    if isinstance(exc, ssl.SSLCertVerificationError):
        return Cause.IDENTITY
    return Cause.CONNECT_TIMEOUT if isinstance(exc, TimeoutError) else Cause.CONNECT_FAILED
