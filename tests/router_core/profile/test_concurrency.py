"""The limit of an engine that does not tell how many requests it takes."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.profile.concurrency import FIRST, MOST, WINDOW_MS, ConcurrencyLimit


class Served:
    """Requests that come and go at one endpoint; each takes ``takes_ms(met)``."""

    def __init__(self) -> None:
        self.now = 1_000
        self.limit = ConcurrencyLimit(self.now)
        self.inside = 0

    def burst(self, count: int, takes_ms: Callable[[int], float], tokens: int | None = None) -> None:
        """``count`` come at once, end one after the other; then a window is over."""
        sent = []
        for _ in range(count):
            self.inside += 1
            self.now += 1
            self.limit.changed(self.inside, self.now)
            sent.append((self.now, self.inside))
        for at, met in sent:
            self.inside -= 1
            self.now += 1
            self.limit.changed(self.inside, self.now)
            self.limit.ended(at, self.now, took_ms=takes_ms(met), tokens=tokens)
        self.now += WINDOW_MS
        self.limit.changed(self.inside, self.now)


def batching(met: int) -> float:
    return 500.0


def one_by_one(met: int) -> float:
    return 500.0 * met


def test_an_engine_that_batches_is_given_twice_as_many_each_time_it_was_full() -> None:
    served = Served()
    assert served.limit.value == FIRST
    for expected in (64, 128, 256, MOST):
        served.burst(served.limit.value, batching)
        assert served.limit.value == expected


def test_an_engine_that_takes_one_at_a_time_is_found_out_by_whole_answers_and_by_streams() -> None:
    for tokens in (None, 20):
        served = Served()
        for _ in range(20):
            served.burst(served.limit.value, one_by_one, tokens)
        assert served.limit.value <= 3


def test_once_a_rise_was_seen_the_limit_grows_by_one() -> None:
    served = Served()
    served.burst(32, one_by_one)
    assert served.limit.value == 22
    served.burst(22, batching)
    assert served.limit.value == 23


def test_an_engine_that_refuses_is_given_less_at_once_per_window() -> None:
    served = Served()
    for _ in range(5):
        served.limit.busy(served.now)
    assert served.limit.value == FIRST
    served.now += WINDOW_MS
    served.limit.busy(served.now)
    assert served.limit.value == 22


def test_a_limit_that_was_not_reached_or_is_told_nothing_by_stays() -> None:
    served = Served()
    served.burst(31, one_by_one)
    assert served.limit.value == FIRST
    for _ in range(3):
        served.inside = 40
        served.now += WINDOW_MS
        served.limit.changed(40, served.now)
    assert served.limit.value == FIRST


def test_a_rise_of_less_than_a_third_of_a_second_is_none() -> None:
    served = Served()
    served.burst(32, lambda met: 5.0 * met)
    assert served.limit.value == 64


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 400), st.integers(0, 20_000), st.floats(0, 1e7), st.sampled_from([None, 1, 50])
        ),
        max_size=60,
    )
)
def test_whatever_passes_the_limit_stays_in_its_bounds(
    events: list[tuple[int, int, float, int | None]],
) -> None:
    now, limit = 0, ConcurrencyLimit(0)
    for in_flight, later, took, tokens in events:
        now += later
        limit.changed(in_flight, now)
        limit.ended(now - later / 2, now, took_ms=took, tokens=tokens)
        if in_flight % 7 == 0:
            limit.busy(now)
        assert 1 <= limit.value <= MOST
