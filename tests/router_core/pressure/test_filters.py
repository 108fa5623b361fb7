"""Filters: unit vectors and what a gap does to them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.policy.pressure import Filtering, FilterKind
from router_core.pressure.filters import CounterRate, Ewma, Filter, NofM, Rise, WindowMin, make_filter


def fed(filter_: Filter, *pairs: tuple[float, int]) -> list[float | None]:
    return [filter_.feed(value, second * 1_000) for value, second in pairs]


def test_ewma_follows_its_vector() -> None:
    assert fed(Ewma(), (0, 0), (100, 1), (100, 2)) == pytest.approx([0, 35, 57.75])


def test_ewma_weighs_by_elapsed_time_up_to_five_seconds() -> None:
    assert fed(Ewma(), (0, 0), (100, 2)) == pytest.approx([0, 57.75])
    five = 100 * (1 - 0.65**5)
    assert fed(Ewma(), (0, 0), (100, 5)) == pytest.approx([0, five])
    assert fed(Ewma(), (0, 0), (100, 9)) == pytest.approx([0, five])


def test_ewma_restarts_after_a_gap() -> None:
    assert fed(Ewma(), (0, 0), (100, 10)) == pytest.approx([0, 100 * (1 - 0.65**5)])
    assert fed(Ewma(), (0, 0), (100, 11)) == [0, 100]


def test_window_min_forgets_what_left_the_window() -> None:
    assert fed(WindowMin(5_000), (3, 0), (7, 1), (5, 2), (9, 4), (9, 5), (9, 6), (9, 7)) == [
        3,
        3,
        3,
        3,
        5,
        5,
        9,
    ]


def test_counter_rate_is_growth_per_second_over_its_window() -> None:
    rates = fed(CounterRate(10_000), *((second * 40, second) for second in range(5)))
    assert rates == [None, 40, 40, 40, 40]
    burst = CounterRate(10_000)
    fed(burst, *((0, second) for second in range(11)))
    assert fed(burst, (100, 11), (100, 12)) == [10, 10]
    assert fed(burst, *((100, second) for second in range(13, 22)))[-1] == 0


def test_counter_rate_drops_a_reset_and_a_gap() -> None:
    assert fed(CounterRate(1_000), (50, 0), (60, 1), (5, 2), (9, 3)) == [None, 10, None, 4]
    assert fed(CounterRate(1_000), (50, 0), (90, 11), (92, 12)) == [None, None, 2]


def test_a_short_window_still_spans_two_late_values() -> None:
    rate = CounterRate(1_000)
    assert rate.feed(0, 0) is None
    assert rate.feed(10, 990) == pytest.approx(10.101, abs=1e-3)
    assert rate.feed(30, 3_000) == pytest.approx(20 / 2.01)


def test_rise_tells_growth_once() -> None:
    assert fed(Rise(), (7, 0), (7, 1), (9, 2), (9, 3), (1, 4)) == [None, 0, 2, 0, 0]


def test_n_of_m_counts_the_last_ten() -> None:
    some = NofM()
    assert fed(some, *((1, second) for second in range(4)))[-1] == 4
    assert fed(some, *((0, second) for second in range(4, 11)))[-1] == 3
    assert fed(some, (0, 30)) == [0]


@pytest.mark.parametrize("kind", list(FilterKind))
@settings(max_examples=40)
@given(values=st.lists(st.tuples(st.floats(0, 1e12), st.integers(1, 20_000)), max_size=30))
def test_a_cleared_filter_is_as_good_as_new(kind: FilterKind, values: list[tuple[float, int]]) -> None:
    used, fresh = (
        make_filter(Filtering(kind=kind, window_ms=5_000)),
        make_filter(Filtering(kind=kind, window_ms=5_000)),
    )
    for value, at in values:
        used.feed(value, at)
    used.clear()
    now = 0
    for value, step in values:
        now += step
        assert used.feed(value, now) == fresh.feed(value, now)


@settings(max_examples=60)
@given(values=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 20_000)), min_size=1, max_size=40))
def test_a_mean_and_a_minimum_stay_within_what_was_seen(values: list[tuple[float, int]]) -> None:
    mean, least, now = Ewma(), WindowMin(5_000), 0
    seen: list[float] = []
    for value, step in values:
        now += step
        seen.append(value)
        assert min(seen) - 1e-9 <= mean.feed(value, now) <= max(seen) + 1e-9
        assert min(seen) <= least.feed(value, now) <= value
