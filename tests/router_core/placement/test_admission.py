"""The map from pressure to what may be served, row by row, and when to come back."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from router_core.placement.candidates.admission import Gate, Squeeze, retry_after_s, squeeze_of
from router_core.record.state import (
    EngineFlag,
    Flag,
    GpuLoad,
    GpuState,
    Level,
    ResourceCode,
    ResourceLevel,
    Static,
)
from tests.support.cluster_views import CALM, a_static, a_volatile

R, L = ResourceCode, Level


def level(code: int, at: int | None, score: int | None = 50) -> tuple[ResourceLevel, ...]:
    """Calm resources with one of them at a level."""
    kept = tuple(row for row in CALM if row.code != code)
    return (*kept, ResourceLevel(code=code, level=at, score_c=score))


def squeezed(static: Static | None = None, **over: Any) -> Squeeze:
    static = static or a_static()
    return squeeze_of(static, a_volatile(**over), static.engines[0], 0.33)


@pytest.mark.parametrize(
    ("resources", "gate", "loads", "why"),
    [
        (CALM, Gate.OPEN, True, None),
        (level(R.CPU, L.ELEVATED), Gate.OPEN, True, None),
        (level(R.VRAM, L.HIGH), Gate.OPEN, False, "vram"),
        (level(R.MEMORY, L.HIGH), Gate.OPEN, False, "memory"),
        (level(R.GPU_TIME, L.HIGH), Gate.SOFT, True, "gpu_time"),
        (level(R.ACTIVITY, L.HIGH), Gate.SOFT, True, "activity"),
        (level(R.CPU, L.HIGH), Gate.SOFT, True, "cpu"),
        (level(R.ACTIVITY, L.CRITICAL), Gate.SHUT, True, "activity"),
        (level(R.VRAM, L.CRITICAL), Gate.SHUT, True, "vram"),
        (level(77, L.HIGH), Gate.SOFT, True, "other"),
    ],
)
def test_each_level_closes_what_the_map_says(
    resources: tuple[ResourceLevel, ...], gate: Gate, loads: bool, why: str | None
) -> None:
    found = squeezed(resources=resources)
    assert (found.gate, found.loads, found.detail or found.no_loads) == (gate, loads, why)


@pytest.mark.parametrize("code", [R.VRAM, R.MEMORY])
def test_memory_that_nobody_knows_keeps_no_load_out_and_makes_it_a_last_resort(code: ResourceCode) -> None:
    found = squeezed(resources=level(code, None))
    assert (found.gate, found.loads, found.unsure) == (Gate.OPEN, True, True)
    assert not squeezed(resources=CALM).unsure


def test_the_flag_no_load_refuses_loads_and_serves_residents() -> None:
    found = squeezed(flags=int(Flag.NO_LOAD))
    assert (found.gate, found.loads) == (Gate.OPEN, False)


def test_a_critical_gpu_shuts_only_the_endpoints_that_use_it() -> None:
    static = a_static(gpus=a_static().gpus * 2)
    gpus = (a_volatile().gpus[0], GpuLoad(level=L.CRITICAL, score_c=95, state=GpuState.OK))
    assert squeezed(static, gpus=gpus).gate is Gate.OPEN
    user = replace(static, engines=(replace(static.engines[0], gpus=(1,)),))
    found = squeezed(user, gpus=gpus)
    assert (found.gate, found.score) == (Gate.SHUT, 0.95)


def test_a_gpu_that_is_merely_busy_counts_by_its_score_alone() -> None:
    found = squeezed(gpus=(GpuLoad(level=L.HIGH, score_c=80, state=GpuState.OK),))
    assert (found.gate, found.loads, found.score) == (Gate.OPEN, True, 0.8)


@pytest.mark.parametrize("state", [GpuState.UNSUPPORTED, GpuState.ASLEEP])
def test_vram_that_cannot_be_told_or_sleeps_allows_loads(state: GpuState) -> None:
    found = squeezed(resources=level(R.VRAM, None), gpus=(GpuLoad(state=state),))
    assert found.loads


def test_the_score_is_the_worst_known_one_and_unknown_costs_its_share() -> None:
    assert squeezed(resources=level(R.ACTIVITY, L.ELEVATED, 61)).score == 0.61
    assert squeezed(resources=level(R.CPU, L.NONE, None)).score == 0.33
    assert squeezed(resources=level(R.SWAP, L.NONE, None)).score == 0.05
    assert squeezed(resources=()).score == 0.33


def test_a_host_without_gpu_has_no_unknown_gpu() -> None:
    static = a_static(gpus=())
    ram_only = tuple(row for row in CALM if row.code in (R.CPU, R.MEMORY))
    found = squeezed(static, gpus=(), resources=ram_only)
    assert (found.loads, found.score) == (True, 0.05)


def test_a_remote_host_feels_no_pressure_of_ours() -> None:
    static = a_static()
    away = replace(static, engines=(replace(static.engines[0], flags=int(EngineFlag.REMOTE_HOST)),))
    found = squeezed(away, resources=level(R.CPU, L.CRITICAL), flags=int(Flag.NO_LOAD))
    assert (found.gate, found.loads, found.score) == (Gate.OPEN, True, 0.0)


def test_gpu_lists_of_unlike_length_are_not_read_by_position() -> None:
    assert squeezed(gpus=(GpuLoad(level=L.CRITICAL), GpuLoad())).gate is Gate.OPEN


def test_come_back_after_the_shortest_wait_within_bounds() -> None:
    assert retry_after_s([], Random(1)) == 30
    found = {retry_after_s([10.0, 300.0], Random(seed)) for seed in range(50)}
    assert min(found) >= 8
    assert max(found) <= 12
    assert len(found) > 2
    assert retry_after_s([-5.0], Random(1)) in (1, 2)
    assert retry_after_s([500.0], Random(1)) == 60
