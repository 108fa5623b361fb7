"""Accepting connections for one listener, with a cap: past it nobody is accepted until somebody leaves.

One accept task, so that the address is known before a TLS handshake, a failed handshake is an exception to count
and not a line in a log, and running out of descriptors pauses instead of spinning. Also the one clock tick of the
listener's connections.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.relay.listener import ServerConnection
from router_core import limits

_TICK_S = 1.0
_SHUTDOWN_S = 2.0
_BACKLOG = 128


class Acceptor:
    """Listens on ``sock`` (bound, listening is done here) and makes a connection per client.

    ``most`` caps live connections, ``most_per_ip`` those of one address beyond loopback. ``failed_handshakes``
    counts.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], ServerConnection],
        *,
        clock: Clock,
        most: int,
        most_per_ip: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._make = make
        self._clock = clock
        self._most = most
        self._most_per_ip = most_per_ip
        self._tls = tls
        self._live: set[ServerConnection] = set()
        self._shaking = 0
        self._room = asyncio.Event()
        self._room.set()
        self.failed_handshakes = 0
        self.refused_connections = 0

    @property
    def address(self) -> tuple[str, int]:
        """IP and port the listener is bound to."""
        ip, port = self._sock.getsockname()[:2]
        return ip, port

    @property
    def live(self) -> frozenset[ServerConnection]:
        return frozenset(self._live)

    async def run(self, tasks: Tasks) -> None:
        """Accept until cancelled; then the listening socket is closed, connections are not."""
        loop = asyncio.get_running_loop()
        ticker = tasks.spawn(self._tick(), "relay-tick")
        try:
            while True:
                await self._room.wait()
                try:
                    sock, address = await loop.sock_accept(self._sock)
                except OSError:
                    await asyncio.sleep(limits.ACCEPT_PAUSE / 1000)
                    continue
                if not self._admits(str(address[0])):
                    self.refused_connections += 1
                    sock.close()
                    continue
                self._shaking += 1
                self._count()
                tasks.spawn(self._greet(sock), "relay-greet")
        finally:
            ticker.cancel()
            self._sock.close()

    async def _greet(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await loop.connect_accepted_socket(self._make, sock)
            else:
                keep_watch(sock)
                await loop.connect_accepted_socket(
                    self._make,
                    sock,
                    ssl=self._tls,
                    ssl_handshake_timeout=limits.TLS_HANDSHAKE / 1000,
                    ssl_shutdown_timeout=_SHUTDOWN_S,
                )
        except (OSError, ssl.SSLError):
            self.failed_handshakes += 1
            sock.close()
        finally:
            self._shaking -= 1
            self._count()

    def joined(self, connection: ServerConnection) -> None:
        """To be called by the front when a connection was made."""
        self._live.add(connection)
        self._count()

    def left(self, connection: ServerConnection) -> None:
        """To be called by the front when a connection is gone."""
        self._live.discard(connection)
        self._count()

    def _count(self) -> None:
        if len(self._live) + self._shaking < self._most:
            self._room.set()
        else:
            self._room.clear()

    def _admits(self, ip: str) -> bool:
        if ip.startswith("127.") or ip == "::1":
            return True
        return sum(connection.peer_ip() == ip for connection in self._live) < self._most_per_ip

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now = self._clock.boot_ms()
            for connection in tuple(self._live):
                connection.tick(now)


def keep_watch(sock: socket.socket) -> None:
    """Notice a silent peer within about 5 s: keepalive 2/1/3, user timeout 5 s, where the host has them."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 5_000),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
