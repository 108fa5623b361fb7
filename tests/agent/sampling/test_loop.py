"""The tick, from question to published sample."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.effects.clock import SystemClock
from agent.sampling.driver import DriverSeen
from agent.sampling.files import Roots
from agent.sampling.host import HostAnswer, Tick
from agent.sampling.loop import OwnWork, Sampler, SamplerPorts, SamplingTimes, next_tick
from agent.sampling.reader import HostReader
from agent.settings.load import Settings, load
from router_core.policy.pressure import GIB
from router_core.pressure.machine import NotifyLevel
from router_core.pressure.samples import GpuIdentity, GpuSample, HostSample, ReadingStatus, Sampled, measured
from router_core.record.state import Flag, GpuState, Level, ResourceCode
from tests.support.host_samples import host
from tests.support.until import until


class Shifted(SystemClock):
    """The host's clock, moved on by the test."""

    ahead_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.ahead_ms


class Cards:
    """A source of GPUs that answers at once with what the test says."""

    library: str | None = "/lib/libnvidia-ml.so.1"
    outstanding = False
    degraded = False
    reboot_pending = False

    def __init__(self, clock: Shifted) -> None:
        self.clock = clock
        self.util = 0
        self.state = GpuState.OK
        self.seen: list[DriverSeen] = []
        self.asked = 0
        self.answers = True
        self.closed = False

    @property
    def expected(self) -> bool:
        return bool(self.seen)

    def driver_seen(self, driver: DriverSeen) -> None:
        self.seen.append(driver)

    def ask(self, answered: Callable[[], None]) -> None:
        self.asked += 1
        if self.answers:
            answered()

    def samples(self, _host: HostSample | None) -> tuple[GpuSample, ...]:
        now = self.clock.boot_ms()
        return (
            GpuSample(
                identity=GpuIdentity(key="ab" * 8, name="card", vram_total_bytes=24 * GIB),
                state=self.state,
                util_pct=measured(self.util, now),
                vram_free_bytes=measured(20 * GIB, now),
            ),
        )

    async def aclose(self) -> None:
        self.closed = True


class Desk:
    """A sampler with a scripted host, and everything it published."""

    def __init__(
        self,
        folder: Path,
        *,
        read: Callable[[Tick], HostAnswer] | None = None,
        gpus: "Cards | None" = None,
        **times: int,
    ) -> None:
        self.clock = gpus.clock if gpus is not None else Shifted()
        self.free = threading.Event()
        self.free.set()
        self.asked: list[Tick] = []
        self.changes: dict[str, Any] = {}
        self.between: Callable[[], None] | None = None
        """Called once after a tick, when nothing is being read."""
        self.profile = "server"
        self.error: Exception | None = None
        self.work = OwnWork(units=(None,))
        self.published: list[tuple[Sampled, bool]] = []
        self.notes: list[NotifyLevel] = []
        self.errors: list[Exception] = []
        found = load(folder, host_name="x")
        assert isinstance(found, Settings)
        ports = SamplerPorts(
            read=read or self._read,
            work=lambda: self.work,
            on_sampled=self._publish,
            on_notify=self.notes.append,
            on_failed=self.errors.append,
        )
        self.gpus = gpus
        self.sampler = Sampler(
            found.sampling, self.clock, ports, SamplingTimes(**{"tick_ms": 20, "answer_ms": 10} | times), gpus
        )

    def _publish(self, sampled: Sampled, urgent: bool) -> None:
        self.published.append((sampled, urgent))
        if self.between is not None:
            between, self.between = self.between, None
            between()

    def _read(self, tick: Tick) -> HostAnswer:
        self.asked.append(tick)
        self.free.wait(30)
        if self.error is not None:
            raise self.error
        now = self.clock.boot_ms()
        sample = host(now, **{name: make(now) for name, make in self.changes.items()})
        return HostAnswer(
            sample=sample,
            profile=self.profile if tick.want_profile else None,
            driver=DriverSeen(present=True, loaded="1.2") if tick.want_driver else None,
        )

    @property
    def last(self) -> Sampled:
        return self.published[-1][0]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.sampler.run())
        try:
            await until(
                lambda: (
                    self.published and self.last.resources and self.last.cpu_external_pct.value is not None
                )
            )
            yield
        finally:
            self.free.set()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_the_real_host_is_published_with_levels_scores_and_external_cpu(tmp_path: Path) -> None:
    desk = Desk(tmp_path, read=HostReader(Roots(), SystemClock().boot_ms).read, tick_ms=50, answer_ms=1_000)
    desk.work = OwnWork()
    async with desk.running():
        await until(lambda: all(state.level is not None for state in desk.last.resources if state.taken_ms))
        assert desk.last.mem_avail_bytes.status is ReadingStatus.OK
        assert desk.last.cpu_external_pct.value is not None
        assert 0 <= desk.last.cpu_external_pct.value <= 100
        assert desk.last.flags == Flag(0)
        assert desk.sampler.latest is desk.last


async def test_a_change_of_level_is_urgent_once_and_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.running():
        await until(lambda: all(state.level is Level.NONE for state in desk.last.resources))
        seen, told = len(desk.published), len(desk.notes)
        desk.changes["mem_avail_bytes"] = lambda now: measured(2 * GIB, now)
        await until(lambda: any(urgent for _, urgent in desk.published[seen:]))
        await until(lambda: len(desk.published) > seen + 5)
        assert [urgent for _, urgent in desk.published[seen:]].count(True) == 1
        assert [note.transition.signal for note in desk.notes[told:]] == ["memory.avail"]


async def test_a_stuck_thread_never_holds_up_a_tick_and_its_fields_age(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.running():
        desk.free.clear()
        held = len(desk.asked)
        await until(lambda: len(desk.asked) > held)
        beat, seen = desk.sampler.heartbeat_ms, len(desk.published)
        desk.clock.ahead_ms = 4_000
        await until(lambda: desk.last.mem_avail_bytes.status is ReadingStatus.STALE)
        assert desk.last.flags == Flag.SENSOR_STALE
        assert len(desk.published) > seen
        desk.clock.ahead_ms = 11_000
        await until(lambda: desk.last.mem_avail_bytes.status is ReadingStatus.UNKNOWN)
        assert desk.last.mem_avail_bytes.value is None
        assert desk.last.flags == Flag.SENSOR_STALE | Flag.DEGRADED
        assert len(desk.asked) == held + 1
        assert desk.sampler.heartbeat_ms == beat
        desk.free.set()
        await until(lambda: desk.last.flags == Flag(0))
        assert desk.sampler.heartbeat_ms > beat


async def test_a_host_that_never_answers_is_published_as_unknown(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.free.clear()
    task = asyncio.create_task(desk.sampler.run())
    await until(lambda: len(desk.published) > 2)
    assert desk.last.host is None
    assert desk.last.flags == Flag.SENSOR_STALE
    assert {state.level for state in desk.last.resources} == {None}
    desk.free.set()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_read_that_raises_is_told_and_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.running():
        desk.error = ValueError("odd file")
        await until(lambda: len(desk.errors) >= 2)
        desk.error = None
        seen = desk.sampler.heartbeat_ms
        await until(lambda: desk.sampler.heartbeat_ms > seen)


async def test_a_suspend_drops_the_difference_it_spans(tmp_path: Path) -> None:
    desk = Desk(tmp_path)

    def suspend() -> None:
        desk.clock.ahead_ms += 5_000
        desk.changes["oom_kills"] = lambda now: measured(7, now)

    async with desk.running():
        await until(lambda: all(state.level is Level.NONE for state in desk.last.resources))
        desk.between = suspend
        await until(lambda: desk.clock.ahead_ms)
        woken = desk.clock.boot_ms()
        await until(lambda: desk.last.cpu_busy_pct.taken_ms > woken)
        assert all(note.transition.after is not Level.CRITICAL for note in desk.notes)


async def test_the_detected_profile_is_taken_over(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.profile = "desktop"
    async with desk.running():
        await until(lambda: desk.last.profile == "desktop")
        assert desk.asked[0].want_profile
        assert not desk.asked[1].want_profile


async def test_units_of_engines_are_asked_for_once_each(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.work = OwnWork(units=("ollama.service", None, "ollama.service"))
    async with desk.running():
        assert desk.asked[0].units == ("ollama.service",)


async def test_ticks_slow_down_while_nothing_is_asked_of_this_node(tmp_path: Path) -> None:
    desk = Desk(tmp_path, idle_tick_ms=30, idle_after_ms=60_000)
    async with desk.running():
        assert desk.sampler.period_ms == 20
        desk.work = OwnWork()
        desk.clock.ahead_ms += 60_000
        await until(lambda: desk.sampler.period_ms == 30)
        desk.work = OwnWork(in_flight=True)
        await until(lambda: desk.sampler.period_ms == 20)


async def test_signals_switched_off_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / "pairmesh.toml").write_text('[sampling]\nprofile = "server"\npressure.swap.rate = "off"\n')
    desk = Desk(tmp_path)
    async with desk.running():
        assert [state.code.name for state in desk.last.resources] == ["CPU", "MEMORY", "IO"]


async def test_gpus_are_asked_every_tick_published_with_their_level_and_closed_at_the_end(
    tmp_path: Path,
) -> None:
    cards = Cards(Shifted())
    (tmp_path / "pairmesh.toml").write_text(
        "[sampling.pressure.gpu_time.ext]\nhigh = { enter = 80, hold_in_s = 0, exit = 50, hold_out_s = 0 }\n"
        "elevated = { enter = 40, hold_in_s = 0, exit = 30, hold_out_s = 0 }\n"
    )
    desk = Desk(tmp_path, gpus=cards)
    async with desk.running():
        await until(lambda: desk.last.gpus and desk.last.gpus[0].level is Level.NONE)
        assert len(cards.seen) == 1
        assert desk.asked[0].want_driver
        assert desk.asked[0].library == cards.library
        assert desk.last.flags == Flag(0)
        cards.util = 95
        await until(lambda: desk.last.gpus[0].level is Level.HIGH)
        assert (desk.last.gpus[0].external_pct.value, desk.last.gpus[0].source) == (95, 4)
        assert [s.level for s in desk.last.resources if s.code is ResourceCode.GPU_TIME] == [Level.HIGH]
        assert any(urgent for _, urgent in desk.published[-3:])
    assert cards.closed


async def test_a_gpu_that_hangs_never_holds_up_a_tick(tmp_path: Path) -> None:
    cards = Cards(Shifted())
    desk = Desk(tmp_path, gpus=cards)
    async with desk.running():
        cards.outstanding = True
        cards.answers = False
        seen, read = len(desk.published), len(desk.asked)
        await until(lambda: len(desk.published) > seen + 5)
        assert len(desk.asked) > read + 3, "the host is read on as well"


async def test_own_work_between_two_ticks_is_never_taken_for_somebody_elses(tmp_path: Path) -> None:
    cards = Cards(Shifted())
    desk = Desk(tmp_path, gpus=cards)
    async with desk.running():
        await until(lambda: desk.last.gpus and desk.last.gpus[0].external_pct.value == 0)
        desk.sampler.worked()
        cards.util = 100
        seen, read = len(desk.published), len(desk.asked)
        await until(lambda: len(desk.asked) > read + 5)
        assert {sampled.gpus[0].external_pct.value for sampled, _ in desk.published[seen:]} == {0}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"state": GpuState.LOST}, Flag.NO_LOAD),
        ({"state": GpuState.DENIED}, Flag.NO_LOAD),
        ({"state": GpuState.UNRESPONSIVE, "degraded": True}, Flag.DEGRADED),
        ({"reboot_pending": True}, Flag.NO_LOAD),
        ({"state": GpuState.UNSUPPORTED}, Flag(0)),
    ],
)
async def test_what_gpus_cannot_do_is_flagged(tmp_path: Path, changes: dict[str, Any], flags: Flag) -> None:
    cards = Cards(Shifted())
    desk = Desk(tmp_path, gpus=cards)
    async with desk.running():
        for name, value in changes.items():
            setattr(cards, name, value)
        await until(lambda: desk.last.flags & ~Flag.SENSOR_STALE == flags, picture=lambda: desk.last.flags)


@settings(max_examples=100)
@given(grid=st.integers(0, 10**9), period=st.integers(1, 5_000), late=st.integers(0, 100_000))
def test_the_next_tick_lies_on_the_grid_and_missed_ones_are_skipped(
    grid: int, period: int, late: int
) -> None:
    now = grid + late
    due = next_tick(grid, period, now)
    assert due > grid
    assert (due - grid) % period == 0
    assert now <= due
    assert due - now < period or due == grid + period
