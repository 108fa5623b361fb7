"""Learning one quantity in logarithms: means, spreads, outliers, shrinkage."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.policy.profile import ProfilePolicy
from router_core.profile.series import EMPTY, Series, fold_sample, shrunk

POLICY = ProfilePolicy()


def after(*samples: float) -> Series:
    series = EMPTY
    for sample in samples:
        series = fold_sample(series, sample, POLICY)
    return series


def test_nothing_learned_is_none() -> None:
    assert EMPTY.value is None


def test_the_first_samples_are_averaged_plainly_in_logarithms() -> None:
    assert after(50, 100, 200).value == pytest.approx(100.0)
    assert after(50, 100, 200).n == 3


def test_later_samples_weigh_a_tenth() -> None:
    series = after(*[100.0] * 20)
    assert fold_sample(series, 120.0, POLICY).mean == pytest.approx(math.log(100) + 0.1 * math.log(1.2))


def test_spread_is_fixed_until_ten_samples_then_measured_within_bounds() -> None:
    assert EMPTY.spread(POLICY) == 0.7
    assert after(*[100.0] * 9).spread(POLICY) == 0.5
    assert after(*[100.0] * 10).spread(POLICY) == 0.1
    rng = Random(4)
    noisy = after(*[100.0 * math.exp(rng.gauss(0, 0.3)) for _ in range(400)])
    assert noisy.spread(POLICY) == pytest.approx(0.3, abs=0.12)


def test_an_outlier_is_rejected_and_three_in_a_row_are_believed() -> None:
    series = after(*[100.0] * 20)
    once = fold_sample(series, 10.0, POLICY)
    assert (once.n, once.mean) == (20, series.mean)
    back = fold_sample(once, 100.0, POLICY)
    assert (back.n, back.streak) == (21, 0)
    third = after(*[100.0] * 20, 10.0, 10.0, 10.0)
    assert third.n == 21
    assert third.value is not None
    assert third.value < 100.0


def test_outliers_on_both_sides_do_not_add_up() -> None:
    series = after(*[100.0] * 20)
    for sample in (10.0, 1000.0) * 5:
        series = fold_sample(series, sample, POLICY)
    assert series.n == 20


def test_a_lasting_change_is_followed() -> None:
    series = after(*[100.0] * 20, *[25.0] * 60)
    assert series.value == pytest.approx(25.0, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 200),
    st.floats(-7.0, 7.0).filter(lambda change: abs(change) > 0.01),
    st.floats(0.0, 0.3),
    st.integers(0, 99),
)
def test_most_of_a_lasting_change_is_followed_within_ten_samples_and_all_but_a_twentieth_within_thirty(
    count: int, change: float, noise: float, seed: int
) -> None:
    rng = Random(seed)
    series = after(*[100.0 * math.exp(rng.uniform(-noise, noise)) for _ in range(count)])
    was, target, left = series.mean, math.log(100.0) + change, {}
    for number in range(1, 31):
        series = fold_sample(series, math.exp(target), POLICY)
        left[number] = abs(series.mean - target) / abs(was - target)
    assert left[10] <= 0.36
    assert left[30] <= 0.05


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60))
def test_what_is_learned_stays_within_what_was_seen(samples: list[float]) -> None:
    value = after(*samples).value
    assert value is not None
    assert min(samples) * 0.999 <= value <= max(samples) * 1.001


@settings(max_examples=100, deadline=None)
@given(st.integers(20, 60), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=2))
def test_two_odd_samples_in_a_row_move_nothing(count: int, odd: list[float]) -> None:
    series = after(*[100.0] * count)
    again = series
    for factor in odd:
        again = fold_sample(again, 100.0 * factor * (10.0 if factor >= 1.0 else 0.1), POLICY)
    assert (again.n, again.mean) == (series.n, series.mean)


def test_odd_samples_on_both_sides_are_no_change() -> None:
    series = after(*[100.0] * 20)
    again = series
    for sample in (1000.0, 1000.0, 10.0, 1000.0, 1000.0, 10.0, 10.0):
        again = fold_sample(again, sample, POLICY)
    assert (again.n, again.mean) == (series.n, series.mean)


def test_a_lasting_change_does_not_make_old_experience_count_as_none() -> None:
    changed = after(*[100.0] * 30, 25.0, 25.0, 25.0)
    assert changed.n == 31
    assert changed.value == pytest.approx(100.0 * 0.25 ** (1 / 3))
    assert changed.spread(POLICY) == POLICY.sd_few


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40))
def test_no_sample_breaks_a_series(samples: list[float]) -> None:
    series = after(*samples)
    assert math.isfinite(series.mean)
    assert series.var >= 0.0
    assert 0.1 <= series.spread(POLICY) <= 0.7


def test_shrinkage_mixes_in_logarithms() -> None:
    series = Series(n=5, mean=math.log(200.0))
    assert shrunk(series, 50.0, 5.0) == pytest.approx(100.0)
    assert shrunk(EMPTY, 50.0, 5.0) == pytest.approx(50.0)
    assert shrunk(EMPTY, 50.0, 0.0) == 50.0
    assert shrunk(series, 50.0, 0.0) == pytest.approx(200.0)
