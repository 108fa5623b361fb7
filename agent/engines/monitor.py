"""The watch over one endpoint: polls in tiers, follows pushed changes, notices restarts, judges health.

One task polls; a second one follows the event stream of an engine that has one. A due poll that finds the
last one running is skipped. Whatever an engine answers becomes health, never a crash. No call made here
wakes or loads a model.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.effects.clock import Clock
from agent.engines.catalogue import CATALOGUE
from agent.engines.client import EngineClient
from agent.engines.contract import (
    Credential,
    EndpointHealth,
    EndpointStatus,
    EngineAdapter,
    EngineMisspoke,
    EngineRefusal,
    EngineUnreachable,
    Identity,
    InferringAdapter,
    LoadSource,
    Observation,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    PushingAdapter,
    ResidencyState,
    own_load,
)
from agent.engines.health import FAILURES, Signs
from agent.engines.identify import Starting, identify
from agent.engines.names import overlaid, publishable
from agent.settings.manifest import API_PATH, Caps, EngineKind, Manifest
from router_core import limits
from router_core.profile.concurrency import FIRST as UNTOLD_SLOTS
from router_core.record.spelling import dialect_name
from router_core.record.state import Capability, Dialect

_LEARN_MS = 100
"""How soon it is tried whether an engine answers with more requests in hand than ever before."""
_HEARD_MS = 5_000
"""A byte that came so short a time ago is a sign of life."""
_STUCK_MS = 60_000
_ASK_MS = 2_000
_DENIED_MOST = 64
Changed = Callable[[EndpointStatus, bool], None]
"""Told of every change but mere age; the flag is True if health or residency changed."""
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
INLINE_MODELS = 128
"""A list up to here is looked through in less time than a thread takes to be asked."""
TOO_LARGE = "list_too_large"
BATCHING = frozenset({EngineKind.OPENAI, EngineKind.VLLM, EngineKind.SGLANG})
"""Engines of these kinds are taken to work on many requests at once until they were seen not to."""


class Cadence(Struct, frozen=True, gc=False, kw_only=True):
    """How often an endpoint is looked at, in ms; every wait is jittered by up to 10 %.

    ``busy``: own requests in flight. ``quiet``: none for ``quiet_after``. ``retry``: waits after failed
    identifications, the last one for ever.
    """

    busy_ms: int = 1_000
    fast_ms: int = 1_800
    quiet_ms: int = 5_000
    quiet_after_ms: int = 300_000
    slow_ms: int = 30_000
    identify_ms: int = 600_000
    withdrawn_ms: int = 600_000
    retry_ms: tuple[int, ...] = (1_000, 2_000, 4_000, 8_000, 9_000)


class OwnRequests(Struct, frozen=True, gc=False, kw_only=True):
    """How own requests at an engine get on. Boot ms, None if there is none: when the latest byte of any came, when the
    newest of those without a byte was sent. ``all_overdue``: each of these is later than was to be expected."""

    last_byte_ms: float | None = None
    newest_ms: float | None = None
    all_overdue: bool = False


NO_WORK = OwnRequests()


class EndpointMonitor:
    """Watches the engine of one manifest. ``run`` until cancelled or refused; then the client is closed."""

    def __init__(
        self,
        manifest: Manifest,
        client: EngineClient,
        *,
        clock: Clock,
        rng: Random,
        spawn: Spawn,
        changed: Changed,
        cadence: Cadence,
        credential: Credential | None = None,
        detected: bool = False,
        progress: Callable[[], OwnRequests] = lambda: NO_WORK,
    ) -> None:
        self._manifest = manifest
        self._client = client
        self._clock = clock
        self._rng = rng
        self._spawn = spawn
        self._changed = changed
        self._cadence = cadence
        self._progress = progress
        self._signs = Signs()
        self._identity: Identity | None = None
        self._adapter: EngineAdapter | None = None
        self._inferring: InferringAdapter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.looked = asyncio.Event()
        """Set after the first look, whatever it found."""
        self._in_flight = 0
        self._waiting: dict[str, list[int]] = {}
        self._worked_ms = clock.boot_ms()
        self._attempts = 0
        self._identify_at = self._slow_at = self._fast_at = self._worked_ms
        self._listed: set[str] = set()
        self._too_large = False
        self._denied: dict[tuple[str, Dialect], None] = {}
        self._withdrawn: dict[tuple[str | None, Dialect], int] = {}
        self._proven = Dialect(0)
        self._asked_ms = -_ASK_MS
        self._broke_off = False
        self._moved_ms = self._worked_ms
        self._status = EndpointStatus(
            name=manifest.name,
            manifest=manifest,
            health=EndpointHealth.UNREACHABLE,
            detected=detected,
            credential=credential,
            measured_slots=UNTOLD_SLOTS if manifest.engine in BATCHING else None,
        )
        self._told = _ageless(self._status)

    @property
    def status(self) -> EndpointStatus:
        """The endpoint as last seen."""
        return self._status

    async def run(self) -> None:
        """Poll for ever; return only once the endpoint is refused."""
        try:
            while self._signs.refusal is None:
                await self._step()
                self._publish()
                self.looked.set()
                if self._signs.refusal is None:
                    await self._pause()
        finally:
            self._stop_listening()
            await self._client.aclose()

    def succeed(self, before: "EndpointMonitor") -> None:
        """Take over what the relay told the monitor in whose place this one comes."""
        self._in_flight, self._waiting, self._worked_ms = (
            before._in_flight,
            before._waiting,
            before._worked_ms,
        )

    # What the relay tells.

    def report_work(self, in_flight: int, *, began: bool = False) -> None:
        """Own requests now in the engine's hands, and whether any ``began`` since the last report, though it may have
        ended since. Who reports them needs not be told, so nobody is."""
        now = self._clock.boot_ms()
        if began or in_flight > self._in_flight:
            self._worked_ms = now
            wait_ms = self._cadence.busy_ms
            if in_flight > self._signs.answered_most:
                wait_ms = min(wait_ms, _LEARN_MS)
            if now + wait_ms < self._fast_at:
                self._fast_at = now + wait_ms
                self._wake.set()
        self._in_flight = in_flight
        if self._status.load is not None and self._status.load.source is LoadSource.OWN:
            self._status = replace(self._status, load=own_load(in_flight, self._status.slots))

    def report_sent(self, model: str, sent_ms: int) -> None:
        """A request for ``model`` (a published name) was sent at ``sent_ms``, boot time."""
        self._waiting.setdefault(model, []).append(sent_ms)

    def report_heard(self, model: str, sent_ms: int) -> None:
        """That request has got its first byte, or has ended without one."""
        waiting = self._waiting.get(model, [])
        if sent_ms not in waiting:
            return
        waiting.remove(sent_ms)
        if not waiting:
            del self._waiting[model]

    def report_connect_failed(self, *, refused: bool = True) -> None:
        """A request could not connect: the engine is gone until it answers again, unless it was merely slow to accept."""
        if refused:
            self._gone()
            self._publish()
            self._soon(identify=True)
        else:
            self.look_soon()

    def report_slots(self, slots: int) -> None:
        """The engine, which does not tell, was seen to take so many requests at a time."""
        if self._status.measured_slots is not None:
            self._status = replace(self._status, measured_slots=slots)
            self._publish()

    def look_soon(self) -> None:
        """The engine was told to change what it holds."""
        self._fast_at = min(self._fast_at, self._clock.boot_ms())
        self._wake.set()

    def report_denied(self, model: str, dialect: Dialect) -> None:
        """The engine answered as if it did not have the model (a published name), or the route of ``dialect``: its list
        tells which, and is read at once."""
        if len(self._denied) < _DENIED_MOST:
            self._denied[model, dialect] = None
        self.list_soon()

    def report_auth(self) -> None:
        """The engine refused a request, for our key or for what its caller asked: its list tells which."""
        self.list_soon()

    def report_served(self, dialect: Dialect) -> None:
        """The engine speaks ``dialect``, whatever was assumed."""
        if dialect & ~self._proven:
            self._proven |= dialect
        self._signs = self._signs.served()

    def list_soon(self) -> None:
        """Read the list now, but not for every request of a caller who keeps asking for what is not there."""
        now = self._clock.boot_ms()
        due = max(now, self._asked_ms + _ASK_MS)
        if due < self._slow_at:
            self._slow_at = self._asked_ms = due
            self._wake.set()

    # Polling.

    async def _step(self) -> None:
        """Whatever is due. While questions go unanswered only the quick ones are asked."""
        if self._adapter is None or (self._may_ask and self._clock.boot_ms() >= self._identify_at):
            await self._identify()
        if self._signs.listed_ms is None:
            await self._list_if_due()
        if self._adapter is not None and self._clock.boot_ms() >= self._fast_at:
            await self._look(self._adapter)
            self._publish()
        await self._list_if_due()

    async def _list_if_due(self) -> None:
        if self._adapter is not None and self._may_ask and self._clock.boot_ms() >= self._slow_at:
            await self._list(self._adapter)

    @property
    def _may_ask(self) -> bool:
        """Nothing went unanswered lately, or an answer broke off: whoever is there now is to be asked who it is."""
        return self._broke_off or not self._signs.unanswered

    async def _pause(self) -> None:
        due = self._identify_at
        if self._adapter is not None:
            due = min(due, self._slow_at, self._fast_at) if self._may_ask else self._fast_at
        try:
            async with asyncio.timeout(max(0, due - self._clock.boot_ms()) / 1_000):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _identify(self) -> None:
        self._broke_off = False
        try:
            verdict = await identify(self._client, self._manifest)
        except EngineUnreachable as error:
            if error.reason == "guard":
                self._signs = self._signs.refused(EngineRefusal.URL_REFUSED)
            self._unanswered(error)
            self._retry()
            return
        except EngineMisspoke as error:
            self._misspoke(error)
            self._retry()
            return
        if isinstance(verdict, EngineRefusal):
            self._signs = self._signs.refused(verdict)
        elif isinstance(verdict, Identity):
            self._recognised(verdict)
        else:
            self._drop()
            now = self._clock.boot_ms()
            loading = isinstance(verdict, Starting)
            self._signs = self._signs.unlisted(now, loading=loading, key_refused=False)
            self._retry()

    def _recognised(self, identity: Identity) -> None:
        now = self._clock.boot_ms()
        self._signs = self._signs.identified(now)
        self._attempts = 0
        self._identify_at = self._after(self._cadence.identify_ms)
        if self._adapter is not None and self._identity == identity:
            return
        self._drop()
        self._proven = Dialect(0)
        self._identity = identity
        entry = CATALOGUE[identity.engine, identity.flavour]
        self._adapter = adapter = entry.adapter(
            client=self._client, identity=identity, manifest=self._manifest
        )
        self._inferring = adapter if isinstance(adapter, InferringAdapter) else None
        self._slow_at = self._fast_at = now
        if identity.pushes_state and isinstance(adapter, PushingAdapter):
            self._listener = self._spawn(self._listen(adapter), f"events of {self._manifest.name}")

    async def _list(self, adapter: EngineAdapter) -> None:
        self._slow_at = self._after(self._cadence.slow_ms)
        try:
            told = await adapter.inventory()
        except EngineUnreachable as error:
            self._unanswered(error)
            return
        except EngineMisspoke as error:
            self._too_large = error.reason == "too_large"
            if self._too_large and self._status.owned:
                self._signs = self._signs.answered(self._clock.boot_ms())
                return
            self._misspoke(error)
            self._soon(identify=error.reason in ("auth", "loading"))
            self._slow_at = self._after(self._cadence.fast_ms)
            return
        self._too_large = False
        if adapter is self._adapter:
            self._signs = self._signs.listed(self._clock.boot_ms(), self._in_flight)
            await self._owns(adapter, told)
            self._withdraw(self._clock.boot_ms())

    async def _owns(self, adapter: EngineAdapter, told: tuple[OwnedModel, ...]) -> None:
        """Take over what the engine could serve; a long list is looked through off the loop."""
        self._listed = {model.native_id for model in told}
        models = self._manifest.models
        if len(told) > INLINE_MODELS:
            owned, unfit = await asyncio.to_thread(lambda: publishable(overlaid(told, models)))
        else:
            owned, unfit = publishable(overlaid(told, models))
        if adapter is self._adapter:
            self._status = replace(
                self._status,
                owned=self._without_embeddings(owned),
                unfit_names=unfit,
                more_models=adapter.more_models,
            )

    async def _look(self, adapter: EngineAdapter) -> None:
        period = self._period()
        self._fast_at = self._after(period)
        before = adapter.restarts
        if self._inferring is not None:
            self._inferring.awaits(self._awaited())
        try:
            seen = await adapter.observe(self._clock.boot_ms(), period)
        except EngineUnreachable as error:
            self._unanswered(error)
            if not self._signs.lost and self._signs.unanswered < FAILURES:
                await self._touch()
            return
        except EngineMisspoke as error:
            self._signs = self._signs.answered(self._clock.boot_ms(), self._in_flight)
            if error.reason == "loading":
                self._misspoke(error)
            self._soon(identify=error.reason == "loading")
            return
        if adapter is not self._adapter:
            return
        self._signs = self._signs.looked(self._clock.boot_ms(), self._in_flight)
        if seen.owned is not None:
            await self._owns(adapter, seen.owned)
            self._signs = self._signs.listed(self._clock.boot_ms(), self._in_flight)
        self._saw(seen)
        if adapter.restarts != before:
            self._soon(identify=True, slow=True)

    def _withdraw(self, now: int) -> None:
        """What was denied although the list still has it: the route is missing then, if it was only assumed to be there.
        What is told or has served stays, as does what one model may lack and another have."""
        owned = self._status.owned
        denied, self._denied = self._denied, {}
        tried = self._identity.tried & ~self._proven if self._identity is not None else Dialect(0)
        names = {name for model in owned for name in (model.name, *model.aliases)}
        end = now + self._cadence.withdrawn_ms
        for model, dialect in denied:
            if model not in names or not dialect & tried:
                continue
            one_of_many = dialect & Dialect.EMBED and len(owned) > 1
            self._withdrawn[model if one_of_many else None, dialect] = end
        self._status = replace(self._status, owned=self._without_embeddings(owned))

    def _without_embeddings(self, owned: tuple[OwnedModel, ...]) -> tuple[OwnedModel, ...]:
        """``owned``, of which some were found not to embed."""
        lacking = {model for model, dialect in self._withdrawn if model is not None}
        if not lacking:
            return owned
        cap = Capability.EMBEDDINGS
        return tuple(
            replace(model, caps=Caps(known=model.caps.known | cap, has=model.caps.has & ~cap))
            if lacking.intersection((model.name, *model.aliases))
            else model
            for model in owned
        )

    def _is_stuck(self, now: int) -> bool:
        """Whether requests of ours have been in the engine for long, later than expected all of them, while no byte came and
        no counter of its own moved."""
        own = self._progress()
        if not own.all_overdue or any(
            model.state is ResidencyState.LOADING for model in self._status.resident
        ):
            return False
        last_ms = max(own.newest_ms or 0.0, own.last_byte_ms or 0.0, float(self._moved_ms))
        return own.newest_ms is not None and now - last_ms >= _STUCK_MS

    def _awaited(self) -> dict[str, int]:
        """By native id, since when a request waits for its first byte."""
        return {
            native: min(sent)
            for model, sent in self._waiting.items()
            if (native := self._status.native_id(model)) is not None
        }

    def _saw(self, seen: Observation) -> None:
        """Take over an observation; ask for the list at once where it does not explain what is seen."""
        ended = _moving(self._status.resident) - _moving(seen.resident)
        unknown = {model.native_id for model in seen.resident} - self._listed
        self._listed |= unknown
        self._soon(slow=bool(ended or unknown))
        if seen.load.tg_tps or seen.load.pp_tps or seen.resident != self._status.resident:
            self._moved_ms = self._clock.boot_ms()
        self._status = replace(
            self._status, resident=seen.resident, load=seen.load, observed_ms=self._clock.boot_ms()
        )

    async def _listen(self, adapter: PushingAdapter) -> None:
        attempts = 0
        while adapter is self._adapter:
            try:
                async with aclosing(adapter.changes()) as changes:
                    async for seen in changes:
                        attempts = 0
                        self._saw(seen)
                        self._publish()
            except (EngineUnreachable, EngineMisspoke):
                self._soon(identify=True)
            await asyncio.sleep(self._wait_ms(attempts) / 1_000)
            attempts += 1

    # What follows from it.

    async def _touch(self) -> None:
        """After a look that was not answered: whatever it says to the cheapest question is an answer. Then look again."""
        cheapest = "/health" if self._manifest.url.path == API_PATH else "/v1/models"
        try:
            await self._client.get(cheapest, cap=limits.ENGINE_HEALTH_BODY)
        except EngineUnreachable as error:
            self._unanswered(error)
        except EngineMisspoke:
            self._signs = self._signs.answered(self._clock.boot_ms(), self._in_flight)
        else:
            self._signs = self._signs.answered(self._clock.boot_ms(), self._in_flight)
        if 0 < self._signs.unanswered < FAILURES:
            self._fast_at = self._clock.boot_ms()

    def _unanswered(self, error: EngineUnreachable) -> None:
        """A question got no answer. A refused connection is a fact, an answer that broke off asks who is there now; of mere
        silence any byte of an answer to a request of ours since makes nothing."""
        now = self._clock.boot_ms()
        if error.reason in ("connect", "guard"):
            self._gone()
            self._soon(identify=True)
            return
        if error.reason == "read" and self._adapter is not None:
            self._broke_off = True
            self._soon(identify=True)
        heard_ms = self._progress().last_byte_ms
        if heard_ms is not None and now - heard_ms <= _HEARD_MS:
            self._signs = self._signs.works()
        else:
            self._signs = self._signs.missed(now, self._in_flight)

    def _gone(self) -> None:
        self._signs = self._signs.gone()
        self._drop()

    def _misspoke(self, error: EngineMisspoke) -> None:
        self._signs = self._signs.unlisted(
            self._clock.boot_ms(), loading=error.reason == "loading", key_refused=error.reason == "auth"
        )

    def _drop(self) -> None:
        """Forget what is in the engine; what it owns stays known."""
        self._stop_listening()
        self._adapter = self._inferring = None
        self._identity = None
        self._status = replace(self._status, resident=(), load=None)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        self._listener = None

    def _soon(self, *, identify: bool = False, slow: bool = False) -> None:
        now = self._clock.boot_ms()
        if identify:
            self._identify_at = min(self._identify_at, now)
        if slow:
            self._slow_at = min(self._slow_at, now)
        if identify or slow:
            self._wake.set()

    def _retry(self) -> None:
        self._identify_at = self._after(self._wait_ms(self._attempts))
        self._attempts += 1

    def _wait_ms(self, attempts: int) -> int:
        return self._cadence.retry_ms[min(attempts, len(self._cadence.retry_ms) - 1)]

    def _after(self, wait_ms: int) -> int:
        return self._clock.boot_ms() + round(wait_ms * self._rng.uniform(0.9, 1.1))

    def _period(self) -> int:
        if self._in_flight:
            return self._cadence.busy_ms
        quiet = self._clock.boot_ms() - self._worked_ms > self._cadence.quiet_after_ms
        return self._cadence.quiet_ms if quiet else self._cadence.fast_ms

    def _publish(self) -> None:
        """Make the newest picture the status, and tell of it if more than its age changed."""
        now = self._clock.boot_ms()
        self._withdrawn = {what: end for what, end in self._withdrawn.items() if end > now}
        withdrawn = Dialect(0)
        for model, dialect in self._withdrawn:
            withdrawn |= dialect if model is None else Dialect(0)
        health = self._signs.judge(now, self._period(), self._in_flight)
        if health is EndpointHealth.READY and self._is_stuck(now):
            health = EndpointHealth.STUCK
        identity = self._identity
        if identity is not None and self._adapter is not None:
            identity = replace(identity, instance=self._adapter.instance)
        self._status = status = replace(
            self._status,
            health=health,
            reason=self._reason(health),
            identity=identity or self._status.identity,
            load=self._load(self._status.load),
            withdrawn=withdrawn,
            lacking=tuple(
                [
                    dialect_name(dialect) if model is None else f"{dialect_name(dialect)} of {model}"
                    for model, dialect in self._withdrawn
                ]
            ),
        )
        before, self._told = self._told, _ageless(status)
        if self._told != before:
            urgent = health is not before.health or _states(status.resident) != _states(before.resident)
            self._changed(status, urgent)

    def _load(self, load: ObservedLoad | None) -> ObservedLoad | None:
        if load is None or load.source is LoadSource.ENGINE:
            return load
        return own_load(self._in_flight, self._status.slots)

    def _reason(self, health: EndpointHealth) -> str | None:
        if self._signs.refusal is not None:
            return self._signs.refusal.value
        if health.is_sound:
            return None
        return TOO_LARGE if self._too_large and health is not EndpointHealth.UNREACHABLE else health.value


def _ageless(status: EndpointStatus) -> EndpointStatus:
    return replace(status, observed_ms=None)


def _states(resident: tuple[ObservedModel, ...]) -> dict[str, ResidencyState]:
    return {model.native_id: model.state for model in resident}


def _moving(resident: tuple[ObservedModel, ...]) -> set[str]:
    """Models on their way in or out."""
    moving = (ResidencyState.LOADING, ResidencyState.UNLOADING, ResidencyState.DOWNLOADING)
    return {model.native_id for model in resident if model.state in moving}
