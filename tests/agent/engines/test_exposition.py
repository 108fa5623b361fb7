"""Reading Prometheus text, and speeds from counters."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.exposition import Counters, Moved, moved, read_values

PERIOD = 1_000


def counters(at_ms: int, tokens: float, seconds: float) -> Counters:
    return Counters(at_ms=at_ms, prompt_tokens=0, prompt_s=0, gen_tokens=tokens, gen_s=seconds)


def test_only_wanted_finite_values_are_read_and_an_absent_one_is_absent() -> None:
    text = b'# TYPE a gauge\na 3\nb NaN\nc +Inf\nd x\ne\nf 1 1700000000\nab 9\n\xff\xfe 1\ng{l="1"} 5\n'
    assert read_values(text, {"a", "b", "c", "d", "e", "f", "g", "z"}) == {"a": 3.0, "f": 1.0}


def test_a_speed_is_the_tokens_over_the_seconds_they_took() -> None:
    done = moved(counters(0, 100, 1), counters(PERIOD, 300, 3), PERIOD)
    assert done.tg_tps == 100
    assert done.pp_tps is None


def test_a_gap_of_more_than_three_periods_gives_no_speed() -> None:
    assert moved(counters(0, 0, 0), counters(3 * PERIOD, 100, 1), PERIOD).tg_tps == 100
    assert moved(counters(0, 0, 0), counters(3 * PERIOD + 1, 100, 1), PERIOD) == Moved()
    assert moved(None, counters(0, 100, 1), PERIOD) == Moved()


@settings(max_examples=100)
@given(*(st.floats(0, 1e12) for _ in range(4)))
def test_no_speed_is_ever_negative(before_n: float, before_s: float, after_n: float, after_s: float) -> None:
    done = moved(counters(0, before_n, before_s), counters(1, after_n, after_s), PERIOD)
    assert done.tg_tps is None or done.tg_tps > 0
    total = done + done
    assert total.tg_tps == done.tg_tps
