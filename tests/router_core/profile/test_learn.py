"""What one outcome teaches, and what it must not."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.ids import Id16
from router_core.policy.profile import ProfilePolicy
from router_core.profile.learn import Profile, learn
from router_core.profile.outcome import Outcome, ProfileKey, Result

POLICY = ProfilePolicy()
KEY = ProfileKey(node=Id16(bytes(16)), endpoint="e", model="m")


def outcome(**over: Any) -> Outcome:
    """A good attempt: 1,000 tokens in 1 s, 101 tokens in 2 s, alone."""
    fields: dict[str, Any] = {
        "key": KEY,
        "at_ms": 1000,
        "result": Result.OK,
        "prompt_tokens": 1000,
        "prompt_ms": 1000.0,
        "gen_tokens": 101,
        "gen_ms": 2000.0,
    }
    return Outcome(**(fields | over))


def after(*outcomes: Outcome) -> Profile:
    profile = Profile()
    for one in outcomes:
        profile = learn(profile, one, POLICY)
    return profile


def test_speeds_come_from_the_engines_own_times() -> None:
    profile = after(outcome())
    assert profile.prompt.value == pytest.approx(1000.0)
    assert profile.gen.value == pytest.approx(50.0)
    assert profile.n == 1


def test_an_engine_that_only_embeds_has_samples_too() -> None:
    profile = after(*[outcome(gen_tokens=None)] * 3)
    assert (profile.n, profile.prompt.n, profile.gen.n) == (3, 3, 0)


def test_without_a_prompt_time_the_first_token_stands_in() -> None:
    profile = after(outcome(prompt_ms=None, ttft_ms=1500.0, wait_ms=400.0, net_ms=100.0))
    assert profile.prompt.value == pytest.approx(1000.0)
    assert after(outcome(prompt_ms=None, ttft_ms=400.0, wait_ms=400.0)).prompt.n == 0
    assert after(outcome(prompt_ms=None, ttft_ms=9000.0, load_ms=8000.0)).prompt.n == 0
    assert after(outcome(prompt_ms=None)).prompt.n == 0


@pytest.mark.parametrize("over", [{"prompt_tokens": 127}, {"prompt_tokens": None}, {"prompt_ms": 0.0}])
def test_short_or_untold_prompts_teach_no_rate(over: dict[str, Any]) -> None:
    assert after(outcome(**over)).prompt.n == 0


def test_short_prompts_teach_what_passes_before_any_first_token_and_long_ones_the_rate_beyond_it() -> None:
    """Ten prompts of a few tokens at a server that takes 200 ms for anything, then 2,000 tokens in 1.2 s."""
    short = {"prompt_tokens": 8, "prompt_ms": None, "ttft_ms": 200.0}
    profile = after(*[outcome(**short)] * 10)
    assert profile.first.value == pytest.approx(0.2)
    assert profile.prompt.n == 0
    profile = learn(profile, outcome(prompt_tokens=2_000, prompt_ms=None, ttft_ms=1_200.0), POLICY)
    assert profile.prompt.value == pytest.approx(2_000.0)
    told = learn(profile, outcome(prompt_tokens=2_000, prompt_ms=1_000.0, ttft_ms=9_000.0), POLICY)
    assert told.prompt.value == pytest.approx(2_000.0), "what the engine tells has nothing else in it"


def test_a_slow_start_never_makes_a_rate_boundless() -> None:
    profile = after(outcome(prompt_tokens=8, prompt_ms=5_000.0))
    profile = learn(profile, outcome(prompt_tokens=1_000, prompt_ms=None, ttft_ms=1_000.0), POLICY)
    assert profile.prompt.value == pytest.approx(2_000.0)


@pytest.mark.parametrize(
    "over", [{"gen_tokens": 1}, {"gen_tokens": None}, {"gen_ms": None}, {"gen_ms": 0.0}, {"gen_ms": 1.0}]
)
def test_an_answer_without_a_measurable_gap_or_time_teaches_no_speed(over: dict[str, Any]) -> None:
    assert after(outcome(**over)).gen.n == 0


@pytest.mark.parametrize(("tokens", "weight"), [(2, 2 / 32), (8, 0.25), (20, 0.625), (32, 1), (400, 1)])
def test_a_short_answer_teaches_as_much_as_it_tells(tokens: int, weight: float) -> None:
    profile = after(outcome(gen_tokens=tokens, gen_ms=20.0 * (tokens - 1)))
    assert (profile.gen.n, profile.gen.value) == pytest.approx((weight, 50.0))


def test_a_whole_answer_teaches_by_its_time_as_a_whole_without_what_passes_before_its_first_token() -> None:
    whole = {"gen_ms": None, "prompt_ms": None, "prompt_tokens": 8}
    profile = after(outcome(**whole, total_ms=2_000.0, wait_ms=400.0, net_ms=100.0, gen_tokens=60))
    assert profile.gen.value == pytest.approx(60 / 1.5)
    known = after(outcome(prompt_tokens=8, prompt_ms=500.0, gen_tokens=None), outcome(gen_tokens=None))
    profile = learn(known, outcome(**whole | {"prompt_tokens": 500}, total_ms=2_000.0, gen_tokens=60), POLICY)
    assert profile.gen.value == pytest.approx(60 / (2.0 - 0.5 - 0.5))
    late = learn(known, outcome(**whole, total_ms=400.0, gen_tokens=60), POLICY)
    assert late.gen.value == pytest.approx(60 / 0.08), "a fifth of the time is the answer's in any case"
    assert after(outcome(**whole, total_ms=2_000.0, load_ms=900.0)).gen.n == 0


def test_a_stream_that_came_in_one_piece_teaches_as_a_whole() -> None:
    profile = after(outcome(gen_tokens=40, gen_ms=0.2, total_ms=2_000.0, prompt_ms=None, prompt_tokens=8))
    assert profile.gen.value == pytest.approx(20.0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(0.5, 1_000), st.booleans()), min_size=1, max_size=40)
)
def test_whatever_the_lengths_the_learned_speed_lies_among_the_seen_ones(
    answers: list[tuple[int, float, bool]],
) -> None:
    """Streams and whole answers, short and long, in any order."""
    profile, seen = Profile(), []
    for tokens, speed, streamed in answers:
        over = {"gen_ms": 1000.0 * (tokens - 1) / speed} if streamed else {"gen_ms": None}
        more = {"total_ms": 1000.0 * tokens / speed, "prompt_ms": None, "prompt_tokens": None}
        profile = learn(profile, outcome(gen_tokens=tokens, **over, **more), POLICY)
        seen.append(speed)
    if profile.gen.n:
        assert profile.gen.value is not None
        assert min(seen) * 0.999 <= profile.gen.value <= max(seen) * 1.001
    assert profile.gen.n <= len(answers)


@pytest.mark.parametrize("result", [Result.CANCELLED, Result.FAULT, Result.OTHER])
def test_only_a_whole_answer_teaches_speed(result: Result) -> None:
    profile = after(outcome(result=result, load_ms=3000.0))
    assert (profile.prompt.n, profile.gen.n, profile.loads_s) == (0, 0, ())


def test_cancelling_never_speaks_against_an_endpoint() -> None:
    profile = after(outcome(result=Result.CANCELLED))
    assert (profile.successes, profile.faults) == (0.0, 0.0)


def test_faults_and_successes_fade_by_half_a_day() -> None:
    profile = after(outcome(result=Result.FAULT), outcome(at_ms=1000 + 86_400_000))
    assert profile.faults == pytest.approx(0.5)
    assert profile.successes == pytest.approx(1.0)


def test_concurrency_is_taken_out_of_the_speed() -> None:
    crowded = after(outcome(concurrency=4.0))
    assert crowded.gen.value == pytest.approx(50.0 * 1.3)


def test_the_slow_down_per_request_is_learned_from_crowded_answers() -> None:
    profile = after(*[outcome()] * 20)
    for _ in range(60):
        profile = learn(profile, outcome(concurrency=3.0, gen_ms=4000.0), POLICY)
    assert profile.beta == pytest.approx(0.5, abs=0.1)
    assert profile.beta_n == 60


@pytest.mark.parametrize("times", [0.1, 0.25, 0.5, 2.0, 4.0])
def test_a_lasting_change_of_speed_is_followed_even_if_answers_always_come_in_crowds(times: float) -> None:
    """Laptop on battery, or another driver: 3 at a time, each 1.2 times slower than alone, as ever."""
    profile = after(*[outcome()] * 20)
    crowded = {"concurrency": 3.0, "gen_ms": 2400.0}
    for _ in range(40):
        profile = learn(profile, outcome(**crowded), POLICY)
    for _ in range(30):
        profile = learn(profile, outcome(**crowded | {"gen_ms": 2400.0 / times}), POLICY)
    assert profile.gen.value is not None
    assert profile.beta is not None
    expected = profile.gen.value / (1.0 + profile.beta * 2.0)
    assert expected == pytest.approx(times * 100 / 2.4, rel=0.15)


@pytest.mark.parametrize("gen_ms", [1e-320, 5e-324, 1e308, math.inf])
@pytest.mark.parametrize("concurrency", [1.0, 3.0])
def test_a_time_beyond_all_measure_teaches_nothing(gen_ms: float, concurrency: float) -> None:
    known = after(*[outcome()] * 30)
    changed = learn(known, outcome(gen_ms=gen_ms, concurrency=concurrency), POLICY)
    assert (changed.gen.n, changed.gen.mean, changed.beta) == (known.gen.n, known.gen.mean, known.beta)


def test_the_last_64_loads_are_kept_and_none_is_zero() -> None:
    profile = after(*[outcome(load_ms=float(ms)) for ms in range(1, 101)])
    assert len(profile.loads_s) == 64
    assert profile.loads_s[-1] == pytest.approx(0.1)
    assert after(outcome(load_ms=1.0)).loads_s == (0.05,)


def test_time_never_runs_backwards_in_a_profile() -> None:
    profile = after(outcome(at_ms=5000), outcome(at_ms=1000))
    assert profile.at_ms == 5000
    assert profile.successes == 2.0


def test_learning_leaves_the_old_profile_as_it_was() -> None:
    old = after(outcome())
    learn(old, outcome(), POLICY)
    assert old == after(outcome())
    assert replace(old, at_ms=1) != old
