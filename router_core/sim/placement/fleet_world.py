"""A fleet at virtual time: hosts with engines, their routers, the pictures that travel between them, and requests.

Owns the clock, the wire (a fixed delay), publication (every period and, if asked, at once on events, as the mesh
allows), and what became of each request. Rules: everything random comes from the seed; after the last answer nothing
may be left in flight anywhere. Refuses to choose: a ``Dispatch`` does.
"""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from router_core.mesh.links.bucket import Bucket
from router_core.placement.candidates.fleet import Fleet
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.mesh import MeshPolicy
from router_core.policy.placement import PlacementPolicy
from router_core.record.event import is_event
from router_core.record.membership import Liveness, ViewChange
from router_core.record.state import Static, Volatile
from router_core.sim.placement.arrivals import Arrival
from router_core.sim.placement.engine import Engine
from router_core.sim.placement.fleet_node import ENDPOINT, NodeSpec, SimNode
from router_core.sim.placement.fleet_router import SimRouter
from router_core.sim.timeline import Timeline

DRAIN_MS = 4 * 3_600_000
_STATIC_MS = 30_000
_LEAD_PERIODS = 3
_BYTES_PER_TOKEN = (3.2, 4.4)
_SUSPECT_MS = 6_000
"""After which silence of a node the mesh suspects it, at the latest (a cut without a reset)."""
_REVIEW_MS = 1_000


class WireSpec(Struct, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """How pictures and requests travel: publish period, delay of a record, one way of a request, all in ms.

    A refusal brings its host's newest record along. With ``urgent`` hosts also tell events at once, with ``replies``
    answers bring a record along, too: as the daemon does; without them pictures are as old as the period makes them.
    """

    period_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 2_000
    record_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 50
    link_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 1
    urgent: bool = False
    replies: bool = False


class Ask(Struct, kw_only=True, eq=False):
    """One request on its way, and what became of it. Times are ms, None until reached. ``status`` 0: unanswered.

    ``cold`` if it waited for a load, ``refusals`` by ingresses, ``away`` if it was served by another host than the
    client's.
    """

    number: int
    arrival: Arrival
    text_bytes: int
    node: int | None = None
    first_ms: int | None = None
    end_ms: int | None = None
    status: int = 0
    cold: bool = False
    refusals: int = 0
    retries: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, None if there was none."""
        return None if self.first_ms is None else (self.first_ms - self.arrival.at_ms) / 1000.0

    @property
    def total_s(self) -> float | None:
        """Seconds from arrival to the end of a good answer, None without one."""
        return (
            None if self.end_ms is None or self.status != 200 else (self.end_ms - self.arrival.at_ms) / 1000.0
        )

    @property
    def away(self) -> bool:
        """Served by another host than the client's."""
        return self.node is not None and self.node != self.arrival.router


class FleetWorld:
    """``nodes[i]`` has router ``routers[i]``. ``run`` plays arrivals through ``start``, given by a dispatch."""

    def __init__(
        self,
        specs: Sequence[NodeSpec],
        wire: WireSpec,
        seed: int,
        *,
        policy: PlacementPolicy | None = None,
        exchange: ExchangePolicy | None = None,
    ) -> None:
        self.timeline = Timeline()
        self.wire = wire
        self.policy = policy or PlacementPolicy()
        self.exchange = exchange or ExchangePolicy()
        self.rng = Random(seed)
        salt = f"{self.rng.getrandbits(64):x}"
        self.nodes = [SimNode(spec, Engine(self.timeline, spec.engine, spec.warm), salt) for spec in specs]
        self.place = {node.key: index for index, node in enumerate(self.nodes)}
        members = {node.member.id16: node.member for node in self.nodes}
        self.routers = [
            SimRouter(
                node,
                members,
                self.policy,
                self.exchange,
                self.timeline,
                Random(self.rng.getrandbits(64)),
                index,
            )
            for index, node in enumerate(self.nodes)
        ]
        self.asks: list[Ask] = []
        self.newest: list[ViewChange | None] = [None] * len(specs)
        self._static: list[tuple[int, Static] | None] = [None] * len(specs)
        self._events = [Bucket(MeshPolicy.urgent_per_s_m, MeshPolicy.urgent_burst, 0) for _ in specs]
        self._open = 0
        self._frozen: set[int] = set()

    @property
    def now(self) -> int:
        return self.timeline.now

    def run(self, arrivals: Iterable[Arrival], start: Callable[[Ask], None]) -> list[Ask]:
        """Play everything to its end; what became of each request, in order of arrival."""
        for index in range(len(self.nodes)):
            self.publish(index)
            self.timeline.at(self.rng.randrange(self.wire.period_ms), self._ticking(index))
            if self.wire.urgent:
                self.nodes[index].engine.changed = self._watching(index)
        lead_ms = _LEAD_PERIODS * self.wire.period_ms
        for number, arrival in enumerate(arrivals):
            shifted = Arrival(
                at_ms=arrival.at_ms + lead_ms,
                router=arrival.router,
                model=arrival.model,
                prompt=arrival.prompt,
                output=arrival.output,
                blocks=arrival.blocks,
            )
            text_bytes = round(arrival.prompt * self.rng.uniform(*_BYTES_PER_TOKEN))
            ask = Ask(number=number, arrival=shifted, text_bytes=text_bytes)
            self.asks.append(ask)
            self._open += 1
            self.timeline.at(shifted.at_ms, _starting(start, ask))
        end = self.timeline.now + DRAIN_MS + max((ask.arrival.at_ms for ask in self.asks), default=0)
        while self._open and self.timeline.now < end:
            self.timeline.run_until(self.timeline.now + 1_000)
        return self.asks

    def settle(self, ask: Ask, status: int) -> None:
        """The client has its end of ``ask``."""
        ask.status = status
        ask.end_ms = self.now
        self._open -= 1

    def fleet(self, index: int) -> Fleet:
        """What router ``index`` believes now."""
        return self.routers[index].fleet(self.now)

    def freeze(self, index: int) -> None:
        """Node ``index`` stops whole: it accepts, and neither works nor tells anything any more. The others suspect it
        after a while, and look again and again whether its requests could go elsewhere."""
        if index not in self._frozen:
            self._frozen.add(index)
            self.nodes[index].engine.frozen = True
            self.timeline.after(_SUSPECT_MS, lambda: self._suspect(index))

    def _suspect(self, index: int) -> None:
        last = self.newest[index]
        if last is not None:
            verdict = replace(last, state=Liveness.SUSPECT, seq=last.seq + 1)
            for other, router in enumerate(self.routers):
                if other != index:
                    router.heard(verdict)
        self._review()

    def _review(self) -> None:
        for router in self.routers:
            for waiter in tuple(router.waiting):
                waiter.review()
        if self._open:
            self.timeline.after(_REVIEW_MS, self._review)

    def publish(self, index: int) -> None:
        """Node ``index`` states itself: its own router knows at once, the others when the record arrives."""
        if index in self._frozen:
            return
        node, now = self.nodes[index], self.now
        known = self._static[index]
        if known is None or now - known[0] >= _STATIC_MS:
            static = node.static(self.routers[index].core.profiles, now)
            known = self._static[index] = (
                now,
                known[1] if known is not None and known[1] == static else static,
            )
        node.seq += 1
        change = ViewChange(
            origin=node.member.id16,
            state=Liveness.FRESH,
            confirmed=True,
            epoch=1,
            inst=index,
            seq=node.seq,
            mono_ms=now,
            base_ms=0,
            due_ms=2 * self.wire.period_ms,
            volatile=self._volatile(index),
            static=known[1],
        )
        self.newest[index] = change
        self.routers[index].heard(change)
        for other, router in enumerate(self.routers):
            if other != index:
                self.timeline.after(self.wire.record_ms, _hearing(router, change))

    def _volatile(self, index: int) -> Volatile:
        """V of node ``index`` as of now."""
        return self.nodes[index].volatile(self.routers[index].core.dispatch.row(self.now), self.now)

    def tell_now(self, index: int) -> ViewChange | None:
        """The newest statement of node ``index``: one of now if the mesh's rate of events allows it."""
        if self._events[index].take(self.now):
            self.publish(index)
        return self.newest[index]

    def leaks(self) -> int:
        """Everything still booked or running; 0 after a complete run."""
        return sum(
            len(router.core.ledger)
            + len(router.core.queue)
            + len(router.core.lateness)
            + len(router.waiting)
            + len(router.core.ledger.owed)
            + node.local.in_flight(ENDPOINT)
            + len(node.engine.running)
            + len(node.engine.queue)
            for router, node in zip(self.routers, self.nodes, strict=True)
        )

    def _ticking(self, index: int) -> Callable[[], None]:
        def tick() -> None:
            self.publish(index)
            self.timeline.after(self.wire.period_ms, tick)

        return tick

    def _watching(self, index: int) -> Callable[[], None]:
        def changed() -> None:
            last = self.newest[index]
            if last is not None and last.volatile is not None:
                self.timeline.at(self.now, lambda: self._tell_event(index))

        return changed

    def _tell_event(self, index: int) -> None:
        """Publish at once if something changed that the mesh calls an event, within its rate limit."""
        last = self.newest[index]
        if last is None or last.volatile is None or not is_event(last.volatile, self._volatile(index)):
            return
        self.tell_now(index)


def _starting(start: Callable[[Ask], None], ask: Ask) -> Callable[[], None]:
    return lambda: start(ask)


def _hearing(router: SimRouter, change: ViewChange) -> Callable[[], None]:
    return lambda: router.heard(change)
