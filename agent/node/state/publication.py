"""When this node says something new about itself: inputs come in, statements go to the own view and to the mesh.

Changes within a moment become one statement. A new statement is urgent if others must know at once (a level, an
engine's state, a residency, a queue that fills); the rest travels with the next due record. Profiles enter S at most
once a minute, and only if one moved.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus, ResidencyState
from agent.node.state.peaks import Peaks
from agent.node.state.statement import (
    UNSEEN,
    EndpointWork,
    ModelTimes,
    foreign_requests,
    gpus_in_use,
    static_statement,
    volatile_statement,
)
from router_core import limits
from router_core.placement.local import LocalWork
from router_core.pressure.samples import Sampled
from router_core.pressure.wire import gpu_facts, host_facts, load_memory_mib
from router_core.record import state
from router_core.record.event import is_event
from router_core.record.state import Flag, ProfileFacts, Static, Volatile

COALESCE_S = 0.05
LINGER_MS = 2_000
"""How long an engine may still report a request that we have seen the end of: a cancelled one runs on for a while."""
PROFILES_MS = 60_000
_MOVED = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the parts of a statement come from; each call returns at once. ``drains`` has the endpoints that take
    nothing new, and None if the node does not."""

    endpoints: Callable[[], Mapping[str, EndpointStatus]]
    addresses: Callable[[], tuple[state.Address, ...]]
    dispatch: Callable[[], state.Dispatch | None]
    claims: Callable[[], Sequence[tuple[str, str, ProfileFacts]]]
    used: Mapping[tuple[str, str], int]
    drains: Container[str | None] = frozenset()
    demand: Callable[[], tuple[state.ModelDemand, ...]] = tuple
    leaving: Collection[tuple[str, str]] = ()
    reserved_mib: Callable[[], int] = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who hears a statement: the own view, and the mesh (with ``urgent``). ``work`` hears of each endpoint whose requests
    in hand changed since the last statement, before the next one is made: how many there are, and whether any began."""

    view: Callable[[Static, Volatile], None]
    mesh: Callable[[Static, Volatile, bool], None]
    work: Callable[[str, int, bool], None]


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
    ) -> None:
        self._sources = sources
        self._listeners = listeners
        self._work = work
        self._clock = clock
        self._version = version
        self._router = router
        self._sampled: Sampled | None = None
        self._draining = False
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self._peaks: dict[str, Peaks] = {}
        self._worked: dict[str, bool] = {}
        self._polled: dict[str, tuple[int | None, int]] = {}
        self._times: dict[tuple[str, str], ModelTimes] = {}
        self._claims: list[tuple[str, str, ProfileFacts]] = []
        self._claims_at: int | None = None
        self._made_of: object = None
        self.static: Static | None = None
        self.volatile: Volatile | None = None

    @property
    def draining(self) -> bool:
        return self._draining

    def sampled(self, sampled: Sampled, _urgent: bool) -> None:
        """A tick of the sampler: the heartbeat of statements, too, made while this process is awake anyway."""
        self._sampled = sampled
        self._soon(0.0)

    def engine_changed(self, _status: EndpointStatus, urgent: bool) -> None:
        """An engine's monitor saw something new; ``urgent``: a residency or state others must know at once."""
        self._soon(0.0 if urgent else COALESCE_S)

    def work_changed(self, endpoint: str) -> None:
        """A request entered or left an own endpoint."""
        peaks = self._peaks.get(endpoint)
        if peaks is None:
            peaks = self._peaks[endpoint] = Peaks()
        began = peaks.note(self._work.in_flight(endpoint), self._clock.boot_ms())
        if began or endpoint not in self._worked:
            self._worked[endpoint] = began
        if self._timer is None:
            self._soon()

    def addresses_moved(self) -> None:
        """This host is to be dialled elsewhere."""
        self._soon(0.0)

    def models_moved(self) -> None:
        """A model began or ceased to leave, or memory was set aside for one."""
        self._soon(0.0)

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
        worked, self._worked = self._worked, {}
        for endpoint, began in worked.items():
            self._listeners.work(endpoint, self._work.in_flight(endpoint), began)
        endpoints = list(self._sources.endpoints().values())
        self._watch_models(endpoints, now)
        static = self._stated(endpoints, now)
        volatile = volatile_statement(
            static,
            sampled=self._sampled,
            endpoints=endpoints,
            work={each.name: self._work_at(each, now) for each in endpoints},
            times=self._times,
            seen=self._work.seen(now),
            disp=self._sources.dispatch() if self._router else None,
            flags=Flag.DRAINING if self._draining or None in self._sources.drains else Flag(0),
            draining=[each.name for each in endpoints if each.name in self._sources.drains],
            load_memory_mib=self._load_memory_mib(now),
            now=now,
            demand=self._sources.demand() if self._router else (),
            leaving=self._sources.leaving,
        )
        urgent = self.volatile is None or is_event(self.volatile, volatile)
        self.volatile = volatile
        self._listeners.view(static, volatile)
        self._listeners.mesh(static, volatile, urgent)

    def _load_memory_mib(self, now: int) -> int | None:
        """Free memory for loads, less what one under way will still take."""
        free = load_memory_mib(self._sampled, now)
        return None if free is None else max(0, free - self._sources.reserved_mib())

    def _stated(self, endpoints: Sequence[EndpointStatus], now: int) -> Static:
        """S, built anew only if something it is made of changed."""
        sampled = self._sampled
        made_of = (
            self._sources.addresses(),
            (sampled.profile, host_facts(sampled.host) if sampled.host is not None else None)
            if sampled is not None
            else None,
            tuple((e.manifest, e.identity, e.owned, e.slots, e.dialects) for e in endpoints),
            self._published(now),
            self._worth(endpoints),
            gpu_facts(sampled) if sampled is not None else (),
            gpus_in_use(sampled),
        )
        if self.static is None or made_of != self._made_of:
            self._made_of = made_of
            static = static_statement(
                sampled=sampled,
                addrs=made_of[0],
                version=self._version,
                router=self._router,
                endpoints=endpoints,
                profiles=made_of[3],
                keep=made_of[4],
            )
            if static != self.static:
                self.static = static
        return self.static

    def _worth(self, endpoints: Sequence[EndpointStatus]) -> frozenset[tuple[str, str]]:
        """Which models to publish if there are too many: the resident ones, then those used last."""
        if sum(len(endpoint.owned) for endpoint in endpoints) <= limits.MODELS:
            return frozenset()
        used = self._sources.used
        held = {endpoint.name: {model.native_id for model in endpoint.resident} for endpoint in endpoints}
        resident = [
            (endpoint.name, owned.name)
            for endpoint in endpoints
            for owned in endpoint.owned
            if owned.native_id in held[endpoint.name]
        ]
        lately = sorted(used, key=lambda key: -used[key])
        return frozenset(list(dict.fromkeys((*resident, *lately)))[: limits.MODELS])

    def _soon(self, within_s: float = COALESCE_S) -> None:
        """Speak from the loop, never from the call that told of a change: a fault here must not become its."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._due_s <= loop.time() + within_s:
                return
            self._timer.cancel()
        self._due_s = loop.time() + within_s
        self._timer = loop.call_later(within_s, self.speak)

    def _work_at(self, endpoint: EndpointStatus, now: int) -> EndpointWork:
        name = endpoint.name
        polled, foreign = self._polled.get(name, (None, 0))
        if endpoint.observed_ms != polled:
            since = (endpoint.observed_ms or now) - LINGER_MS
            peaks = self._peaks.get(name)
            foreign = foreign_requests(endpoint, peaks.most(since) if peaks is not None else 0)
            self._polled[name] = (endpoint.observed_ms, foreign)
        return EndpointWork(
            ours=self._work.in_flight(name),
            foreign=foreign,
            work_s=self._work.work_s(name, endpoint.slots or 1, now, foreign),
        )

    def _watch_models(self, endpoints: Sequence[EndpointStatus], now: int) -> None:
        """Note when each model of an own engine began to load and when it was first seen at hand."""
        times = {}
        for endpoint in endpoints:
            names = {owned.native_id: owned.name for owned in endpoint.owned}
            for model in endpoint.resident:
                if (name := names.get(model.native_id)) is None:
                    continue
                key = (endpoint.name, name)
                before, used = self._times.get(key, UNSEEN), self._sources.used.get(key)
                loading = model.state is ResidencyState.LOADING
                since = before.used_ms if before.used_ms is not None else now
                times[key] = ModelTimes(
                    loading_ms=(before.loading_ms or now) if loading else None,
                    used_ms=None if loading else max(since, used or since),
                )
        self._times = times

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
