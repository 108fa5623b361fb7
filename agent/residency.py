"""Loading and unloading this host's models by their worth: the driver of ``router_core.placement.residency``.

Off unless the policy in force allows it. Rules kept here: what is being drained or unloaded is told to ``leave``, and
everybody is told, before anything is sent to an engine; every order is answered to the machine once; a fault of an
engine is an answer. What a model is worth is decided in the core.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any, Protocol

from msgspec import Struct

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.engines.contract import (
    FOREVER_S,
    EndpointStatus,
    EngineBusy,
    EngineMisspoke,
    EngineUnreachable,
    ObservedModel,
    ResidencyState,
)
from agent.engines.control import control_of
from agent.observe.instruments import LoadMetrics
from agent.observe.log import Log
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.residency.events import (
    Action,
    Allowed,
    Drain,
    EngineResidency,
    Event,
    Key,
    Load,
    Looked,
    NotifyResidency,
    Ordered,
    ResidencyNotice,
    Unload,
)
from router_core.placement.residency.machine import ResidencyMachine as Machine
from router_core.placement.residency.outlook import Headroom, HostModel, outlook
from router_core.placement.residency.standing import Standings
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Level

WATCHED_MS = 10_000
"""An engine that was looked at longer ago may have work that nobody knows of."""
_MIB = 2**20
_EXPIRY_MOVED_MS = 3_000
_HELD = {
    ResidencyState.LOADING: EngineResidency.LOADING,
    ResidencyState.RESIDENT: EngineResidency.RESIDENT,
    ResidencyState.SLEEPING: EngineResidency.RESIDENT,
    ResidencyState.UNLOADING: EngineResidency.LEAVING,
    ResidencyState.DOWNLOADING: EngineResidency.LEAVING,
    ResidencyState.FAILED: EngineResidency.FAILED,
}
_RESULTS = {
    ResidencyNotice.LOADED: "ok",
    ResidencyNotice.LOAD_FAILED: "failed",
    ResidencyNotice.LOAD_OVERDUE: "overdue",
}


class Engines(Protocol):
    """The watch over this node's engines, as far as it is needed here."""

    def endpoints(self) -> Mapping[str, EndpointStatus]: ...

    def look_soon(self, endpoint: str) -> None: ...

    def report_sent(self, endpoint: str, model: str, sent_ms: int) -> None: ...

    def report_heard(self, endpoint: str, model: str, sent_ms: int) -> None: ...


class ResidencySources(Struct, frozen=True, kw_only=True):
    """What the picture is made of; each call returns at once. ``free_mib`` is the memory a load would go to,
    ``used`` when a request of ours last used a model (boot ms)."""

    fleet: Callable[[], Fleet]
    free_mib: Callable[[], int | None]
    level: Callable[[], Level | None]
    used: Mapping[Key, int]


class ResidencyListeners(Struct, frozen=True, kw_only=True):
    """Who hears of it: ``changed`` that what leaves or ``reserved_mib`` did, ``loaded`` of a finished load (endpoint,
    model, seconds)."""

    changed: Callable[[], None]
    loaded: Callable[[str, str, float], None]


class ModelResidency:
    """Drives the machine. ``leave`` hears of the models that take nothing new; all calls on the loop."""

    def __init__(
        self,
        engines: Engines,
        sources: ResidencySources,
        listeners: ResidencyListeners,
        *,
        leave: Callable[[frozenset[Key]], None],
        clock: Clock,
        rng: Random,
        tasks: Tasks,
        log: Log,
        metrics: LoadMetrics,
        policy: ResidencyPolicy,
    ) -> None:
        self._engines = engines
        self._sources = sources
        self._listeners = listeners
        self._clock = clock
        self._tasks = tasks
        self._log = log
        self._metrics = metrics
        self._machine = Machine(policy, rng)
        self._activity = _Activity()
        self._wake = asyncio.Event()
        self._on = False
        self._ordering = 0
        self._leave = leave

    @property
    def ordering(self) -> bool:
        """Whether an engine has an order of ours in hand."""
        return self._ordering > 0

    @property
    def reserved_mib(self) -> int:
        """Memory that the load under way will take."""
        return -(-self._machine.reserved_bytes // _MIB)

    def loads(self, key: Key) -> bool:
        """Whether a load of this model is an order of ours."""
        return key == self._machine.loading

    def standings(self) -> Standings | None:
        """Where the models stand, for people; None while it is off."""
        return self._machine.standings(self._clock.boot_ms()) if self._on else None

    def sampled(self, urgent: bool) -> None:
        """The host was sampled: the moment to follow the policy, and if ``urgent`` (a level changed) to look."""
        on = self._sources.fleet().policy.realloc_enabled
        if on is not self._on:
            self._on = on
            self._handle(Allowed(on=on))
            self._wake.set()
        if urgent:
            self.noticed()

    def noticed(self) -> None:
        """An engine or the pressure changed: worth a look, if anything is."""
        if self._machine.deadline is not None:
            self._wake.set()

    async def run(self) -> None:
        """Look when it is due, until cancelled."""
        while True:
            due = self._machine.deadline
            wait_s = None if due is None else max(0, due - self._clock.boot_ms()) / 1_000
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._look()

    def _look(self) -> None:
        now = self._clock.boot_ms()
        seen: list[HostModel] = []
        places: dict[str, int] = {}
        reserve_mib, free_mib = 0, self._sources.free_mib()
        fleet = self._sources.fleet()
        for status in self._engines.endpoints().values():
            if control_of(status) is None:
                continue
            seen += self._seen(status, _loads_into_gpus(fleet, status.name), now)
            reserve_mib = max(reserve_mib, status.reserve_mib(free_mib or 0))
            if status.identity is not None and status.identity.models_most is not None:
                places[status.name] = status.identity.models_most
        self._activity.forget(entry.key for entry in seen)
        headroom = Headroom(
            free_bytes=None if free_mib is None else free_mib * _MIB,
            reserve_bytes=reserve_mib * _MIB,
            places=places,
            level=self._sources.level(),
        )
        self._handle(Looked(picture=outlook(fleet, seen, headroom, now)))

    def _seen(self, status: EndpointStatus, of_gpus: bool, now: int) -> list[HostModel]:
        """The models of one engine that it can be told to hold; ``of_gpus``: in a GPU's own memory."""
        held = {model.native_id: model for model in status.resident}
        watched = status.observed_ms is not None and now - status.observed_ms <= WATCHED_MS
        seen = []
        for owned in status.owned:
            if not owned.local:
                continue
            key, model = (status.name, owned.name), held.get(owned.native_id)
            used = self._activity.note(key, model, status.observed_ms or now, now)
            ours = self._sources.used.get(key)
            seen.append(
                HostModel(
                    key=key,
                    held=EngineResidency.ABSENT if model is None else _HELD[model.state],
                    held_bytes=None if model is None else model.held_bytes(of_gpus),
                    busy=0 if model is None else (model.running or 0) + (model.waiting or 0),
                    used_ms=max((at for at in (used, ours) if at is not None), default=None),
                    is_watched=watched,
                    keep=owned.keep,
                )
            )
        return seen

    def _handle(self, event: Event) -> None:
        before = self._machine.reserved_bytes, self._machine.leaving
        actions = self._machine.handle(event, self._clock.boot_ms())
        leaving = self._machine.leaving
        self._leave(leaving)
        if (self._machine.reserved_bytes, leaving) != before:
            self._listeners.changed()
        for action in actions:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Drain():
                self._log.info("model.draining", endpoint=action.key[0], model=action.key[1])
            case Unload():
                self._tasks.spawn(self._unload(action), f"unload at {action.key[0]}")
            case Load():
                self._tasks.spawn(self._load(action), f"load at {action.key[0]}")
            case NotifyResidency():
                self._tell(action)

    def _tell(self, told: NotifyResidency) -> None:
        endpoint, model = told.key
        say = (
            self._log.info
            if told.code in (ResidencyNotice.LOADED, ResidencyNotice.UNLOADED)
            else self._log.warning
        )
        trigger = told.trigger.value if told.trigger is not None else None
        say(f"model.{told.code.value}", endpoint=endpoint, model=model, trigger=trigger, seconds=told.seconds)
        result = _RESULTS.get(told.code)
        if result is not None and trigger is not None:
            self._metrics.loads.inc(trigger, result)
            if told.code is ResidencyNotice.LOADED and told.seconds is not None:
                self._metrics.seconds.observe(told.seconds)
                self._listeners.loaded(endpoint, model, told.seconds)

    async def _load(self, order: Load) -> None:
        endpoint, model = order.key
        sent_ms = self._clock.boot_ms()
        self._engines.report_sent(endpoint, model, sent_ms)
        try:
            await self._order(order, order.within_ms / 1_000)
        finally:
            self._engines.report_heard(endpoint, model, sent_ms)

    async def _unload(self, order: Unload) -> None:
        await self._order(order, None)

    async def _order(self, order: Load | Unload, within_s: float | None) -> None:
        """Give one order and tell the machine how it was taken."""
        endpoint, model = order.key
        ok = False
        self._ordering += 1
        try:
            status = self._engines.endpoints().get(endpoint)
            control = control_of(status) if status is not None else None
            native = status.native_id(model) if status is not None else None
            if control is not None and native is not None:
                if within_s is None:
                    await control.unload(native)
                else:
                    await control.load(native, within_s)
                ok = True
        except (EngineUnreachable, EngineMisspoke, EngineBusy) as error:
            self._log.warning("model.order_refused", endpoint=endpoint, model=model, reason=error.reason)
        finally:
            self._ordering -= 1
            self._engines.look_soon(endpoint)
            self._handle(Ordered(key=order.key, ok=ok))
            self._wake.set()


def _loads_into_gpus(fleet: Fleet, endpoint: str) -> bool:
    own = fleet.parts.get(fleet.me)
    static = own.node.static if own is not None else None
    return static is not None and any(
        static.loads_into_gpus(engine) for engine in static.engines if engine.name == endpoint
    )


class _Activity:
    """When each model was last seen in use, by whomever: requests its engine tells of, or an expiry that moved. An
    engine that usually tells and does not now is busy with something: its model counts as in use."""

    def __init__(self) -> None:
        self._used: dict[Key, int] = {}
        self._tells: dict[Key, None] = {}
        self._expiry: dict[Key, int] = {}

    def note(self, key: Key, model: ObservedModel | None, observed_ms: int, now: int) -> int | None:
        """Take in the newest look at a model; when it was last in use (boot ms), None if it never was."""
        if model is None:
            self._expiry.pop(key, None)
            return self._used.get(key)
        if model.running is not None:
            self._tells[key] = None
        silent = model.running is None and model.state is ResidencyState.RESIDENT and key in self._tells
        if model.running or model.waiting or silent:
            self._used[key] = now
        if model.expires_s is not None and model.expires_s != FOREVER_S:
            expiry, before = observed_ms + 1_000 * model.expires_s, self._expiry.get(key)
            if before is not None and expiry - before >= _EXPIRY_MOVED_MS:
                self._used[key] = now
            self._expiry[key] = expiry
        return self._used.get(key)

    def forget(self, kept: Iterable[Key]) -> None:
        """Drop what is not among ``kept``."""
        keys = set(kept)
        known: dict[Key, Any]
        for known in (self._used, self._expiry, self._tells):
            for key in known.keys() - keys:
                del known[key]
