"""Policy ``pair-1.0``: how NVIDIA/Personal-AI-Router 1.0 ranks nodes and picks one, by its public documents.

One origin ranks all nodes by pending jobs and busiest-GPU pressure, blind to models, speeds and memory; per request
the least loaded owner of the model is taken, own reservations since the last ranking included. No code is shared.
Later behaviour of theirs is a new policy, never an edit here. Refuses to dispatch (``pair_dispatch``).
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

FRESH_MS = 10_000
_NEW_WEIGHT = 0.35
_UP = (40.0, 70.0, 85.0)
_DOWN = {1: 35.0, 2: 65.0, 3: 80.0}
_NEUTRAL = 1
_RANK = {"queued": 0, "running": 1, "completed": 2, "errored": 2}
_TERMINAL = frozenset({"completed", "errored"})
_TERMINAL_KEPT_MS = 60_000

JobKey = tuple[str, int]
"""Origin and number of a job."""


class Smoothed(Struct, frozen=True, gc=False, kw_only=True):
    """GPU utilisation of a node in percent, smoothed, and the band it is in."""

    level: float
    band: int


def smooth(known: Smoothed | None, sample: float) -> Smoothed:
    """Fold a fresh sample in. ``known`` None: no state, or a gap before it."""
    value = min(100.0, max(0.0, sample))
    if known is None:
        return Smoothed(level=value, band=sum(value >= edge for edge in _UP))
    level = _NEW_WEIGHT * value + (1.0 - _NEW_WEIGHT) * known.level
    return Smoothed(level=level, band=next_band(known.band, level))


def next_band(band: int, level: float) -> int:
    """The band after ``band`` at a smoothed level: up at the upper edges, down below the lower ones."""
    while band < len(_UP) and level >= _UP[band]:
        band += 1
    while band > 0 and level < _DOWN[band]:
        band -= 1
    return band


class Telemetry:
    """GPU pressure of nodes as one origin sees it."""

    def __init__(self) -> None:
        self._states: dict[str, Smoothed | None] = {}
        self._taken: dict[str, tuple[int, bool]] = {}

    def sample(self, node: str, percent: float | None, age_ms: int, now: int) -> None:
        """A poll's answer; None: invalid. ``age_ms`` is how old the sample was when it came."""
        taken_ms = now - max(0, age_ms)
        fresh = percent is not None and now - taken_ms <= FRESH_MS
        known = self._states.get(node) if self._is_fresh(node, now) else None
        self._states[node] = smooth(known, percent) if fresh and percent is not None else None
        self._taken[node] = (taken_ms, fresh)

    def forget(self, node: str) -> None:
        """The node is no longer known."""
        self._states.pop(node, None)
        self._taken.pop(node, None)

    def pressure(self, node: str, now: int) -> int:
        """0..3; 1 where nothing valid and fresh is known."""
        state = self._states.get(node)
        return state.band if state is not None and self._is_fresh(node, now) else _NEUTRAL

    def _is_fresh(self, node: str, now: int) -> bool:
        taken = self._taken.get(node)
        return taken is not None and taken[1] and now - taken[0] <= FRESH_MS


class JobEvent(Struct, frozen=True, gc=False, kw_only=True):
    """A workload's transition: ``queued``, ``running``, ``completed``, ``errored``; ``node`` None: not placed.
    ``inferred``: concluded from the origin's silence, so any real event of it is better."""

    key: JobKey
    state: str
    node: str | None
    seq: int
    generation: int = 0
    inferred: bool = False


def supersedes(new: JobEvent, old: JobEvent) -> bool:
    """True if ``new`` replaces ``old``: newer generation, then authoritative, then higher seq, then later state."""
    if new.generation != old.generation:
        return new.generation > old.generation
    if new.inferred != old.inferred:
        return old.inferred
    if old.state in _TERMINAL:
        return False
    if new.seq != old.seq:
        return new.seq > old.seq
    return _RANK[new.state] > _RANK[old.state]


class Snapshot(Struct, frozen=True, kw_only=True):
    """A ranking as the scheduler published it."""

    generation: int
    order: tuple[str, ...]
    pending: Mapping[str, int]
    pressure: Mapping[str, int]


class Scheduler:
    """Ranks the nodes in discovery (``nodes``) by what is known of jobs and GPUs."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = set(nodes)
        self.telemetry = Telemetry()
        self._jobs: dict[JobKey, JobEvent] = {}
        self._ended_ms: dict[JobKey, int] = {}
        self._pending: dict[str, int] = {}
        self._last: tuple[tuple[str, ...], dict[str, int], dict[str, int]] | None = None
        self._generation = 0

    def told(self, event: JobEvent, now: int) -> bool:
        """Fold a job event in; False if it was known better."""
        old = self._jobs.get(event.key)
        if old is not None and not supersedes(event, old):
            return False
        self._count(old, -1)
        self._count(event, 1)
        self._jobs[event.key] = event
        if event.state in _TERMINAL:
            self._ended_ms[event.key] = now
            while self._ended_ms and now - next(iter(self._ended_ms.values())) > _TERMINAL_KEPT_MS:
                key = next(iter(self._ended_ms))
                del self._ended_ms[key]
                self._jobs.pop(key, None)
        return True

    def forget(self, node: str) -> None:
        """The node left discovery: its GPU state and, as failed, its jobs go with it."""
        self.nodes.discard(node)
        self.telemetry.forget(node)
        for key, job in list(self._jobs.items()):
            if key[0] == node and job.state not in _TERMINAL:
                self._count(job, -1)
                del self._jobs[key]

    def rank(self, now: int) -> Snapshot | None:
        """The next snapshot, None if nothing changed since the last."""
        pressure = {node: self.telemetry.pressure(node, now) for node in self.nodes}
        pending = {node: self._pending.get(node, 0) for node in self.nodes}
        order = tuple(
            sorted(self.nodes, key=lambda node: (pending[node] + pressure[node], pressure[node], node))
        )
        if (order, pending, pressure) == self._last:
            return None
        self._last = (order, pending, pressure)
        self._generation += 1
        return Snapshot(generation=self._generation, order=order, pending=pending, pressure=pressure)

    def _count(self, job: JobEvent | None, by: int) -> None:
        if job is not None and job.node is not None and job.state not in _TERMINAL:
            self._pending[job.node] = self._pending.get(job.node, 0) + by


class Proxy:
    """Picks nodes for requests by the newest applied snapshot and own reservations since."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.reserved: dict[str, int] = {}

    def apply(self, snapshot: Snapshot) -> bool:
        """Take a newer snapshot over and forget all reservations, also of requests it cannot know of yet."""
        if self.snapshot is not None and snapshot.generation <= self.snapshot.generation:
            return False
        self.snapshot = Snapshot(
            generation=snapshot.generation,
            order=snapshot.order,
            pending={node: max(0, count) for node, count in snapshot.pending.items()},
            pressure={node: min(3, max(0, band)) for node, band in snapshot.pressure.items()},
        )
        self.reserved.clear()
        return True

    def load(self, node: str) -> int:
        """Pending jobs, pressure and own reservations of a ranked node."""
        assert self.snapshot is not None
        return self.snapshot.pending[node] + self.snapshot.pressure[node] + self.reserved.get(node, 0)

    def choose(self, owners: Iterable[str], pin: str | None = None) -> "Chosen":
        """The owners of a model in the order to try them, the first one reserved where a ranking says which."""
        left = set(owners)
        if pin in left:
            return Chosen(order=(str(pin), *self._ordered(left - {pin})), reserved=None, generation=0)
        order = self._ordered(left)
        if self.snapshot is None:
            return Chosen(order=order, reserved=None, generation=0)
        known = [node for node in order if node in self.snapshot.pending]
        if not known:
            return Chosen(order=order, reserved=None, generation=0)
        first = min(known, key=self.load)
        self._add(first, 1)
        rest = tuple(node for node in order if node != first)
        return Chosen(order=(first, *rest), reserved=first, generation=self.snapshot.generation)

    def release(self, chosen: "Chosen") -> None:
        """End the reservation of a request; of no effect once a newer snapshot came."""
        if chosen.reserved is not None and self._is_current(chosen):
            self._add(chosen.reserved, -1)
            chosen.reserved = None

    def move(self, chosen: "Chosen", node: str) -> None:
        """The request tries ``node`` now."""
        if chosen.reserved is not None and chosen.reserved != node and self._is_current(chosen):
            self._add(chosen.reserved, -1)
            self._add(node, 1)
            chosen.reserved = node

    def _ordered(self, nodes: set[str]) -> tuple[str, ...]:
        ranked = self.snapshot.order if self.snapshot is not None else ()
        known = [node for node in ranked if node in nodes]
        return (*known, *sorted(nodes.difference(known)))

    def _is_current(self, chosen: "Chosen") -> bool:
        return self.snapshot is not None and chosen.generation == self.snapshot.generation

    def _add(self, node: str, by: int) -> None:
        left = self.reserved.get(node, 0) + by
        if left > 0:
            self.reserved[node] = left
        else:
            self.reserved.pop(node, None)


class Chosen(Struct, kw_only=True):
    """Nodes to try in order. ``reserved`` is where a reservation is held, made under snapshot ``generation``."""

    order: tuple[str, ...]
    reserved: str | None
    generation: int


def owns(engine_kind: str, offered: Iterable[str], asked: str) -> bool:
    """True if a node that lists ``offered`` has the model: byte for byte, on Ollama ``:latest`` may be left out."""
    if engine_kind != "ollama":
        return asked in offered
    wanted = asked if ":" in asked else f"{asked}:latest"
    return any((name if ":" in name else f"{name}:latest") == wanted for name in offered)
