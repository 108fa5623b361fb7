"""Connections between requests: idle ones by target, newest first out, and how many are open.

A socket that might be on its way to be closed is given up rather than used. Refuses to know requests and answers.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address

from agent.effects.descriptors import OUT_OF_DESCRIPTORS
from agent.effects.racing import first_of
from agent.relay.http.acceptor import keep_small, keep_watch
from agent.relay.ports import Admits
from agent.relay.upstream.connection import Options, Target, UpstreamConnection
from router_core import limits
from router_core.router.failure import Cause


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
        turn: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if options.context is not None:
            turn = self._turns.setdefault(target, asyncio.Semaphore(limits.HANDSHAKES_TO_PEER))
        at = options.addresses or ((target.ip, target.port),)
        try:
            async with turn:
                connection = await first_of(
                    [partial(self._reach, target, options, ip, port) for ip, port in at],
                    after_s=limits.NEXT_ADDRESS / 1_000,
                    unused=UpstreamConnection.abort,
                )
            if connection.transport.is_closing():
                raise ConnectFailed(Cause.EOF)
        except BaseException:
            self._uncount(target)
            raise
        connection.uncounted = False
        sock = connection.transport.get_extra_info("socket")
        keep_small(sock)
        if options.off_host:
            keep_watch(sock)
        return connection

    async def _reach(self, target: Target, options: Options, ip: str, port: int) -> UpstreamConnection:
        """A connection to one address, not counted yet."""
        try:
            connection = await self._made(target, options, ip, port)
        except ConnectFailed as failed:
            if options.reached is not None:
                options.reached(ip, port, failed.cause)
            raise
        if options.reached is not None:
            options.reached(ip, port, None)
        return connection

    async def _made(self, target: Target, options: Options, ip: str, port: int) -> UpstreamConnection:
        connection = UpstreamConnection(self, target, options)
        connection.uncounted = True
        try:
            transport, _ = await self._loop.create_connection(
                lambda: connection,
                ip if options.admits is None else await self._resolved(target, options.admits),
                port,
                ssl=options.context,
                server_hostname=options.server_name,
            )
        except OSError as exc:
            raise ConnectFailed(_cause_of(exc)) from exc
        if options.pin is not None:
            tls = transport.get_extra_info("ssl_object")
            if tls is None or tls.getpeercert(binary_form=True) != options.pin:
                transport.abort()
                raise ConnectFailed(Cause.IDENTITY)
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
        self._uncount(connection.target)

    def _uncount(self, target: Target) -> None:
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
    if exc.errno in OUT_OF_DESCRIPTORS:
        return Cause.POOL_FULL
    if isinstance(exc, ConnectionRefusedError):
        return Cause.CONNECT_REFUSED
    if isinstance(exc, ssl.SSLCertVerificationError):
        return Cause.IDENTITY
    return Cause.CONNECT_TIMEOUT if isinstance(exc, TimeoutError) else Cause.CONNECT_FAILED
