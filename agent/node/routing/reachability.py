"""Whether members take requests where they say they do: what connecting to their ingresses showed.

A link says nothing about it: it runs over another port, and often was dialled from the other side. Each address is
judged by its own last outcome, a member by the last try at all of its addresses. Facts only, of this node alone, never
gossiped; they end with the next connection that stands, and with a new link.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from agent.effects.clock import Clock
from agent.mesh.addresses import PeerAddress
from router_core.ids import Id16, NodeId, id16_of, id32_of
from router_core.router.failure import Cause

FAILED_MS: Final = 60_000
"""How long an address that failed comes after the others."""
NO_ADDRESS: Final = "no_address"

_WHY: Final = {
    Cause.CONNECT_REFUSED: "refused",
    Cause.CONNECT_TIMEOUT: "timed_out",
    Cause.CONNECT_FAILED: "unreachable",
    Cause.IDENTITY: "identity_mismatch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreached:
    """``why`` in a word, ``at`` the address that was best, None without any; ``since_ms`` is boot time."""

    why: str
    at: PeerAddress | None
    since_ms: int


class Reach:
    """Mutable notes by member. Subscribers hear of every member whose notes changed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unreached: dict[NodeId, Unreached] = {}
        self._reached_ms: dict[NodeId, int] = {}
        self._failed: dict[NodeId, dict[PeerAddress, int]] = {}
        self._subscribers: list[Callable[[NodeId], None]] = []

    def subscribe(self, changed: Callable[[NodeId], None]) -> None:
        self._subscribers.append(changed)

    @property
    def unreachable(self) -> frozenset[Id16]:
        """Members that take no requests from here."""
        return frozenset(id16_of(id32_of(node)) for node in self._unreached)

    def of(self, node: NodeId) -> Unreached | None:
        """Why ``node`` takes no requests from here; None if it does, as far as is known."""
        return self._unreached.get(node)

    def reached_ms(self, node: NodeId) -> int | None:
        """When a connection to ``node`` last stood, boot ms; None if never since its last link was made."""
        return self._reached_ms.get(node)

    def failed_at(self, node: NodeId) -> Collection[PeerAddress]:
        """The addresses of ``node`` that failed lately and did not work since, longest-ago failure first."""
        return self._failed.get(node, {})

    def heard(self, node: NodeId, ip: str, port: int, cause: Cause | None) -> None:
        """Connecting to one address of ``node`` failed for ``cause``, or stands (None)."""
        at, failed = PeerAddress(ip_address(ip), port), self._failed.setdefault(node, {})
        known = failed.pop(at, None) is not None
        if cause is None:
            self._reached_ms[node] = self._clock.boot_ms()
            if self._unreached.pop(node, None) is not None or known:
                self._changed(node)
        elif cause in _WHY:
            failed[at] = self._clock.boot_ms()
            if not known:
                self._changed(node)

    def failed(self, node: NodeId, cause: Cause, addresses: Collection[PeerAddress]) -> None:
        """Within one attempt no address of ``node`` could be connected."""
        why = _WHY.get(cause)
        if why is None:
            return
        now = self._clock.boot_ms()
        failed = self._failed.setdefault(node, {})
        for at in addresses:
            failed.setdefault(at, now)
        self._note(node, why, next(iter(addresses), None))

    def no_address(self, node: NodeId) -> None:
        """``node`` told no address that may be dialled."""
        self._note(node, NO_ADDRESS, None)

    def _note(self, node: NodeId, why: str, at: PeerAddress | None) -> None:
        before = self._unreached.get(node)
        since_ms = self._clock.boot_ms() if before is None else before.since_ms
        self._unreached[node] = Unreached(why=why, at=at, since_ms=since_ms)
        self._reached_ms.pop(node, None)
        if before is None:
            self._changed(node)

    def forget(self, node: NodeId) -> None:
        """It is elsewhere, or another process: what was seen says nothing any more."""
        held = [notes.pop(node, None) for notes in (self._unreached, self._reached_ms, self._failed)]
        if any(each is not None for each in held):
            self._changed(node)

    def keep(self, nodes: Collection[NodeId]) -> None:
        """Forget everybody else, and failures of single addresses that were long ago."""
        for node in {*self._unreached, *self._reached_ms, *self._failed}.difference(nodes):
            self.forget(node)
        since = self._clock.boot_ms() - FAILED_MS
        for node, failed in self._failed.items():
            old = [at for at, failed_ms in failed.items() if failed_ms <= since]
            for at in old:
                del failed[at]
            if old:
                self._changed(node)

    def _changed(self, node: NodeId) -> None:
        for subscriber in self._subscribers:
            subscriber(node)
