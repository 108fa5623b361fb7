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
    EndpointStatus,
    EngineAdapter,
    EngineLoad,
    EngineMisspoke,
    EngineUnreachable,
    Health,
    Identity,
    InferringAdapter,
    LoadSource,
    Observation,
    OwnedModel,
    PushingAdapter,
    Refusal,
    Residency,
    ResidentModel,
    own_load,
)
from agent.engines.health import Signs
from agent.engines.identify import Starting, identify
from agent.engines.names import overlaid, publishable
from agent.settings.manifest import Manifest
from router_core.record.state import Dialect

Changed = Callable[[EndpointStatus, bool], None]
"""Told of every change but mere age; the flag is True if health or residency changed."""
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
INLINE_MODELS = 128
"""A list up to here is looked through in less time than a thread takes to be asked."""
TOO_LARGE = "list_too_large"


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
    ) -> None:
        self._manifest = manifest
        self._client = client
        self._clock = clock
        self._rng = rng
        self._spawn = spawn
        self._changed = changed
        self._cadence = cadence
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
        self._withdrawn: dict[Dialect, int] = {}
        self._status = EndpointStatus(
            name=manifest.name,
            manifest=manifest,
            health=Health.UNREACHABLE,
            detected=detected,
            credential=credential,
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
            if now + self._cadence.busy_ms < self._fast_at:
                self._fast_at = now + self._cadence.busy_ms
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

    def report_connect_failed(self) -> None:
        """A request could not connect: the engine is gone until it answers again."""
        self._silent(connect=True)
        self._publish()
        self._soon(identify=True)

    def look_soon(self) -> None:
        """The engine was told to change what it holds."""
        self._fast_at = min(self._fast_at, self._clock.boot_ms())
        self._wake.set()

    def report_absent(self) -> None:
        """The engine did not know a model it was listed with."""
        self._soon(slow=True)

    def report_auth(self) -> None:
        """The engine refused our own key for a request."""
        self._signs = self._signs.unauthorised()
        self._identify_at = self._clock.boot_ms() + self._cadence.identify_ms
        self._publish()

    def report_route(self, dialect: Dialect) -> None:
        """The engine did not know the route of ``dialect``: it is withdrawn for a while."""
        self._withdrawn[dialect] = self._clock.boot_ms() + self._cadence.withdrawn_ms
        self._publish()

    # Polling.

    async def _step(self) -> None:
        if self._adapter is None or self._clock.boot_ms() >= self._identify_at:
            await self._identify()
        if self._adapter is not None and self._clock.boot_ms() >= self._slow_at:
            await self._list(self._adapter)
        if self._adapter is not None and self._clock.boot_ms() >= self._fast_at:
            await self._look(self._adapter)

    async def _pause(self) -> None:
        due = self._identify_at
        if self._adapter is not None:
            due = min(due, self._slow_at, self._fast_at)
        try:
            async with asyncio.timeout(max(0, due - self._clock.boot_ms()) / 1_000):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            self._wake.clear()

    async def _identify(self) -> None:
        try:
            verdict = await identify(self._client, self._manifest)
        except EngineUnreachable as error:
            if error.reason == "guard":
                self._signs = self._signs.refused(Refusal.URL_REFUSED)
            self._silent(connect=error.reason == "connect")
            self._retry()
            return
        except EngineMisspoke as error:
            self._misspoke(error)
            self._retry()
            return
        if isinstance(verdict, Refusal):
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
            self._silent(connect=error.reason == "connect")
            self._soon(identify=True)
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
            self._signs = self._signs.listed(self._clock.boot_ms())
            await self._owns(adapter, told)

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
                self._status, owned=owned, unfit_names=unfit, more_models=adapter.more_models
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
            self._silent(connect=error.reason == "connect")
            self._soon(identify=True)
            return
        except EngineMisspoke as error:
            self._signs = self._signs.answered(self._clock.boot_ms())
            if error.reason == "loading":
                self._misspoke(error)
            self._soon(identify=error.reason == "loading")
            return
        if adapter is not self._adapter:
            return
        self._signs = self._signs.looked(self._clock.boot_ms())
        if seen.owned is not None:
            await self._owns(adapter, seen.owned)
            self._signs = self._signs.listed(self._clock.boot_ms())
        self._saw(seen)
        if adapter.restarts != before:
            self._soon(identify=True, slow=True)

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

    def _silent(self, *, connect: bool) -> None:
        self._signs = self._signs.silent(connect=connect)
        if self._signs.lost:
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
        self._withdrawn = {dialect: end for dialect, end in self._withdrawn.items() if end > now}
        withdrawn = Dialect(0)
        for dialect in self._withdrawn:
            withdrawn |= dialect
        health = self._signs.judge(now, self._period())
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
        )
        before, self._told = self._told, _ageless(status)
        if self._told != before:
            urgent = health is not before.health or _states(status.resident) != _states(before.resident)
            self._changed(status, urgent)

    def _load(self, load: EngineLoad | None) -> EngineLoad | None:
        if load is None or load.source is LoadSource.ENGINE:
            return load
        return own_load(self._in_flight, self._status.slots)

    def _reason(self, health: Health) -> str | None:
        if self._signs.refusal is not None:
            return self._signs.refusal.value
        if health.takes_requests:
            return None
        return TOO_LARGE if self._too_large and health is not Health.UNREACHABLE else health.value


def _ageless(status: EndpointStatus) -> EndpointStatus:
    return replace(status, observed_ms=None)


def _states(resident: tuple[ResidentModel, ...]) -> dict[str, Residency]:
    return {model.native_id: model.state for model in resident}


def _moving(resident: tuple[ResidentModel, ...]) -> set[str]:
    """Models on their way in or out."""
    moving = (Residency.LOADING, Residency.UNLOADING, Residency.DOWNLOADING)
    return {model.native_id for model in resident if model.state in moving}
