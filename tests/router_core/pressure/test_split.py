"""Own and foreign CPU work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.pressure.samples import CpuTimes, EngineCgroup, HostSample, ReadingStatus, measured
from router_core.pressure.split import Cooldown, CpuSplit, OwnTrace
from tests.support.host_samples import host


def busy(
    at_s: float, cores: float, own: float = 0.0, engine: float | None = None, **changes: object
) -> HostSample:
    """Since boot ``cores`` of 8 were busy, ``own`` by this process and ``engine`` by an engine's cgroup."""
    at_ms = round(at_s * 1_000)
    engines = () if engine is None else (EngineCgroup(unit="a", cpu_us=round(engine * at_ms * 1_000)),)
    return host(
        at_ms,
        cpu_times=measured(CpuTimes(busy=(cores * at_s,), idle=(8 - cores) * at_s), at_ms),
        own_cpu_us=measured(round(own * at_ms * 1_000), at_ms),
        engines=engines,
        **changes,
    )


def test_nothing_is_known_from_one_sample() -> None:
    split = CpuSplit()
    split.fold(busy(1, 4), engines_up=0)
    assert (split.busy_pct.value, split.external_pct.value) == (None, None)


def test_external_is_what_neither_engines_nor_we_used() -> None:
    split = CpuSplit()
    for second in (1, 2):
        split.fold(busy(second, 6, own=0.5, engine=3.5), engines_up=1)
    assert split.busy_pct.value == pytest.approx(75)
    assert split.external_pct.value == pytest.approx(25)


def test_percent_is_of_the_cores_this_host_may_use_and_never_more_than_a_hundred() -> None:
    for capacity, percent in ((8.0, 25), (4.0, 50), (1.0, 100)):
        split = CpuSplit()
        for second in (1, 2):
            split.fold(busy(second, 2, cpu_capacity=capacity), engines_up=0)
        assert split.external_pct.value == pytest.approx(percent)


def test_steal_and_parts_that_ran_backwards_are_no_busy_time() -> None:
    split = CpuSplit()
    split.fold(
        host(1_000, cpu_times=measured(CpuTimes(busy=(5.0, 9.0), idle=10.0, steal=0.0), 1_000)), engines_up=0
    )
    split.fold(
        host(2_000, cpu_times=measured(CpuTimes(busy=(7.0, 8.0), idle=14.0, steal=2.0), 2_000)), engines_up=0
    )
    assert (split.busy_pct.value, split.steal_pct.value) == (25.0, 25.0)


def test_an_uncounted_engine_makes_everything_external_only_while_nothing_of_ours_runs() -> None:
    trace = OwnTrace()
    split = CpuSplit(trace)
    for second in (1, 2, 3):
        split.fold(busy(second, 4), engines_up=1)
    assert split.external_pct.value == pytest.approx(50)
    for second in range(4, 64):
        trace.note(second * 1_000)
        split.fold(busy(second, 8), engines_up=1)
    assert split.external_pct.value == pytest.approx(50)
    assert split.external_pct.taken_ms == 63_000
    trace.note(64_000)
    split.fold(busy(64, 8), engines_up=1)
    assert (split.external_pct.status, split.external_pct.value) == (ReadingStatus.UNKNOWN, None)
    split.fold(busy(65, 8), engines_up=1)
    split.fold(busy(66, 8), engines_up=1)
    assert split.external_pct.value is None
    split.fold(busy(67, 8), engines_up=1)
    assert split.external_pct.value is not None


def test_a_gap_or_a_resume_drops_one_difference() -> None:
    split = CpuSplit()
    for second in (1, 2):
        split.fold(busy(second, 4), engines_up=0)
    split.fold(busy(30, 8), engines_up=0)
    assert split.busy_pct.taken_ms == 2_000
    split.clear()
    split.fold(busy(31, 8), engines_up=0)
    assert split.busy_pct.taken_ms == 2_000
    split.fold(busy(32, 8), engines_up=0)
    assert split.busy_pct.taken_ms == 32_000


def test_a_sample_seen_before_changes_nothing() -> None:
    split = CpuSplit()
    for second in (1, 2, 2, 1):
        split.fold(busy(second, 4), engines_up=0)
    assert split.busy_pct.taken_ms == 2_000
    split.fold(busy(3, 4), engines_up=0)
    assert split.busy_pct.value == pytest.approx(50)


@settings(max_examples=80)
@given(cores=st.floats(0, 8), own=st.floats(0, 3), engine=st.floats(0, 12))
def test_external_is_between_nothing_and_all_that_is_busy(cores: float, own: float, engine: float) -> None:
    split = CpuSplit()
    for second in (1, 2):
        split.fold(busy(second, cores, own=own, engine=engine), engines_up=1)
    assert split.external_pct.value is not None
    assert 0 <= split.external_pct.value <= cores / 8 * 100 + 1e-6


def test_a_load_cools_down_for_fifteen_seconds_after_its_end_or_after_a_model_came_or_went() -> None:
    cooldown, none, tiny = Cooldown(), frozenset[tuple[str, str]](), frozenset({("llama", "tiny")})
    assert not cooldown.fold(False, none, 0)
    assert cooldown.fold(True, none, 1_000)
    assert cooldown.fold(False, none, 15_999)
    assert not cooldown.fold(False, none, 16_000)
    assert cooldown.fold(False, tiny, 20_000)
    assert not cooldown.fold(False, tiny, 35_000)
    assert cooldown.fold(False, none, 36_000)
    assert not cooldown.fold(False, none, 51_000)


def test_what_is_in_memory_at_first_is_no_load() -> None:
    assert not Cooldown().fold(False, frozenset({("llama", "tiny")}), 0)


def test_the_smoothed_external_share_follows_slowly() -> None:
    split, busy_s = CpuSplit(), 0.0
    means = []
    for second in range(1, 6):
        busy_s += 8.0 if second == 3 else 0.0
        split.fold(
            host(
                second * 1_000,
                cpu_times=measured(CpuTimes(busy=(busy_s,), idle=8 * second - busy_s), second * 1_000),
            ),
            engines_up=0,
        )
        means.append(split.external_mean_pct.value)
    assert means == [None, 0.0, pytest.approx(35), pytest.approx(22.75), pytest.approx(14.7875)]
