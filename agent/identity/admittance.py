"""How many connections there may be, by what is known of them: an address before the handshake, an id after it.

One ``Admittance`` is shared by all listeners of a daemon, so that descriptors are counted once.
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


class Admittance:
    """Counts of one daemon; ``most`` is how many sockets its listeners may hold together."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most if most is not None else _descriptors() - DESCRIPTOR_RESERVE
        self._by_ip: Counter[str] = Counter()
        self._pending = 0
        self._live: dict[tuple[Port, Id16], set[asyncio.Transport]] = {}
        self._open: Counter[Port] = Counter()

    @property
    def pending(self) -> int:
        """Connections whose handshake is not over."""
        return self._pending

    def saturated(self) -> Refusal | None:
        """Why nothing at all should be accepted now, if so."""
        if self._pending >= limits.UNAUTHENTICATED:
            return Refusal.UNAUTHENTICATED
        if self._pending + self._open.total() >= self._most:
            return Refusal.DESCRIPTORS
        return None

    def begin(self, ip: str) -> Refusal | None:
        """Count a connection from ``ip`` until ``end``, or say why not."""
        if self._by_ip[ip] >= limits.UNAUTHENTICATED_PER_IP:
            return Refusal.PER_IP
        self._by_ip[ip] += 1
        self._pending += 1
        return None

    def end(self, ip: str) -> None:
        """The handshake of a connection from ``ip`` is over, one way or the other."""
        self._pending -= 1
        self._by_ip[ip] -= 1
        if not self._by_ip[ip]:
            del self._by_ip[ip]

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


def _descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else limits.API_CONNECTIONS * 8
