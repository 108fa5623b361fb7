"""The tick: ask the host thread, fold what it answered, step the pressure machine, publish one ``Sampled``.

Ticks lie on a fixed grid and missed ones are skipped. Each is published at its answer, or 300 ms after it began
with what is known by then; a late answer joins the next step. Everything else in the process reads the latest
``Sampled`` from memory; nothing is measured on demand.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from agent.effects.clock import Clock
from agent.sampling.driver import DriverSeen
from agent.sampling.host import HostAnswer, HostThread, Tick
from agent.settings.load import SamplingSettings
from router_core.policy.pressure import PROFILES, SERVER, PressurePolicy, with_overrides
from router_core.pressure.gpus import GpuTracks
from router_core.pressure.level import Pressed
from router_core.pressure.machine import (
    Action,
    HostResumed,
    NotifyLevel,
    PolicyChanged,
    PressureMachine,
    PublishUrgent,
    SignalsSampled,
)
from router_core.pressure.samples import GpuSample, HostSample, ReadingStatus, Sampled, aged, missing
from router_core.pressure.signals import OwnUse, host_inputs
from router_core.pressure.split import Cooldown, CpuSplit, OwnTrace
from router_core.record.state import Flag, GpuState

NO_LOAD_STATES: Final = frozenset({GpuState.LOST, GpuState.DRAIN, GpuState.RELEASED, GpuState.DENIED})
DEFAULT_UNITS: Final = {
    "ollama": "ollama.service",
    "llamacpp": "llama-server.service",
    "vllm": "vllm.service",
}
"""The unit an engine of a kind usually runs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWork:
    """What this node is doing: whether a request, load or unload is in flight at a local engine, the unit of each
    local engine that is up (None: not known to run in one), whether an engine loads or unloads a model, and which
    models are in memory, as (engine, model)."""

    in_flight: bool = False
    units: tuple[str | None, ...] = ()
    loading: bool = False
    residents: frozenset[tuple[str, str]] = frozenset()


class GpuSource(Protocol):
    """Where GPU samples come from. Every call returns at once; nothing here waits for a driver."""

    @property
    def library(self) -> str | None:
        """Where the driver's library was loaded from."""

    @property
    def outstanding(self) -> bool:
        """Whether a question waits for its answer."""

    @property
    def expected(self) -> bool:
        """Whether this host has a GPU driver to ask."""

    @property
    def degraded(self) -> bool:
        """Whether the source failed after it had worked, or was denied."""

    @property
    def reboot_pending(self) -> bool:
        """Whether the driver was replaced on disk and runs no new clients."""

    def driver_seen(self, driver: DriverSeen) -> None:
        """The host thread looked for a driver."""

    def ask(self, answered: Callable[[], None]) -> None:
        """Begin to read the GPUs unless that is under way; ``answered`` is called at the end."""

    def samples(self, host: HostSample | None) -> tuple[GpuSample, ...]:
        """The newest readings of every GPU known, by bus id; ``host`` tells of memory they share with it."""

    async def aclose(self) -> None:
        """Stop asking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTimes:
    """Cadence of the tick, in milliseconds. Tests shorten it."""

    tick_ms: int = 1_000
    answer_ms: int = 300
    idle_tick_ms: int = 5_000
    idle_after_ms: int = 60_000
    profile_ms: int = 60_000
    driver_ms: int = 30_000
    silent_ms: int = 10_000
    resume_ms: int = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerPorts:
    """Where a sampler gets its questions answered and leaves what it finds.

    ``on_sampled(sampled, urgent)`` is called at every tick, ``on_notify`` at every change of a level,
    ``on_failed`` when a read raised.
    """

    read: Callable[[Tick], HostAnswer]
    work: Callable[[], OwnWork]
    on_sampled: Callable[[Sampled, bool], None]
    on_notify: Callable[[NotifyLevel], None]
    on_failed: Callable[[Exception], None]


@dataclass(slots=True)
class ProfileChoice:
    """The profile in force: the operator's, or what was detected; a change needs two equal results in a row."""

    asked: str
    current: str = field(init=False)
    _last: str | None = None

    def __post_init__(self) -> None:
        self.current = SERVER.profile if self.asked == "auto" else self.asked

    def detect(self, found: str) -> None:
        """Take one detection; the first one counts at once."""
        if self.asked == "auto" and self._last in (None, found):
            self.current = found
        self._last = found


def next_tick(grid: int, period_ms: int, now: int) -> int:
    """The first point of the grid after ``grid`` that is not over at ``now``; those in between are skipped."""
    return grid + period_ms * max(1, -((grid - now) // period_ms))


class Sampler:
    """Owns the host thread, the split and the pressure machine. ``latest`` is None before the first tick."""

    def __init__(
        self,
        settings: SamplingSettings,
        clock: Clock,
        ports: SamplerPorts,
        times: SamplingTimes | None = None,
        gpus: GpuSource | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._ports = ports
        self._times = times or SamplingTimes()
        self._choice = ProfileChoice(settings.profile)
        self._machine = PressureMachine(self._table())
        self._trace = OwnTrace()
        self._split = CpuSplit(self._trace)
        self._cooldown = Cooldown()
        self._gpus = gpus
        self._tracks = GpuTracks()
        self._thread = HostThread(ports.read, answered=self._take, failed=self._failed)
        self._answered = asyncio.Event()
        self._sample: HostSample | None = None
        self._heartbeat_ms = self._busy_ms = clock.boot_ms()
        self._profile_due_ms = self._driver_due_ms = self._heartbeat_ms
        self._period_ms = self._times.tick_ms
        self._clock_gap_ms: float | None = None
        self.latest: Sampled | None = None

    @property
    def heartbeat_ms(self) -> int:
        """When the host thread last completed a read; before the first, when the sampler was made."""
        return self._heartbeat_ms

    @property
    def period_ms(self) -> int:
        """The time between ticks at present."""
        return self._period_ms

    def pressed(self) -> tuple[Pressed, ...]:
        """The signals behind a level of HIGH or above now."""
        return self._machine.pressed()

    def worked(self) -> None:
        """A request of ours enters or leaves a local engine, be it between two ticks."""
        self._trace.note(self._clock.boot_ms())

    async def run(self) -> None:
        """Tick until cancelled."""
        self._thread.start()
        grid = self._clock.boot_ms()
        try:
            while True:
                try:
                    await self._tick()
                except Exception as fault:
                    self._ports.on_failed(fault)
                now = self._clock.boot_ms()
                grid = next_tick(grid, self._period_ms, now)
                await asyncio.sleep((grid - now) / 1_000)
        finally:
            self._thread.stop()
            if self._gpus is not None:
                await self._gpus.aclose()

    async def _tick(self) -> None:
        now = self._clock.boot_ms()
        work = self._ports.work()
        own = self._own_use(work, now)
        self._adapt(work, now)
        actions = self._resumed(now)
        self._answered.clear()
        units = tuple(unit for unit in dict.fromkeys(work.units) if unit is not None)
        self._thread.ask(
            Tick(
                units=units,
                want_profile=now >= self._profile_due_ms,
                want_driver=self._gpus is not None and now >= self._driver_due_ms,
                library=None if self._gpus is None else self._gpus.library,
            )
        )
        if self._gpus is not None:
            self._gpus.ask(self._arrived)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._times.answer_ms / 1_000):
                await self._answered.wait()
        actions += self._changed_profile(self._clock.boot_ms())
        self._publish(actions + self._step(len(set(work.units)), own, self._clock.boot_ms()))

    def _own_use(self, work: OwnWork, now: int) -> OwnUse:
        cooling = self._cooldown.fold(work.loading, work.residents, now)
        if work.in_flight or work.loading:
            self._trace.note(now)
        return OwnUse(working=cooling or self._trace.within(now, self._period_ms), cooling=cooling)

    def _adapt(self, work: OwnWork, now: int) -> None:
        """Tick more slowly while no engine is up and nothing was asked of one for a while."""
        if work.in_flight or work.units:
            self._busy_ms = now
        idle = now - self._busy_ms >= self._times.idle_after_ms
        self._period_ms = self._times.idle_tick_ms if idle else self._times.tick_ms

    def _resumed(self, now: int) -> list[Action]:
        """Notice a suspend: the boot clock went on while the loop's clock stood still."""
        gap = now - asyncio.get_running_loop().time() * 1_000
        before, self._clock_gap_ms = self._clock_gap_ms, gap
        if before is None or gap - before <= self._times.resume_ms:
            return []
        self._split.clear()
        return self._machine.handle(HostResumed(), now)

    def _take(self, answer: HostAnswer) -> None:
        self._sample = answer.sample
        self._heartbeat_ms = self._clock.boot_ms()
        if answer.profile is not None:
            self._profile_due_ms = self._heartbeat_ms + self._times.profile_ms
            self._choice.detect(answer.profile)
        if answer.driver is not None and self._gpus is not None:
            self._driver_due_ms = self._heartbeat_ms + self._times.driver_ms
            self._gpus.driver_seen(answer.driver)
        self._arrived()

    def _failed(self, error: Exception) -> None:
        self._arrived()
        self._ports.on_failed(error)

    def _arrived(self) -> None:
        """A part of a tick's answer came: the tick goes on once nothing is outstanding."""
        if not self._thread.outstanding and (self._gpus is None or not self._gpus.outstanding):
            self._answered.set()

    def _changed_profile(self, now: int) -> list[Action]:
        if self._choice.current == self._machine.profile:
            return []
        return self._machine.handle(PolicyChanged(policy=self._table()), now)

    def _table(self) -> PressurePolicy:
        tuning = self._settings.pressure
        return with_overrides(PROFILES[self._choice.current], tuning.overrides, tuning.off)

    def _step(self, engines_up: int, own: OwnUse, now: int) -> list[Action]:
        samples = () if self._gpus is None else self._gpus.samples(self._sample)
        gpus = self._tracks.fold(samples, self._trace, own, now, self._period_ms)
        if self._sample is None:
            return []
        self._split.fold(self._sample, engines_up=engines_up)
        inputs = host_inputs(
            self._sample,
            now,
            self._period_ms,
            external=self._split.external_pct,
            external_mean=self._split.external_mean_pct,
            own=own,
        )
        return self._machine.handle(SignalsSampled(inputs=inputs, gpus=gpus), now)

    def _publish(self, actions: list[Action]) -> None:
        now, sample, source = self._clock.boot_ms(), self._sample, self._gpus
        gpus = self._tracks.standings(self._machine.gpus, now, self._period_ms)
        memory = aged(sample.mem_avail_bytes if sample else missing(0), now, self._period_ms, published=True)
        external = aged(self._split.external_pct, now, self._period_ms, published=True)
        expected = source is not None and source.expected
        reboot_pending = source is not None and source.reboot_pending
        flags = Flag(0)
        silent = now - self._heartbeat_ms >= self._times.silent_ms
        if silent or (source is not None and source.degraded):
            flags |= Flag.DEGRADED
        told = [gpu.sample.vram_free_bytes.status for gpu in gpus] + [gpu.external_pct.status for gpu in gpus]
        if {memory.status, external.status, *told} & {ReadingStatus.STALE, ReadingStatus.UNKNOWN}:
            flags |= Flag.SENSOR_STALE
        if reboot_pending or (gpus and all(gpu.sample.state in NO_LOAD_STATES for gpu in gpus)):
            flags |= Flag.NO_LOAD
        self.latest = Sampled(
            at_ms=now,
            profile=self._machine.profile,
            host=sample,
            mem_avail_bytes=memory,
            cpu_busy_pct=aged(self._split.busy_pct, now, self._period_ms, published=False),
            cpu_external_pct=external,
            resources=self._machine.resources,
            flags=flags,
            gpus=gpus,
            gpu_expected=expected,
            reboot_pending=reboot_pending,
            host_silent=silent,
        )
        for action in actions:
            if isinstance(action, NotifyLevel):
                self._ports.on_notify(action)
        self._ports.on_sampled(self.latest, any(isinstance(action, PublishUrgent) for action in actions))
