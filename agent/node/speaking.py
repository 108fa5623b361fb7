"""When this node says something new about itself: inputs come in, statements go to the own view and to the mesh.

Changes within a moment become one statement. A new statement is urgent if others must know at once (a level, an
engine's state, a residency, a queue that fills); the rest travels with the next due record. Profiles enter S at most
once a minute, and only if one moved.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus, Residency
from agent.node.statement import (
    EndpointWork,
    ModelTimes,
    foreign_requests,
    is_event,
    static_statement,
    volatile_statement,
)
from router_core.placement.local import LocalWork
from router_core.pressure.samples import Sampled
from router_core.pressure.wire import mib
from router_core.record import state
from router_core.record.state import Flag, ProfileFacts, Static, Volatile

COALESCE_S = 0.05
PROFILES_MS = 60_000
_MOVED = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the parts of a statement come from; each call returns at once."""

    endpoints: Callable[[], Mapping[str, EndpointStatus]]
    addresses: Callable[[], tuple[state.Address, ...]]
    dispatch: Callable[[], state.Dispatch | None]
    claims: Callable[[], Sequence[tuple[str, str, ProfileFacts]]]
    used: Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who hears a statement: the own view, and the mesh (with ``urgent``)."""

    view: Callable[[Static, Volatile], None]
    mesh: Callable[[Static, Volatile, bool], None]


class Speaking:
    """Keeps the newest statement of this node. All calls are made on the loop."""

    def __init__(
        self,
        sources: Sources,
        listeners: Listeners,
        work: LocalWork,
        clock: Clock,
        *,
        version: str,
        router: bool,
        gpu_host: bool,
    ) -> None:
        self._sources = sources
        self._listeners = listeners
        self._work = work
        self._clock = clock
        self._version = version
        self._router = router
        self._gpu_host = gpu_host
        self._sampled: Sampled | None = None
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self._most_ours: dict[str, int] = {}
        self._polled: dict[str, tuple[int | None, int]] = {}
        self._loading: dict[tuple[str, str], int] = {}
        self._claims: list[tuple[str, str, ProfileFacts]] = []
        self._claims_at: int | None = None
        self._made_of: object = None
        self.static: Static | None = None
        self.volatile: Volatile | None = None

    @property
    def draining(self) -> bool:
        return self._draining

    def sampled(self, sampled: Sampled, _urgent: bool) -> None:
        """A tick of the sampler: the heartbeat of statements, too."""
        self._sampled = sampled
        self._soon()

    def engine_changed(self, _status: EndpointStatus, urgent: bool) -> None:
        """An engine's monitor saw something new; ``urgent``: a residency or state others must know at once."""
        if urgent:
            self.speak()
        else:
            self._soon()

    def work_changed(self, endpoint: str) -> None:
        """A request entered or left an own endpoint."""
        ours = self._work.in_flight(endpoint)
        self._most_ours[endpoint] = max(ours, self._most_ours.get(endpoint, 0))
        self._soon()

    def drain(self) -> None:
        """Say that nothing new is taken."""
        self._draining = True
        self.speak()

    def speak(self) -> None:
        """Build the statement now and tell it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock.boot_ms()
        endpoints = list(self._sources.endpoints().values())
        self._watch_loads(endpoints, now)
        static = self._stated(endpoints, now)
        volatile = volatile_statement(
            static,
            sampled=self._sampled,
            endpoints=endpoints,
            work={endpoint.name: self._work_at(endpoint, now) for endpoint in endpoints},
            times={
                key: ModelTimes(loading_ms=self._loading.get(key), used_ms=self._sources.used.get(key))
                for key in self._loading.keys() | self._sources.used.keys()
            },
            seen=self._work.seen(now),
            disp=self._sources.dispatch() if self._router else None,
            flags=Flag.DRAINING if self._draining else Flag(0),
            load_memory_mib=self._load_memory_mib(),
            now=now,
        )
        urgent = self.volatile is None or is_event(self.volatile, volatile)
        self.volatile = volatile
        self._listeners.view(static, volatile)
        self._listeners.mesh(static, volatile, urgent)

    def _stated(self, endpoints: Sequence[EndpointStatus], now: int) -> Static:
        """S, built anew only if something it is made of changed."""
        sampled = self._sampled
        made_of = (
            self._sources.addresses(),
            (sampled.profile, sampled.host is not None) if sampled is not None else None,
            tuple((e.manifest, e.identity, e.owned, e.slots, e.dialects) for e in endpoints),
            self._published(now),
        )
        if self.static is None or made_of != self._made_of:
            self._made_of = made_of
            self.static = static_statement(
                sampled=sampled,
                addrs=made_of[0],
                version=self._version,
                router=self._router,
                endpoints=endpoints,
                profiles=made_of[3],
            )
        return self.static

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self.speak)

    def _work_at(self, endpoint: EndpointStatus, now: int) -> EndpointWork:
        name = endpoint.name
        polled, foreign = self._polled.get(name, (None, 0))
        if endpoint.observed_ms != polled:
            ours = self._work.in_flight(name)
            foreign = foreign_requests(endpoint, max(ours, self._most_ours.get(name, 0)))
            self._polled[name] = (endpoint.observed_ms, foreign)
            self._most_ours[name] = ours
        return EndpointWork(
            ours=self._work.in_flight(name),
            foreign=foreign,
            work_s=self._work.work_s(name, endpoint.slots or 1, now, foreign),
        )

    def _watch_loads(self, endpoints: Sequence[EndpointStatus], now: int) -> None:
        loading = {}
        for endpoint in endpoints:
            names = {owned.native_id: owned.name for owned in endpoint.owned}
            for model in endpoint.resident:
                if model.state is Residency.LOADING and model.native_id in names:
                    key = (endpoint.name, names[model.native_id])
                    loading[key] = self._loading.get(key, now)
        self._loading = loading

    def _load_memory_mib(self) -> int | None:
        """Free memory that a cold load would go to: RAM on a host without GPU, unknown on one with."""
        if self._gpu_host or self._sampled is None or self._sampled.mem_avail_bytes.value is None:
            return None
        return mib(self._sampled.mem_avail_bytes.value)

    def _published(self, now: int) -> Sequence[tuple[str, str, ProfileFacts]]:
        if self._claims_at is not None and now - self._claims_at < PROFILES_MS:
            return self._claims
        claims = list(self._sources.claims())
        if not claims and self._claims_at is None:
            return ()
        self._claims_at = now
        if _moved(self._claims, claims):
            self._claims = claims
        return self._claims


def _moved(
    old: Sequence[tuple[str, str, ProfileFacts]], new: Sequence[tuple[str, str, ProfileFacts]]
) -> bool:
    """True if a profile appeared or went, its n doubled, or a number of it moved by more than a tenth."""
    known = {(endpoint, model): facts for endpoint, model, facts in old}
    if known.keys() != {(endpoint, model) for endpoint, model, _ in new}:
        return True
    for endpoint, model, facts in new:
        before = known[endpoint, model]
        if facts.n >= 2 * max(1, before.n):
            return True
        for told, said in (
            (facts.prompt_dtps, before.prompt_dtps),
            (facts.gen_dtps, before.gen_dtps),
            (facts.load_p75_ds, before.load_p75_ds),
            (facts.success_c, before.success_c),
        ):
            if (told is None) is not (said is None):
                return True
            if told is not None and said is not None and abs(told - said) > _MOVED * max(1, said):
                return True
    return False
