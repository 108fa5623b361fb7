"""The machine: signals folded into resources, and what it asks the shell to do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.errors import LocalMisuse
from router_core.policy.pressure import (
    DESKTOP,
    GIB,
    PROFILES,
    SERVER,
    Bound,
    PressurePolicy,
    RuleOverride,
    row_faults,
    with_overrides,
)
from router_core.pressure.level import Input
from router_core.pressure.machine import (
    HostResumed,
    NotifyLevel,
    PolicyChanged,
    PressureMachine,
    PublishUrgent,
    SignalsSampled,
)
from router_core.pressure.samples import HostSample, ReadingStatus, ResourceState, measured, missing
from router_core.pressure.signals import host_inputs
from router_core.record.state import Level, ResourceCode
from tests.support.host_samples import host

NONE, ELEVATED, HIGH, CRITICAL = Level
MEMORY, SWAP = ResourceCode.MEMORY, ResourceCode.SWAP


class Bench:
    """Feeds a machine one host sample a second."""

    def __init__(self, policy: PressurePolicy = SERVER) -> None:
        self.machine = PressureMachine(policy)
        self.now = 0
        self.notes: list[NotifyLevel] = []
        self.urgent = 0

    def run(self, seconds: int, **changes: Callable[[int], object]) -> None:
        """``seconds`` ticks; each change is a function of the time in milliseconds."""
        for _ in range(seconds):
            self.now += 1_000
            sample = host(self.now, **{name: make(self.now) for name, make in changes.items()})
            self.feed(sample)

    def feed(self, sample: HostSample) -> None:
        event = SignalsSampled(inputs=host_inputs(sample, self.now, 1_000))
        for action in self.machine.handle(event, self.now):
            match action:
                case NotifyLevel():
                    self.notes.append(action)
                case PublishUrgent():
                    self.urgent += 1

    def state(self, code: ResourceCode) -> ResourceState:
        return next(state for state in self.machine.resources if state.code is code)


def test_an_idle_host_is_known_and_unpressed_after_two_ticks() -> None:
    bench = Bench()
    assert {state.level for state in bench.machine.resources} == {None}
    bench.run(2)
    assert [(s.code, s.level, s.score) for s in bench.machine.resources] == [
        (ResourceCode.CPU, NONE, 0),
        (MEMORY, NONE, 0),
        (SWAP, NONE, 0),
        (ResourceCode.IO, NONE, 0),
    ]


def test_a_resource_takes_the_highest_level_of_its_signals_and_the_age_of_the_one_that_decides() -> None:
    bench = Bench()
    bench.run(12)
    bench.run(5, memory_some_us=lambda now: measured((now - 12_000) * 250, now))
    state = bench.state(MEMORY)
    assert (state.level, state.taken_ms) == (ELEVATED, bench.now)
    bench.run(
        1, mem_avail_bytes=lambda now: measured(GIB, now), memory_some_us=lambda now: measured(5_000_000, now)
    )
    assert bench.state(MEMORY).level is CRITICAL
    assert bench.state(MEMORY).score == 1.0
    assert bench.state(SWAP).level is NONE


def test_the_score_is_the_highest_of_all_signals_whichever_sets_the_level() -> None:
    machine = PressureMachine(SERVER)
    inputs = {
        "memory.avail": Input(reading=measured(4 * GIB, 1_000), whole=64 * GIB),
        "memory.some": Input(reading=measured(0, 1_000)),
    }
    machine.handle(SignalsSampled(inputs=inputs), 1_000)
    inputs["memory.some"] = Input(reading=measured(110_000, 2_000))
    machine.handle(SignalsSampled(inputs=inputs), 2_000)
    state = next(state for state in machine.resources if state.code is MEMORY)
    assert state.level is ELEVATED
    assert state.score == pytest.approx((6.4 - 4) / (6.4 - 1.6))
    assert state.taken_ms == 2_000


def test_available_memory_is_unknown_after_ten_seconds_even_if_it_is_read_rarely() -> None:
    sample = host(1_000)
    assert host_inputs(sample, 11_001, 5_000)["memory.avail"].reading.status is ReadingStatus.UNKNOWN
    assert host_inputs(sample, 11_001, 5_000)["memory.some"].reading.status is ReadingStatus.STALE


def test_a_change_of_level_is_told_with_value_and_threshold_and_published_at_once() -> None:
    bench = Bench()
    bench.run(12)
    bench.notes.clear()
    urgent = bench.urgent
    bench.run(1, mem_avail_bytes=lambda now: measured(2 * GIB, now))
    (note,) = bench.notes
    change = note.transition
    assert (note.profile, change.signal, change.resource, change.unit) == (
        "server",
        "memory.avail",
        "memory",
        "B",
    )
    assert (change.before, change.after, change.value, change.threshold) == (
        NONE,
        HIGH,
        2 * GIB,
        64 * GIB * 0.05,
    )
    assert bench.urgent == urgent + 1
    bench.run(3, mem_avail_bytes=lambda now: measured(2 * GIB, now))
    assert bench.urgent == urgent + 1


def test_swapping_is_measured_in_mebibytes_per_second_and_weighs_less_on_zram() -> None:
    def rising(now: int) -> object:
        return measured((now - 3_000) * 50 * 1024**2 // 1_000, now)

    plain, compressed = Bench(), Bench()
    for bench in (plain, compressed):
        bench.run(3)
    plain.run(8, swapped_bytes=rising)
    compressed.run(8, swapped_bytes=rising, swap_on_zram=lambda _: True)
    assert (plain.state(SWAP).level, compressed.state(SWAP).level) == (HIGH, ELEVATED)


def test_all_unknown_is_held_for_thirty_seconds_then_nil_then_known_at_once() -> None:
    bench = Bench()
    bench.run(12, mem_avail_bytes=lambda now: measured(2 * GIB, now))
    gone = dict.fromkeys(
        (
            "mem_avail_bytes",
            "memory_some_us",
            "memory_full_us",
            "swapped_bytes",
            "oom_kills",
            "cpu_some_us",
            "io_some_us",
        ),
        missing,
    )
    bench.run(30, **gone)
    assert bench.state(MEMORY).level is HIGH
    bench.run(1, **gone)
    assert {(state.level, state.score) for state in bench.machine.resources} == {(None, None)}
    assert bench.state(MEMORY).taken_ms == 12_000
    bench.run(1, mem_avail_bytes=lambda now: measured(GIB, now))
    assert bench.state(MEMORY).level is CRITICAL


def test_a_stuck_source_ages_into_unknown() -> None:
    bench = Bench()
    bench.run(12)
    last = host(bench.now)
    for _ in range(45):
        bench.now += 1_000
        bench.feed(last)
    assert bench.state(MEMORY).level is None


def test_a_signal_switched_off_has_no_say() -> None:
    bench = Bench(with_overrides(SERVER, (), ("memory.some", "memory.full")))
    bench.run(
        30,
        memory_some_us=lambda now: measured(now * 1_000, now),
        memory_full_us=lambda now: measured(now * 1_000, now),
    )
    assert bench.state(MEMORY).level is NONE


def test_a_shut_gate_counts_as_none_and_zero() -> None:
    machine = PressureMachine(
        PressurePolicy(profile="p", rows=tuple(row for row in SERVER.rows if row.resource == "memory"))
    )
    entry = Input(reading=measured(1, 1_000), whole=64 * GIB)
    machine.handle(SignalsSampled(inputs={"memory.avail": entry}), 1_000)
    assert (machine.resources[0].level, machine.resources[0].score) == (CRITICAL, 1.0)
    shut = Input(reading=measured(1, 2_000), whole=64 * GIB, counts=False)
    machine.handle(SignalsSampled(inputs={"memory.avail": shut}), 2_000)
    assert (machine.resources[0].level, machine.resources[0].score) == (NONE, 0.0)


def test_another_policy_keeps_levels_until_their_own_exit() -> None:
    bench = Bench(DESKTOP)
    bench.run(12, mem_avail_bytes=lambda now: measured(5 * GIB, now))
    assert bench.state(MEMORY).level is HIGH
    assert bench.machine.handle(PolicyChanged(policy=SERVER), bench.now) == []
    assert bench.machine.profile == "server"
    bench.run(30, mem_avail_bytes=lambda now: measured(5 * GIB, now))
    assert bench.state(MEMORY).level is HIGH
    bench.run(6, mem_avail_bytes=lambda now: measured(5 * GIB, now))
    assert bench.state(MEMORY).level is NONE


def test_a_resume_drops_the_counters_but_no_level() -> None:
    bench = Bench()
    bench.run(12, mem_avail_bytes=lambda now: measured(2 * GIB, now))
    bench.machine.handle(HostResumed(), bench.now)
    bench.run(
        1,
        memory_full_us=lambda now: measured(9_000_000, now),
        mem_avail_bytes=lambda now: measured(2 * GIB, now),
    )
    assert bench.state(MEMORY).level is HIGH


def test_the_deadline_is_the_earliest_of_all_signals() -> None:
    bench = Bench()
    assert bench.machine.deadline is None
    bench.run(3)
    bench.run(3, swapped_bytes=lambda now: measured((now - 3_000) * 50 * 1024**2 // 1_000, now))
    assert bench.machine.deadline == 9_000


@pytest.mark.parametrize("policy", PROFILES.values(), ids=PROFILES)
def test_every_shipped_row_is_sound(policy: PressurePolicy) -> None:
    assert [fault for row in policy.rows for fault in row_faults(row)] == []
    assert all(rule.level in (1, 2, 3) for row in policy.rows for rule in row.rules)
    assert all(row.resource.upper() in ResourceCode.__members__ for row in policy.rows)


def test_a_broken_table_is_refused_with_every_fault() -> None:
    rows = (
        SERVER.rows[1],
        replace(SERVER.rows[1], score=(Bound(floor=3), Bound(floor=3))),
        replace(SERVER.rows[0], rules=SERVER.rows[0].rules[::-1]),
    )
    with pytest.raises(LocalMisuse) as refused:
        PressurePolicy(profile="x", rows=rows)
    for part in (
        "memory.some: listed twice",
        "memory.some: the value scored 0",
        "memory.avail: enter of critical",
    ):
        assert part in str(refused.value)


def test_overrides_replace_single_numbers_only() -> None:
    table = with_overrides(DESKTOP, [RuleOverride(signal="memory.some", level=1, hold_in_ms=4_000)], ())
    before, after = DESKTOP.row("memory.some"), table.row("memory.some")
    assert before is not None
    assert after is not None
    assert after.rules[0] == replace(before.rules[0], hold_in_ms=4_000)
    assert after.rules[1:] == before.rules[1:]
    with pytest.raises(LocalMisuse, match="strictly milder"):
        with_overrides(DESKTOP, [RuleOverride(signal="memory.some", level=1, exit=Bound(floor=9))], ())


SECONDS = st.lists(
    st.tuples(st.integers(0, 64), st.integers(0, 1_000_000), st.integers(0, 200), st.booleans()), max_size=50
)


@settings(max_examples=60)
@given(seconds=SECONDS)
def test_the_same_samples_always_come_to_the_same_levels_and_every_change_is_published(
    seconds: list[tuple[int, int, int, bool]],
) -> None:
    one, two = Bench(DESKTOP), Bench(DESKTOP)
    stalled = swapped = 0
    for free_gib, stall_us, swap_mib, known in seconds:
        stalled += stall_us
        swapped += swap_mib * 1024**2
        before, urgent = one.machine.resources, one.urgent
        now = one.now + 1_000
        sample = host(
            now,
            mem_avail_bytes=measured(free_gib * GIB, now) if known else missing(now),
            memory_some_us=measured(stalled, now),
            swapped_bytes=measured(swapped, now),
        )
        for bench in (one, two):
            bench.now = now
            bench.feed(sample)
        assert one.machine.resources == two.machine.resources
        changed = [s.level for s in before] != [s.level for s in one.machine.resources]
        assert one.urgent - urgent == int(changed)
        for state in one.machine.resources:
            assert (state.level is None) == (state.score is None)
            assert state.score is None or 0 <= state.score <= 1
    assert one.notes == two.notes
