"""The connections of one listener, and accepting them on the plain local one.

At its cap the connection that has been idle longest makes room for a new one; where none is idle, nobody is accepted
until somebody leaves. Running out of descriptors pauses instead of spinning.
Refuses to know TLS: the port that peers reach is listened on elsewhere and only keeps its roll here.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from agent.effects.clock import Clock
from agent.effects.descriptors import NOT_LISTENING, OUT_OF_DESCRIPTORS
from agent.effects.tasks import Tasks
from agent.effects.turns import Turns
from agent.relay.http.frontend import Client
from router_core import limits

_TICK_S = 1.0
_ROOM_S = 0.1
"""A connection may become idle at any moment."""
_BACKLOG = 128


class Roll:
    """Live connections of one listener. ``run`` has each look at its deadlines about once a second; while there are
    none, it sleeps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._live: set[Client] = set()
        self._left = asyncio.Event()
        self._peopled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Client]:
        return iter(tuple(self._live))

    def join(self, connection: Client) -> None:
        self._live.add(connection)
        self._peopled.set()

    def leave(self, connection: Client) -> None:
        self._live.discard(connection)
        self._left.set()
        if not self._live:
            self._peopled.clear()

    def make_room(self) -> bool:
        """Close the connection that has been idle longest; False if none is."""
        return close_longest_idle(self._live)

    async def someone_left(self, within_s: float) -> None:
        """Wait until a connection has ended, and no longer than ``within_s``."""
        self._left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._left.wait()

    def close_idle(self) -> None:
        """Close each connection when its request, if any, is answered."""
        for connection in self:
            connection.close_when_idle()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await self._peopled.wait()
            await asyncio.sleep(_TICK_S)
            now = self._clock.boot_ms()
            for connection in self:
                connection.tick(now)


def close_longest_idle(connections: Iterable[Client]) -> bool:
    """Close the one that has had no request for longest; False if each has one."""
    idle = [(since, connection) for connection in connections if (since := connection.idle_since) is not None]
    if not idle:
        return False
    min(idle, key=itemgetter(0))[1].make_way()
    return True


class Acceptor:
    """Accepts on ``sock`` (bound; made listening here), at most ``most`` connections at a time. ``exhausted`` hears each
    time that accepting pauses because nothing more can be opened, ``full`` each time that a connection meets the cap, and
    whether an idle one makes room."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        roll: Roll,
        *,
        most: int = limits.API_CONNECTIONS,
        exhausted: Callable[[], None] = lambda: None,
        full: Callable[[bool], None] = lambda _made_room: None,
    ) -> None:
        sock.setblocking(False)
        keep_small(sock)
        sock.listen(_BACKLOG)
        self._sock = sock
        self._make = make
        self._roll = roll
        self._most = most
        self._exhausted = exhausted
        self._full = full
        self._turns = Turns(sock)

    @property
    def address(self) -> tuple[str, int]:
        """IP and port it listens on."""
        ip, port = self._sock.getsockname()[:2]
        return ip, port

    def is_stuck(self, now: int, after_ms: int) -> bool:
        """True if somebody waits to be accepted, has for ``after_ms``, and there is room."""
        return self._turns.is_stuck(now, after_ms)

    async def run(self, tasks: Tasks) -> None:
        """Accept until cancelled; then the listening socket is closed, connections are not."""
        loop = asyncio.get_running_loop()
        ticker = tasks.spawn(self._roll.run(), "relay-tick")
        try:
            while True:
                self._turns.turn()
                try:
                    sock, _ = await loop.sock_accept(self._sock)
                except OSError as fault:
                    # Anything else is one connection that was gone before it was taken (accept(2)).
                    if fault.errno in NOT_LISTENING:
                        raise
                    if fault.errno in OUT_OF_DESCRIPTORS:
                        self._exhausted()
                        self._turns.hold()
                        await asyncio.sleep(limits.ACCEPT_PAUSE / 1000)
                    continue
                if len(self._roll) >= self._most:
                    self._turns.hold()
                    await self._room()
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.connect_accepted_socket(self._make, sock)
                except OSError:
                    sock.close()
        finally:
            ticker.cancel()
            self._sock.close()

    async def _room(self) -> None:
        """Return when there is room for one more."""
        told = False
        while len(self._roll) >= self._most:
            made = self._roll.make_room()
            if made or not told:
                told = True
                self._full(made)
            await self._roll.someone_left(_ROOM_S)


def keep_small(sock: socket.socket) -> None:
    """Bound what the kernel keeps for one turn: libuv reads a socket up to 32 times in a row while its buffers fill. What is
    accepted on a listening socket inherits it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.RECEIVE_BUFFER)


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
