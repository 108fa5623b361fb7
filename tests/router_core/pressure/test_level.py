"""One signal's level: holds, hysteresis, and what happens while the signal is missing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.policy.pressure import (
    DESKTOP,
    GIB,
    SERVER,
    Bound,
    Danger,
    Filtering,
    FilterKind,
    LevelRule,
    SignalRow,
)
from router_core.pressure.level import Input, SignalLevel, Transition, scored
from router_core.pressure.samples import Reading, ReadingStatus, measured, missing, unsupported
from router_core.record.state import Level

NONE, ELEVATED, HIGH, CRITICAL = Level


def rule(level: Level, enter: float, hold_in_s: int, leave: float, hold_out_s: int) -> LevelRule:
    return LevelRule(
        level=level, enter=Bound(floor=enter), hold_in_ms=hold_in_s * 1_000, exit=Bound(floor=leave), hold_out_ms=hold_out_s * 1_000
    )  # fmt: skip


ROW = SignalRow(
    signal="x",
    resource="cpu",
    unit="%",
    filtering=Filtering(kind=FilterKind.WINDOW_MIN),
    danger=Danger.ABOVE,
    rules=(rule(ELEVATED, 25, 3, 12, 10), rule(HIGH, 50, 3, 25, 20), rule(CRITICAL, 90, 0, 80, 5)),
    score=(Bound(floor=10), Bound(floor=60)),
)
"""Its filter has no window, so thresholds see the raw value."""


class Probe:
    """Steps one signal second by second."""

    def __init__(self, row: SignalRow = ROW) -> None:
        self.signal = SignalLevel(row)
        self.second = 0
        self.changes: list[Transition] = []

    def give(self, *values: float | ReadingStatus | None, **entry: object) -> list[Level | None]:
        return [self._one(value, entry) for value in values]

    def _one(self, value: float | ReadingStatus | None, entry: dict[str, object]) -> Level | None:
        self.second += 1
        now = self.second * 1_000
        reading: Reading[float]
        if isinstance(value, ReadingStatus):
            reading = Reading(value=self.signal.value, taken_ms=now - 1, status=value)
        else:
            reading = missing(now) if value is None else measured(float(value), now)
        change = self.signal.step(Input(reading=reading, **entry), now)  # type: ignore[arg-type]
        if change is not None:
            self.changes.append(change)
        return self.signal.level


def at(level: Level) -> Probe:
    """A probe at ``level``, which its first value sets at once."""
    probe = Probe()
    probe.give({NONE: 0, ELEVATED: 30, HIGH: 60, CRITICAL: 95}[level])
    return probe


def test_the_first_known_value_sets_the_level_at_once() -> None:
    assert [at(level).signal.level for level in Level] == list(Level)
    assert at(HIGH).changes[0].reason == "first"


def test_a_level_is_entered_when_its_condition_lasted_its_hold() -> None:
    probe = at(NONE)
    assert probe.give(25, 25, 25) == [NONE, NONE, NONE]
    assert probe.give(25) == [ELEVATED]
    change = probe.changes[-1]
    assert (change.before, change.after, change.threshold, change.held_ms) == (NONE, ELEVATED, 25, 3_000)


def test_an_interruption_restarts_the_hold() -> None:
    probe = at(NONE)
    assert set(probe.give(30, 30, 30, 24, 30, 30, 30)) == {NONE}
    assert probe.give(30) == [ELEVATED]


def test_levels_may_be_jumped() -> None:
    probe = at(NONE)
    assert probe.give(70, 70, 70, 70) == [NONE, NONE, NONE, HIGH]
    assert probe.give(95) == [CRITICAL]


def test_a_level_is_left_to_the_highest_lower_one_that_still_holds() -> None:
    probe = at(CRITICAL)
    assert probe.give(*[30] * 5) == [CRITICAL] * 5
    assert probe.give(30) == [HIGH]
    probe = at(HIGH)
    assert probe.give(*[20] * 20) == [HIGH] * 20
    assert probe.give(20) == [ELEVATED]
    probe = at(HIGH)
    assert probe.give(*[0] * 21)[-1] == NONE


def test_between_exit_and_enter_a_level_neither_rises_nor_falls() -> None:
    probe = at(ELEVATED)
    assert set(probe.give(*[13, 49] * 60)) == {ELEVATED}


def test_a_wave_shorter_than_the_holds_never_moves_a_level() -> None:
    probe = at(NONE)
    assert set(probe.give(*[80, 80, 80, 0] * 30)) == {NONE}
    probe = at(ELEVATED)
    assert set(probe.give(*([0] * 9 + [30]) * 12)) == {ELEVATED}


@settings(max_examples=40)
@given(
    waves=st.lists(
        st.tuples(st.integers(1, 3), st.floats(25, 89), st.integers(1, 9), st.floats(0, 12)), max_size=25
    )
)
def test_no_wave_shorter_than_the_holds_ever_moves_a_level(
    waves: list[tuple[int, float, int, float]],
) -> None:
    rising, falling = at(NONE), at(ELEVATED)
    for high_s, high, low_s, low in waves:
        assert set(rising.give(*[high] * high_s, *[low] * low_s)) == {NONE}
        assert set(falling.give(*[low] * low_s, *[min(high, 49)] * high_s)) == {ELEVATED}


def test_hovering_around_a_threshold_makes_one_transition_at_most() -> None:
    probe = Probe()
    probe.give(0)
    probe.give(*[25 + 7 * (-1) ** second for second in range(300)])
    assert len(probe.changes) - 1 <= 1
    probe = at(NONE)
    probe.give(*[18 + second % 15 for second in range(300)])
    assert len(probe.changes) - 1 <= 1


def test_an_unknown_signal_is_held_for_thirty_seconds_and_then_nil() -> None:
    probe = at(HIGH)
    assert probe.give(*[None] * 30) == [HIGH] * 30
    assert probe.signal.deadline == 32_000
    assert probe.give(None) == [None]
    assert probe.signal.score is None
    assert probe.changes[-1].reason == "unknown"
    assert probe.give(30) == [ELEVATED]


def test_no_time_counts_while_a_signal_is_missing_stale_or_frozen() -> None:
    for gap in ((None,) * 20, (ReadingStatus.STALE,) * 20):
        probe = at(NONE)
        assert set(probe.give(30, 30, *gap, 30)) == {NONE}
        assert probe.give(30, 30) == [NONE, ELEVATED]
    probe = at(ELEVATED)
    probe.give(0, 0)
    assert set(probe.give(*[0] * 40, frozen=True)) == {ELEVATED}
    assert probe.give(*[0] * 9)[-2:] == [ELEVATED, ELEVATED]
    assert probe.give(0) == [NONE]


def test_an_unsupported_signal_is_absent_at_once() -> None:
    probe = at(HIGH)
    assert probe.give(ReadingStatus.UNSUPPORTED) == [None]
    assert probe.changes[-1].reason == "unsupported"


def test_a_stale_value_still_scores() -> None:
    probe = at(HIGH)
    probe.give(ReadingStatus.STALE)
    assert (probe.signal.level, probe.signal.score) == (HIGH, 1.0)


def test_the_deadline_tells_when_the_level_would_change() -> None:
    probe = at(NONE)
    before = probe.signal.deadline
    probe.give(30)
    assert (before, probe.signal.deadline) == (None, 5_000)
    probe.give(60)
    kept = probe.signal.deadline
    probe.give(0)
    assert (kept, probe.signal.deadline) == (5_000, None)
    probe = at(HIGH)
    probe.give(3)
    assert probe.signal.deadline == 22_000


def test_new_numbers_keep_the_level_and_restart_the_holds() -> None:
    probe = at(ELEVATED)
    probe.give(*[0] * 9)
    probe.signal.adopt(replace(ROW, rules=(rule(ELEVATED, 26, 3, 11, 10), *ROW.rules[1:])))
    assert probe.give(*[0] * 10) == [ELEVATED] * 10
    assert probe.give(0) == [NONE]


def test_a_level_that_the_new_row_lacks_is_left_at_the_next_step() -> None:
    probe = at(CRITICAL)
    probe.signal.adopt(replace(ROW, rules=ROW.rules[:2]))
    assert probe.give(95) == [HIGH]


def test_thresholds_that_are_shares_need_the_whole() -> None:
    row = DESKTOP.rows[0]
    probe = Probe(row)
    assert probe.give(1 * GIB) == [None]
    assert probe.give(3 * GIB, whole=64 * GIB) == [CRITICAL]
    assert probe.give(5 * GIB, whole=64 * GIB) == [CRITICAL]


@pytest.mark.parametrize(
    ("available_gib", "whole_gib", "desktop", "server"),
    [
        (1.9, 8, HIGH, NONE), (2.0, 8, NONE, NONE), (0.39, 8, CRITICAL, HIGH), (0.19, 8, CRITICAL, CRITICAL),
        (6.3, 64, HIGH, NONE), (3.1, 64, CRITICAL, HIGH), (1.5, 64, CRITICAL, CRITICAL), (6.5, 64, NONE, NONE),
    ],
)  # fmt: skip
def test_available_memory_follows_the_table(
    available_gib: float, whole_gib: int, desktop: Level, server: Level
) -> None:
    for policy, level in ((DESKTOP, desktop), (SERVER, server)):
        assert Probe(policy.rows[0]).give(available_gib * GIB, whole=whole_gib * GIB) == [level]


def test_memory_is_left_only_above_enter_plus_two_percent() -> None:
    probe = Probe(DESKTOP.rows[0])
    probe.give(6 * GIB, whole=64 * GIB)
    assert set(probe.give(*[7.6 * GIB] * 100, whole=64 * GIB)) == {HIGH}
    assert probe.give(*[7.7 * GIB] * 36, whole=64 * GIB)[-1] == NONE


def test_a_kill_for_memory_is_critical_for_sixty_seconds() -> None:
    probe = Probe(next(row for row in SERVER.rows if row.signal == "memory.oom"))
    assert probe.give(3) == [None]
    assert probe.give(3, 4) == [NONE, CRITICAL]
    assert probe.signal.score == 1.0
    assert set(probe.give(*[4] * 30, 5, *[5] * 60)) == {CRITICAL}
    assert probe.give(5) == [NONE]


def test_a_kill_during_an_outage_is_not_told_when_the_counter_comes_back() -> None:
    probe = Probe(next(row for row in SERVER.rows if row.signal == "memory.oom"))
    probe.give(3, 3, *[None] * 31)
    assert probe.give(4, 4) == [None, NONE]


def test_a_score_is_clipped_between_its_ends() -> None:
    assert [scored(x, 10, 60) for x in (0, 10, 35, 60, 99)] == [0, 0, 0.5, 1, 1]
    assert [scored(x, 40, 20) for x in (50, 40, 30, 20, 0)] == [0, 0, 0.5, 1, 1]


@settings(max_examples=60)
@given(
    st.floats(0, 1e13),
    st.floats(0, 1e13),
    st.sampled_from([r for p in (DESKTOP, SERVER) for r in p.rows if r.score]),
)
def test_a_worse_value_never_scores_less(a: float, b: float, row: SignalRow) -> None:
    assert row.score is not None
    lo, hi = (bound.at(64 * GIB) for bound in row.score)
    assert lo is not None
    assert hi is not None
    mild, worse = (max(a, b), min(a, b)) if row.danger is Danger.BELOW else (min(a, b), max(a, b))
    assert scored(mild, lo, hi) <= scored(worse, lo, hi)


STEPS = st.lists(
    st.tuples(st.one_of(st.floats(0, 100), st.none()), st.integers(100, 15_000), st.booleans()), max_size=60
)


@settings(max_examples=100)
@given(steps=STEPS)
def test_no_rise_without_enter_no_fall_without_exit_and_the_same_in_is_the_same_out(
    steps: list[tuple[float | None, int, bool]],
) -> None:
    one, two, now = SignalLevel(ROW), SignalLevel(ROW), 0
    bounds = {r.level: (r.enter.floor, r.exit.floor) for r in ROW.rules}
    for value, gap, frozen in steps:
        now += gap
        entry = Input(reading=missing(now) if value is None else measured(value, now), frozen=frozen)
        before = one.level
        change = one.step(entry, now)
        assert change == two.step(entry, now)
        assert (change is None) == (one.level is before)
        if change is None or before is None or one.level is None:
            continue
        assert value is not None
        assert not frozen
        if one.level > before:
            assert value >= bounds[one.level][0]
        else:
            assert value <= bounds[before][1]
            assert one.level is NONE or value > bounds[one.level][1]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(500, 2_000)), min_size=1, max_size=80))
def test_a_level_never_changes_before_its_deadline(steps: list[tuple[float, int]]) -> None:
    signal, now = SignalLevel(ROW), 0
    for value, gap in steps:
        now += gap
        due = signal.deadline
        change = signal.step(Input(reading=measured(value, now)), now)
        falls = (
            change is not None
            and change.before is not None
            and change.after is not None
            and change.after < change.before
        )
        if falls:
            assert due is not None
            assert due <= now


def test_readings_without_a_value_are_never_read_as_zero() -> None:
    signal = SignalLevel(DESKTOP.rows[0])
    assert signal.step(Input(reading=unsupported(1), whole=GIB), 1) is None
    assert (signal.level, signal.score, signal.value) == (None, None, None)
