"""What is in hand: requests in flight per local endpoint, requests heard from routers, requests sent out.

Counts for the node's volatile record and for admission. A ticket is given back exactly once, by whoever holds it
at the end. Refuses to know what a request is.
"""

import math
from collections import OrderedDict, defaultdict

from agent.effects.clock import Clock
from router_core import limits
from router_core.record.state import U16_MAX, U32_MAX, Dispatch, SeenRouter

_TAU_MS = 30_000.0
_LEAST_LEFT = 0.1


class Ticket:
    """One request at one local endpoint; ``service_ms`` is what it is predicted to take alone."""

    __slots__ = ("endpoint", "service_ms", "since_ms")

    def __init__(self, endpoint: str, service_ms: float, since_ms: int) -> None:
        self.endpoint = endpoint
        self.service_ms = service_ms
        self.since_ms = since_ms


class LocalWork:
    """Requests in flight through this node to its own endpoints, and all requests in the relay's hands."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at: defaultdict[str, set[Ticket]] = defaultdict(set)
        self.requests = 0

    def enter(self, endpoint: str, service_ms: float) -> Ticket:
        ticket = Ticket(endpoint, service_ms, self._clock.boot_ms())
        self._at[endpoint].add(ticket)
        return ticket

    def leave(self, ticket: Ticket) -> None:
        tickets = self._at[ticket.endpoint]
        tickets.discard(ticket)
        if not tickets:
            del self._at[ticket.endpoint]

    def ours(self, endpoint: str) -> int:
        """Requests in flight at ``endpoint`` through this relay."""
        return min(len(self._at.get(endpoint, ())), U16_MAX)

    def work_ds(self, endpoint: str) -> int:
        """Predicted service time outstanding, 0.1 s: of each request what is left, at least a tenth of it."""
        now = self._clock.boot_ms()
        left = (
            max(_LEAST_LEFT * ticket.service_ms, ticket.service_ms - (now - ticket.since_ms))
            for ticket in self._at.get(endpoint, ())
        )
        return min(round(sum(left) / 100), U32_MAX)

    @property
    def in_flight(self) -> int:
        """Requests in flight at all local endpoints."""
        return sum(len(tickets) for tickets in self._at.values())


class SeenRouters:
    """The newest requests heard from each router's process life; the least recently heard is forgotten first."""

    def __init__(self, most: int = limits.SEEN) -> None:
        self._most = most
        self._rows: OrderedDict[tuple[bytes, int], tuple[int, int]] = OrderedDict()

    def note(self, router8: bytes, inst: int, seq: int) -> None:
        """A request was accepted."""
        highest, accepted = self._rows.pop((router8, inst), (0, 0))
        self._rows[router8, inst] = max(highest, seq), min(accepted + 1, U32_MAX)
        if len(self._rows) > self._most:
            self._rows.popitem(last=False)

    def rows(self) -> tuple[SeenRouter, ...]:
        return tuple(
            SeenRouter(router=router8, inst=inst, seq=seq, accepted=accepted)
            for (router8, inst), (seq, accepted) in self._rows.items()
        )


class DispatchRate:
    """What this router sends out: a total, and rates smoothed over 30 s."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at_ms = clock.boot_ms()
        self._rps = 0.0
        self._work = 0.0
        self.total = 0

    def note(self, service_s: float) -> None:
        """A request of ``service_s`` predicted seconds was dispatched."""
        self._decay()
        self.total += 1
        self._rps += 1000.0 / _TAU_MS
        self._work += service_s * 1000.0 / _TAU_MS

    def row(self) -> Dispatch:
        self._decay()
        return Dispatch(
            total=min(self.total, U32_MAX),
            rps_c=min(round(self._rps * 100), U32_MAX),
            work_c=min(round(self._work * 100), U32_MAX),
        )

    def _decay(self) -> None:
        now = self._clock.boot_ms()
        kept = math.exp(-(now - self._at_ms) / _TAU_MS)
        self._at_ms = now
        self._rps *= kept
        self._work *= kept
