"""GPUs: whose use it is, what levels follow, and what a node with several of them says."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.policy.pressure import DESKTOP, GIB, SERVER, PressurePolicy
from router_core.pressure.machine import (
    GpuSignals,
    NotifyLevel,
    PressureMachine,
    PublishUrgent,
    SignalsSampled,
)
from router_core.pressure.samples import (
    GpuIdentity,
    GpuSample,
    ReadingStatus,
    ResourceState,
    measured,
    missing,
    unsupported,
)
from router_core.pressure.signals import OwnUse, gpu_inputs, host_inputs
from router_core.pressure.split import HELD, IDLE_WINDOW, GpuSplit, OwnTrace, VramGrowth
from router_core.record.state import GpuState, Level, ResourceCode
from tests.support.host_samples import host

NONE, ELEVATED, HIGH, CRITICAL = Level
GPU_TIME, VRAM = ResourceCode.GPU_TIME, ResourceCode.VRAM


def gpu(key: str, at_ms: int, util: int = 0, free_gib: float = 20, **changes: Any) -> GpuSample:
    """A card of 24 GiB as read at ``at_ms``."""
    identity = GpuIdentity(
        key=key, name="card", vram_total_bytes=24 * GIB, unified=changes.pop("unified", False)
    )
    sample: dict[str, Any] = {
        "identity": identity,
        "state": GpuState.OK,
        "util_pct": measured(util, at_ms),
        "vram_free_bytes": measured(round(free_gib * GIB), at_ms),
    }
    return GpuSample(**(sample | changes))


class Rig:
    """A machine that is fed some GPUs once a second, as the sampler feeds it."""

    def __init__(self, policy: PressurePolicy = SERVER) -> None:
        self.machine = PressureMachine(policy)
        self.now = 0
        self.trace = OwnTrace()
        self.splits: dict[str, GpuSplit] = {}
        self.growths: dict[str, VramGrowth] = {}
        self.notes: list[NotifyLevel] = []
        self.urgent = 0

    def run(self, seconds: int, *gpus: dict[str, Any], ours: bool = False, cooling: bool = False) -> None:
        for _ in range(seconds):
            self.now += 1_000
            if ours:
                self.trace.note(self.now)
            own = OwnUse(working=ours, cooling=cooling)
            listed = {}
            for position, changes in enumerate(gpus):
                sample = gpu(f"g{position}", self.now, **changes)
                key = sample.identity.key
                split = self.splits.setdefault(key, GpuSplit())
                growth = self.growths.setdefault(key, VramGrowth())
                split.fold(sample.util_pct, self.trace, cooling=cooling)
                growth.fold(sample.vram_free_bytes, cooling=cooling)
                listed[key] = GpuSignals(
                    inputs=gpu_inputs(sample, split.external_pct, growth.bytes, self.now, 1_000, own=own),
                    usable=sample.usable,
                    unified=sample.identity.unified,
                )
            event = SignalsSampled(inputs=host_inputs(host(self.now), self.now, 1_000, own=own), gpus=listed)
            for action in self.machine.handle(event, self.now):
                match action:
                    case NotifyLevel():
                        self.notes.append(action)
                    case PublishUrgent():
                        self.urgent += 1

    def state(self, code: ResourceCode) -> ResourceState | None:
        return next((state for state in self.machine.resources if state.code is code), None)

    def level(self, code: ResourceCode) -> Level | None:
        state = self.state(code)
        assert state is not None
        return state.level


def test_a_host_without_gpus_says_nothing_about_them() -> None:
    rig = Rig()
    rig.run(3)
    assert (rig.state(GPU_TIME), rig.state(VRAM), rig.machine.gpus) == (None, None, {})


def test_others_on_the_gpu_raise_its_level_after_the_hold_and_it_returns_when_they_stop() -> None:
    rig = Rig(DESKTOP)
    rig.run(5, {})
    rig.run(3, {"util": 90})
    assert rig.level(GPU_TIME) is NONE
    rig.run(5, {"util": 90})
    assert rig.level(GPU_TIME) is HIGH
    assert rig.machine.gpus["g0"].level is HIGH
    told = [note.transition for note in rig.notes if note.transition.after is HIGH]
    assert [(change.gpu, change.signal) for change in told] == [("g0", "gpu_time.ext")]
    rig.run(40, {})
    assert rig.level(GPU_TIME) is NONE


def test_own_load_alone_is_never_pressure_however_long_it_lasts() -> None:
    rig = Rig(DESKTOP)
    rig.run(5, {})
    for _ in range(20):
        rig.run(30, {"util": 100, "free_gib": 0.5}, ours=True, cooling=True)
        assert rig.level(GPU_TIME) in (NONE, None)
        assert rig.level(VRAM) is NONE
    rig.run(30, {"util": 2, "free_gib": 0.5})
    assert (rig.level(GPU_TIME), rig.level(VRAM)) == (NONE, NONE)


def test_a_figure_is_held_a_minute_while_own_work_runs_then_it_is_unknown_not_idle() -> None:
    split, trace = GpuSplit(), OwnTrace()
    split.fold(measured(80, 1_000), trace)
    assert (split.external_pct.value, split.source) == (80, IDLE_WINDOW)
    for second in range(2, 62):
        trace.note(second * 1_000)
        split.fold(measured(100, second * 1_000), trace)
        assert (split.external_pct.value, split.source) == (80, HELD)
    trace.note(62_000)
    split.fold(measured(100, 62_000), trace)
    assert (split.external_pct.value, split.external_pct.status, split.source) == (
        None,
        ReadingStatus.UNKNOWN,
        0,
    )


def test_use_right_after_own_work_still_counts_as_ours() -> None:
    split, trace = GpuSplit(), OwnTrace()
    split.fold(measured(0, 1_000), trace)
    trace.note(1_800)
    split.fold(measured(90, 2_000), trace)
    split.fold(measured(40, 3_000), trace)
    assert (split.external_pct.value, split.source) == (0, HELD)
    split.fold(measured(40, 5_000), trace)
    assert (split.external_pct.value, split.source) == (40, IDLE_WINDOW)


def test_a_gpu_that_stops_answering_holds_its_level_thirty_seconds_and_then_is_unknown() -> None:
    rig = Rig(DESKTOP)
    rig.run(12, {"util": 90})
    assert rig.level(GPU_TIME) is HIGH
    silent = {"state": GpuState.UNKNOWN, "util_pct": missing(12_000), "vram_free_bytes": missing(12_000)}
    rig.run(38, silent)
    assert rig.level(GPU_TIME) is HIGH
    rig.run(12, silent)
    assert rig.level(GPU_TIME) is None
    assert rig.machine.gpus["g0"].level is None


def test_a_node_is_as_pressed_as_its_least_pressed_usable_gpu() -> None:
    rig = Rig(DESKTOP)
    rig.run(20, {"util": 95}, {"util": 0})
    assert rig.level(GPU_TIME) is NONE
    assert [rig.machine.gpus[key].level for key in ("g0", "g1")] == [HIGH, NONE]
    lost = {"state": GpuState.LOST, "util_pct": missing(0), "vram_free_bytes": missing(0)}
    rig.run(1, {"util": 95}, lost)
    assert rig.level(GPU_TIME) is HIGH
    assert rig.machine.gpus["g1"].level is None
    rig.run(1, {"util": 95})
    assert list(rig.machine.gpus) == ["g0"]


def test_memory_that_others_took_is_pressure_and_own_models_are_not() -> None:
    rig = Rig()
    rig.run(5, {"free_gib": 20})
    rig.run(10, {"free_gib": 0.3}, cooling=True)
    rig.run(20, {"free_gib": 0.3})
    assert rig.level(VRAM) is NONE
    rig.run(5, {"free_gib": 8}, cooling=True)
    rig.run(5, {"free_gib": 8})
    rig.run(3, {"free_gib": 0.3})
    assert rig.level(VRAM) is HIGH
    rig.run(20, {"free_gib": 8})
    assert rig.level(VRAM) is NONE


def test_shared_memory_has_the_level_of_the_host_memory() -> None:
    rig = Rig()
    rig.run(3, {"unified": True})
    assert rig.level(VRAM) is NONE
    rig.run(1, {"unified": True, "vram_free_bytes": unsupported(0)})
    assert rig.level(VRAM) is rig.level(ResourceCode.MEMORY) is NONE


def test_a_gpu_whose_use_cannot_be_known_is_no_pressure_and_not_idle() -> None:
    rig = Rig()
    rig.run(3, {"util_pct": unsupported(0)})
    assert rig.level(GPU_TIME) is None
    assert rig.level(VRAM) is NONE


@pytest.mark.parametrize(("external", "level"), [(90.0, HIGH), (10.0, NONE)])
def test_stalls_of_the_cpu_count_only_where_others_cause_them(external: float, level: Level) -> None:
    machine = PressureMachine(SERVER)
    for second in range(1, 15):
        now = 1_000 * second
        sample = host(now, cpu_some_us=measured(now * 800, now))
        inputs = host_inputs(
            sample, now, 1_000, external=measured(external, now), external_mean=measured(external, now)
        )
        machine.handle(SignalsSampled(inputs=inputs), now)
    assert machine.resources[0].level is level


@pytest.mark.parametrize(("working", "level"), [(True, NONE), (False, HIGH)])
def test_stalls_of_unknown_cause_are_others_only_while_we_are_idle(working: bool, level: Level) -> None:
    machine = PressureMachine(SERVER)
    for second in range(1, 15):
        now = 1_000 * second
        sample = host(now, cpu_some_us=measured(now * 800, now))
        inputs = host_inputs(sample, now, 1_000, own=OwnUse(working=working))
        machine.handle(SignalsSampled(inputs=inputs), now)
    assert machine.resources[0].level is level


@pytest.mark.parametrize("stalls", [unsupported, missing])
def test_where_no_stalls_are_told_external_use_decides(stalls: Any) -> None:
    machine = PressureMachine(SERVER)
    for second in range(1, 15):
        now = 1_000 * second
        inputs = host_inputs(host(now, cpu_some_us=stalls(now)), now, 1_000, external=measured(99.0, now))
        machine.handle(SignalsSampled(inputs=inputs), now)
    assert machine.resources[0].level is HIGH


def test_an_own_load_that_swings_the_disk_is_no_pressure() -> None:
    def level_after(cooling: bool) -> Level | None:
        machine = PressureMachine(SERVER)
        for second in range(1, 20):
            now = 1_000 * second
            stalled = max(0, now - 5_000) * 900
            own = OwnUse(cooling=cooling and second > 3)
            inputs = host_inputs(host(now, io_some_us=measured(stalled, now)), now, 1_000, own=own)
            machine.handle(SignalsSampled(inputs=inputs), now)
        return next(state.level for state in machine.resources if state.code is ResourceCode.IO)

    assert (level_after(True), level_after(False)) == (NONE, HIGH)


def test_a_wave_shorter_than_the_holds_moves_at_most_once_and_hovering_settles() -> None:
    wave, hover = Rig(DESKTOP), Rig(DESKTOP)
    wave.run(5, {})
    hover.run(5, {})
    for _ in range(40):
        wave.run(2, {"util": 60})
        wave.run(6, {"util": 0})
        hover.run(1, {"util": 57})
        hover.run(1, {"util": 43})
    for rig in (wave, hover):
        moved = [n for n in rig.notes if n.transition.signal == "gpu_time.ext" and not n.transition.reason]
        assert len(moved) <= 1
    assert hover.level(GPU_TIME) is ELEVATED


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 100)), st.floats(0, 24), st.booleans(), st.integers(1, 4)
        ),
        max_size=25,
    )
)
def test_same_samples_give_same_levels_and_nothing_rises_without_others(
    steps: list[tuple[int | None, float, bool, int]],
) -> None:
    first, again = Rig(DESKTOP), Rig(DESKTOP)
    for rig in (first, again):
        for util, free, ours, seconds in steps:
            reading: dict[str, Any] = {"util_pct": missing(rig.now)} if util is None else {"util": util}
            rig.run(seconds, {"free_gib": free, **reading}, ours=ours, cooling=ours)
    assert (first.machine.resources, first.machine.gpus, first.urgent) == (
        again.machine.resources,
        again.machine.gpus,
        again.urgent,
    )
    for note in first.notes:
        change = note.transition
        if (
            change.signal == "gpu_time.ext"
            and not change.reason
            and (change.after or 0) > (change.before or 0)
        ):
            assert any(util is not None and util >= 15 and not ours for util, _, ours, _ in steps)
            assert change.value is not None
            assert change.threshold is not None
            assert change.value >= change.threshold
