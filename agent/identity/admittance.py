"""How many connections there may be, by what is known of them: an address before the handshake, an id after it.

One ``Admittance`` is shared by all listeners of a daemon, so that descriptors are counted once. Connections whose
handshake is not over are counted by port: those of strangers on one say nothing about the other, and room is kept for
addresses that members are known to have. Whoever waits longest gives way.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Final

from agent.identity.routes import Port
from router_core import limits
from router_core.ids import Id16

DESCRIPTOR_RESERVE: Final = 64
PER_ID: Final = {Port.LINK: limits.LINKS_PER_ID, Port.INGRESS: limits.INGRESS_PER_ID}
PER_PORT: Final = {Port.INGRESS: limits.INGRESS_CONNECTIONS}
"""Authenticated connections of all members together. Links need no such bound: a roster has few members."""


class Refusal(Enum):
    """Why a connection was not taken, or ended before it was used. Fit for a metric label."""

    PER_IP = "per_ip"
    UNAUTHENTICATED = "unauthenticated"
    DESCRIPTORS = "descriptors"
    HANDSHAKE = "handshake"
    STRANGER = "stranger"
    PER_ID = "per_id"
    PER_PORT = "per_port"


class HalfOpen:
    """A connection whose handshake is not over. ``since`` is the listener's time in seconds; ``give_way`` ends it."""

    __slots__ = ("give_way", "ip", "is_known", "port", "since")

    def __init__(
        self, port: Port, ip: str, since: float, give_way: Callable[[], None], *, is_known: bool
    ) -> None:
        self.port = port
        self.ip = ip
        self.since = since
        self.give_way = give_way
        self.is_known = is_known


class Admittance:
    """Counts of one daemon; ``most`` is how many sockets its listeners may hold together."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most if most is not None else _room(_descriptors())
        self._half_open: dict[Port, dict[HalfOpen, None]] = {port: {} for port in Port}
        self._live: dict[tuple[Port, Id16], set[asyncio.Transport]] = {}
        self._open: Counter[Port] = Counter()

    @property
    def pending(self) -> int:
        """Connections whose handshake is not over."""
        return sum(map(len, self._half_open.values()))

    def saturated(self, port: Port) -> Refusal | None:
        """Why nothing at all should be accepted on ``port`` now, if so."""
        if len(self._half_open[port]) >= limits.UNAUTHENTICATED + limits.UNAUTHENTICATED_MEMBERS:
            return Refusal.UNAUTHENTICATED
        if self.pending + self._open.total() >= self._most:
            return Refusal.DESCRIPTORS
        return None

    def begin(
        self,
        port: Port,
        ip: str,
        now: float,
        *,
        give_way: Callable[[], None],
        is_known: Callable[[], bool] = lambda: False,
    ) -> HalfOpen | Refusal:
        """Count a connection from ``ip`` until ``end``, or say why not.

        Where there is no room, the oldest of its kind gives way, if it had time enough for any handshake. ``is_known``,
        whether a member is known to have that address, is asked only where it matters.
        """
        waiting = self._half_open[port]
        of_ip = [each for each in waiting if each.ip == ip]
        if len(of_ip) >= limits.UNAUTHENTICATED_PER_IP and not self._make_room(of_ip, now):
            return Refusal.PER_IP
        known = False
        if len(waiting) >= limits.UNAUTHENTICATED:
            known = is_known()
            if not known and not self._make_room([each for each in waiting if not each.is_known], now):
                return Refusal.UNAUTHENTICATED
        begun = HalfOpen(port, ip, now, give_way, is_known=known)
        waiting[begun] = None
        return begun

    def _make_room(self, waiting: list[HalfOpen], now: float) -> bool:
        """``waiting`` is in the order of arrival."""
        if not waiting or now - waiting[0].since < limits.HALF_OPEN_LEAST / 1_000:
            return False
        self.end(waiting[0])
        waiting[0].give_way()
        return True

    def end(self, half_open: HalfOpen) -> None:
        """Its handshake is over, one way or the other; saying so twice is harmless."""
        self._half_open[half_open.port].pop(half_open, None)

    def register(self, port: Port, id16: Id16, transport: asyncio.Transport) -> Refusal | None:
        """Count ``transport`` as a live connection of ``id16`` until ``release``, or say why not."""
        if port in PER_PORT and self._open[port] >= PER_PORT[port]:
            return Refusal.PER_PORT
        live = self._live.setdefault((port, id16), set())
        if len(live) >= PER_ID[port]:
            return Refusal.PER_ID
        live.add(transport)
        self._open[port] += 1
        return None

    def release(self, port: Port, id16: Id16, transport: asyncio.Transport) -> None:
        live = self._live.get((port, id16))
        if live is None or transport not in live:
            return
        live.remove(transport)
        self._open[port] -= 1
        if not live:
            del self._live[port, id16]

    def holders(self, port: Port, id16: Id16 | None = None) -> list[tuple[Id16, asyncio.Transport]]:
        """The live connections of ``id16`` on ``port``, or of everybody."""
        return [
            (holder, transport)
            for (where, holder), live in self._live.items()
            if where is port and id16 in (None, holder)
            for transport in live
        ]

    def count(self, id16: Id16) -> int:
        """Live connections of ``id16`` on every port."""
        return sum(len(self._live.get((port, id16), ())) for port in Port)

    def abort(self, id16: Id16) -> int:
        """Abort every connection of ``id16`` on every port; how many there were."""
        found = [transport for port in Port for transport in self._live.get((port, id16), ())]
        for transport in found:
            transport.abort()
        return len(found)

    def live(self, port: Port) -> int:
        """Authenticated connections on ``port``."""
        return self._open[port]


Refused = Callable[[Port, Refusal], None]
"""Told of each connection refused; must return at once."""


def _room(descriptors: int) -> int:
    """Of few descriptors the reserve leaves members a part all the same."""
    return max(descriptors - DESCRIPTOR_RESERVE, descriptors // 4)


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else limits.API_CONNECTIONS * 8
