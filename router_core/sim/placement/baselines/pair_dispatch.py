"""``pair-1.0`` in a simulated fleet: a scheduler and a proxy on each host, job events pushed to all, GPUs polled.

Requests run through their own dispatch loop, not ours: no admission, no queue, no filters but owning the model. What
their documents leave open is fixed here: one way round through the scheduler takes 5 ms, events reach a peer a
millisecond after the link's delay and are never lost, GPU samples read 100 while anything runs in the engine. Silent
origins do not occur, so nothing is inferred of them.
"""

from collections.abc import Callable
from functools import partial
from random import Random

from msgspec import Struct

from router_core.sim.placement.baselines import pair_exchange as px
from router_core.sim.placement.baselines.pair import JobEvent, Proxy, Scheduler, Snapshot, owns
from router_core.sim.placement.engine import Job
from router_core.sim.placement.fleet_world import Ask, FleetWorld

_UP_MS = 2
_DOWN_MS = 3
_POLL_MS, _POLL_JITTER_MS = 2_000, 250
_SAMPLE_MS = 1_000
_RANK_MS = 1_000
_JITTER = (0.75, 1.25)


class _Host(Struct, kw_only=True):
    """What runs of it on one host. ``uuid`` hides the host's place among the others."""

    uuid: str
    scheduler: Scheduler
    proxy: Proxy
    gpu_percent: int = 0
    gpu_ms: int = 0


class PairDispatch:
    """A dispatch. ``kind`` is the engine facade all requests use."""

    def __init__(self, world: FleetWorld, rng: Random, kind: str = "llamacpp") -> None:
        self.world = world
        self.kind = kind
        self.rng = rng
        uuids = [f"{rng.getrandbits(128):032x}" for _ in world.nodes]
        self.hosts = [_Host(uuid=uuid, scheduler=Scheduler(uuids), proxy=Proxy()) for uuid in uuids]
        self.place = {uuid: index for index, uuid in enumerate(uuids)}
        self._seq = 0
        for index in range(len(self.hosts)):
            self._every(_SAMPLE_MS, 0, partial(self._sample, index))
            self._every(_RANK_MS, 0, partial(self._rank, index))
            for other in range(len(self.hosts)):
                self._every(_POLL_MS, _POLL_JITTER_MS, partial(self._poll, index, other))

    def start(self, ask: Ask) -> None:
        """A request has arrived at its client's proxy."""
        _PairFlight(self, ask).begin()

    def owners(self, model: str) -> list[str]:
        """Nodes whose list holds ``model``."""
        return [
            host.uuid
            for host, node in zip(self.hosts, self.world.nodes, strict=True)
            if owns(self.kind, node.engine.models, model)
        ]

    def tell(self, origin: int, number: int, state: str, node: str | None) -> None:
        """A job event of ``origin`` goes to its own scheduler and to every peer's."""
        self._seq += 1
        event = JobEvent(key=(self.hosts[origin].uuid, number), state=state, node=node, seq=self._seq)
        for index in range(len(self.hosts)):
            delay_ms = _UP_MS if index == origin else self.world.wire.link_ms + 1
            self.world.timeline.after(delay_ms, partial(self._told, index, event))

    def _told(self, index: int, event: JobEvent) -> None:
        if self.hosts[index].scheduler.told(event, self.world.now):
            self._rank(index)

    def _rank(self, index: int) -> None:
        host = self.hosts[index]
        snapshot = host.scheduler.rank(self.world.now)
        if snapshot is not None:
            self.world.timeline.after(_DOWN_MS, partial(_apply, host.proxy, snapshot))

    def _sample(self, index: int) -> None:
        host = self.hosts[index]
        host.gpu_percent = 100 if self.world.nodes[index].engine.running else 0
        host.gpu_ms = self.world.now

    def _poll(self, index: int, other: int) -> None:
        source = self.hosts[other]
        age_ms = self.world.now - source.gpu_ms
        self.hosts[index].scheduler.telemetry.sample(source.uuid, source.gpu_percent, age_ms, self.world.now)
        self._rank(index)

    def _every(self, period_ms: int, jitter_ms: int, call: Callable[[], None]) -> None:
        def tick() -> None:
            call()
            spread = self.rng.randint(-jitter_ms, jitter_ms) if jitter_ms else 0
            self.world.timeline.after(period_ms + spread, tick)

        self.world.timeline.at(self.rng.randrange(period_ms), tick)


def _apply(proxy: Proxy, snapshot: Snapshot) -> None:
    proxy.apply(snapshot)


class _PairFlight:
    """One request in its dispatch loop."""

    def __init__(self, dispatch: PairDispatch, ask: Ask) -> None:
        self._dispatch = dispatch
        self._world = dispatch.world
        self._ask = ask
        self._origin = ask.arrival.router
        self._jobs: dict[int, tuple[int, Job]] = {}
        self._machine = px.PairExchange(
            dispatch.hosts[self._origin].proxy,
            partial(dispatch.owners, ask.arrival.model),
            _always,
            lambda: dispatch.rng.uniform(*_JITTER),
            self._world.now,
        )

    def begin(self) -> None:
        self._perform(self._machine.begin(self._world.now))

    def _perform(self, actions: list[px.Action]) -> None:
        world = self._world
        for action in actions:
            if isinstance(action, px.Dial):
                place = self._dispatch.place[action.node]
                delay_ms = self._delay(place)
                world.timeline.after(2 * delay_ms, partial(self._connected, action.attempt))
                world.timeline.after(3 * delay_ms, partial(self._submit, action.attempt, place))
            elif isinstance(action, px.Abandon):
                self._abandon(action.attempt)
            elif isinstance(action, px.Tell):
                self._dispatch.tell(self._origin, self._ask.number, action.state, action.node)
            else:
                world.settle(self._ask, action.status)
        deadline = self._machine.deadline
        if deadline is not None and self._machine.phase is not px.Phase.STREAMING:
            world.timeline.at(deadline, partial(self._passed, deadline))

    def _passed(self, at: int) -> None:
        if self._machine.deadline == at:
            self._perform(self._machine.passed(at))

    def _connected(self, attempt: int) -> None:
        self._perform(self._machine.connected(attempt, self._world.now))

    def _submit(self, attempt: int, place: int) -> None:
        arrival = self._ask.arrival
        if attempt != self._machine.attempt or self._machine.phase is px.Phase.ENDED:
            return
        job = Job(
            model=arrival.model,
            prompt=arrival.prompt,
            output=arrival.output,
            on_first=lambda: self._world.timeline.after(
                self._delay(place), partial(self._first, attempt, place)
            ),
            on_end=lambda: self._world.timeline.after(self._delay(place), partial(self._ended, attempt)),
            blocks=arrival.blocks,
        )
        self._jobs[attempt] = (place, job)
        self._world.nodes[place].engine.submit(job)

    def _first(self, attempt: int, place: int) -> None:
        actions = self._machine.headers(attempt, 200, self._world.now)
        actions += self._machine.first_byte(attempt, self._world.now)
        if self._machine.phase is px.Phase.STREAMING and self._ask.first_ms is None:
            self._ask.first_ms, self._ask.node = self._world.now, place
            self._ask.cold = self._jobs[attempt][1].cold
        self._perform(actions)

    def _ended(self, attempt: int) -> None:
        self._perform(self._machine.ended(attempt, self._world.now))

    def _abandon(self, attempt: int) -> None:
        if attempt in self._jobs:
            place, job = self._jobs[attempt]
            self._world.nodes[place].engine.cancel(job)

    def _delay(self, place: int) -> int:
        return 0 if place == self._origin else self._world.wire.link_ms


def _always(_node: str) -> bool:
    return True
