"""The accept task of the ports that peers reach.

It accepts sockets itself and hands each to the loop with the roster's context, because only so is the address
known before the handshake, can accepting pause, and is a failed handshake an exception to count instead of a log
line. Works with any protocol factory, on asyncio and uvloop. The protocol behind it never sees a stranger: the
peer's certificate is looked up before ``connection_made`` is passed on, and the transport is kept under its id so
that a removal can abort it.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Final, Protocol, runtime_checkable

from agent.effects.descriptors import NOT_LISTENING, OUT_OF_DESCRIPTORS
from agent.effects.tasks import Tasks
from agent.effects.turns import Turns
from agent.identity.admittance import Admittance, HalfOpen, Refusal, Refused
from agent.identity.routes import Port
from agent.identity.tls import peer_der
from router_core import limits
from router_core.ids import Id16
from router_core.record.membership import Member

BACKLOG: Final = 128
SHUTDOWN_S: Final = 2.0
REFUSAL_PACE_S: Final = 0.002
_PAUSE_S = limits.ACCEPT_PAUSE / 1000

_Option = tuple[int, str, int]
_TCP = socket.IPPROTO_TCP
_COMMON: Final[tuple[_Option, ...]] = ((_TCP, "TCP_NODELAY", 1), (socket.SOL_SOCKET, "SO_KEEPALIVE", 1))
OPTIONS: Final[dict[Port, tuple[_Option, ...]]] = {
    Port.LINK: (*_COMMON, (_TCP, "TCP_USER_TIMEOUT", 10_000)),
    Port.INGRESS: (
        *_COMMON,
        (_TCP, "TCP_KEEPIDLE", 2),
        (_TCP, "TCP_KEEPINTVL", 1),
        (_TCP, "TCP_KEEPCNT", 3),
        (_TCP, "TCP_USER_TIMEOUT", 5_000),
    ),
}
"""On links a ping finds silence; on the ingress the kernel must, while a first byte is awaited."""

ProtocolFactory = Callable[[], asyncio.Protocol]
Lookup = Callable[[], Mapping[bytes, Member]]
"""The roster's present ``by_der``."""


def tune(sock: socket.socket, port: Port) -> None:
    """Set the TCP options of one connection, as far as the platform has them."""
    for level, name, value in OPTIONS[port]:
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.RECEIVE_BUFFER)


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket on a literal address; an IPv6 one takes IPv6 alone. Raises ``OSError``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


@runtime_checkable
class MayBeIdle(Protocol):
    """A connection that may have nothing to do, and can be closed then for another."""

    @property
    def idle_since(self) -> int | None:
        """Boot ms; None while it has something to do."""

    def make_way(self) -> None:
        """Close it."""


class Listener:
    """One port for members. ``start`` it inside the loop, ``aclose`` it once. ``is_known`` tells whether a member is known
    to have an address."""

    def __init__(
        self,
        port: Port,
        sockets: Sequence[socket.socket],
        factory: ProtocolFactory,
        *,
        context: ssl.SSLContext,
        by_der: Lookup,
        admittance: Admittance,
        tasks: Tasks,
        refused: Refused,
        is_known: Callable[[str], bool] = lambda _ip: False,
        handshake_s: float = limits.TLS_HANDSHAKE / 1000,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._port = port
        self._sockets = tuple(sockets)
        self._turns = {sock: Turns(sock) for sock in self._sockets}
        self._factory = factory
        self._context = context
        self._by_der = by_der
        self._admittance = admittance
        self._tasks = tasks
        self._refused = refused
        self._is_known = is_known
        self._handshake_s = handshake_s
        self._pause_s = pause_s
        self._accepting: list[asyncio.Task[Any]] = []

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens."""
        return [sock.getsockname()[:2] for sock in self._sockets]

    def start(self) -> None:
        """Begin to accept on every socket."""
        for sock in self._sockets:
            name = f"accept {self._port.value}"
            self._accepting.append(self._tasks.spawn(self._accept(sock), name))

    def is_stuck(self, now: int, after_ms: int) -> bool:
        """True if somebody waits to be accepted on any socket, and has for ``after_ms``."""
        return any(turns.is_stuck(now, after_ms) for turns in self._turns.values())

    async def aclose(self) -> None:
        """Stop accepting and close the listening sockets; connections that are up stay."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        turns = self._turns[listening]
        while True:
            turns.turn()
            saturated = self._admittance.saturated(self._port)
            if saturated is not None:
                self._refused(self._port, saturated)
                await asyncio.sleep(self._pause_s)
                continue
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as fault:
                # Anything else is one connection that was gone before it was taken (accept(2)).
                if fault.errno in NOT_LISTENING:
                    raise
                if fault.errno in OUT_OF_DESCRIPTORS:
                    self._refused(self._port, Refusal.DESCRIPTORS)
                    await asyncio.sleep(self._pause_s)
                continue
            if not self._take(sock, address[0]):
                # Strangers that flood the port are let in and refused no faster than that.
                await asyncio.sleep(REFUSAL_PACE_S)

    def _take(self, sock: socket.socket, ip: str) -> bool:
        begun = self._admittance.begin(
            self._port,
            ip,
            asyncio.get_running_loop().time(),
            give_way=partial(_hang_up, sock),
            is_known=lambda: self._is_known(ip),
        )
        if isinstance(begun, Refusal):
            self._refused(self._port, begun)
            sock.close()
            return False
        self._tasks.spawn(self._handshake(sock, begun), f"handshake {self._port.value}")
        return True

    async def _handshake(self, sock: socket.socket, begun: HalfOpen) -> None:
        tune(sock, self._port)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._guarded,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_s,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except (TimeoutError, OSError):
            # ssl.SSLError is an OSError, so is every way a peer can go away.
            self._refused(self._port, Refusal.HANDSHAKE)
            sock.close()
        finally:
            self._admittance.end(begun)

    def _guarded(self) -> asyncio.Protocol:
        return _Guard(self._factory(), self._admit, self._left)

    def _admit(self, transport: asyncio.Transport) -> Id16 | None:
        """The id of a member that may come in now, counted from here on."""
        member = self._by_der().get(peer_der(transport) or b"")
        if member is None:
            self._refused(self._port, Refusal.STRANGER)
            return None
        refusal = self._admittance.register(self._port, member.id16, transport)
        if refusal is not None:
            self._refused(self._port, refusal)
            if not self._make_room(member.id16 if refusal is Refusal.PER_ID else None):
                return None
            if self._admittance.register(self._port, member.id16, transport) is not None:
                return None
        return member.id16

    def _make_room(self, id16: Id16 | None) -> bool:
        """Close the connection of that member (None: of anybody) that has been idle longest; False if none is."""
        idle: list[tuple[int, Id16, asyncio.Transport, _Guard]] = []
        for holder, transport in self._admittance.holders(self._port, id16):
            guard = transport.get_protocol()
            if isinstance(guard, _Guard) and (since := guard.idle_since) is not None:
                idle.append((since, holder, transport, guard))
        if not idle:
            return False
        _, holder, transport, guard = min(idle, key=itemgetter(0))
        self._admittance.release(self._port, holder, transport)
        guard.make_way()
        return True

    def _left(self, id16: Id16, transport: asyncio.Transport) -> None:
        self._admittance.release(self._port, id16, transport)


def _hang_up(sock: socket.socket) -> None:
    """End a connection whose transport is not made yet: it sees the other end go."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Guard(asyncio.Protocol):
    """Stands before a connection's protocol: admits or aborts it, then lets every call through directly."""

    def __init__(
        self,
        inner: asyncio.Protocol,
        admit: Callable[[asyncio.Transport], Id16 | None],
        left: Callable[[Id16, asyncio.Transport], None],
    ) -> None:
        self._inner = inner
        self._admit = admit
        self._left = left
        self._id16: Id16 | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._id16 = self._admit(transport)
        if self._id16 is None:
            transport.abort()
            return
        self._transport = transport
        self.data_received = self._inner.data_received  # type: ignore[method-assign]
        self.eof_received = self._inner.eof_received  # type: ignore[method-assign]
        self._inner.connection_made(transport)

    @property
    def idle_since(self) -> int | None:
        """Since when the connection has had nothing to do, boot ms; None if it has, or if its kind is never idle."""
        return self._inner.idle_since if isinstance(self._inner, MayBeIdle) else None

    def make_way(self) -> None:
        """Close an idle connection, so that another can be had."""
        if isinstance(self._inner, MayBeIdle):
            self._inner.make_way()

    def data_received(self, data: bytes) -> None:
        """Bytes of a connection that was not admitted."""

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._id16 is not None and self._transport is not None:
            self._left(self._id16, self._transport)
            self._transport = None
            self._inner.connection_lost(exc)
