"""What one outcome teaches, and what it must not."""

import math

import pytest
from msgspec.structs import replace

from router_core.ids import Id16
from router_core.policy.profile import ProfilePolicy
from router_core.profile.learn import Profile, learn
from router_core.profile.outcome import Outcome, ProfileKey, Result

POLICY = ProfilePolicy()
KEY = ProfileKey(node=Id16(bytes(16)), endpoint="e", model="m")


def outcome(**over) -> Outcome:
    """A good attempt: 1,000 tokens in 1 s, 101 tokens in 2 s, alone."""
    fields = {
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


def test_speeds_come_from_the_engines_own_times():
    profile = after(outcome())
    assert profile.prompt.value == pytest.approx(1000.0)
    assert profile.gen.value == pytest.approx(50.0)
    assert profile.n == 1


def test_an_engine_that_only_embeds_has_samples_too():
    profile = after(*[outcome(gen_tokens=None)] * 3)
    assert (profile.n, profile.prompt.n, profile.gen.n) == (3, 3, 0)


def test_without_a_prompt_time_the_first_token_stands_in():
    profile = after(outcome(prompt_ms=None, ttft_ms=1500.0, wait_ms=400.0, net_ms=100.0))
    assert profile.prompt.value == pytest.approx(1000.0)
    assert after(outcome(prompt_ms=None, ttft_ms=400.0, wait_ms=400.0)).prompt.n == 0
    assert after(outcome(prompt_ms=None, ttft_ms=9000.0, load_ms=8000.0)).prompt.n == 0
    assert after(outcome(prompt_ms=None)).prompt.n == 0


@pytest.mark.parametrize("over", [{"prompt_tokens": 63}, {"prompt_tokens": None}, {"prompt_ms": 0.0}])
def test_short_or_untold_prompts_teach_no_speed(over):
    assert after(outcome(**over)).prompt.n == 0


@pytest.mark.parametrize(
    "over", [{"gen_tokens": 31}, {"gen_tokens": None}, {"gen_ms": None}, {"gen_ms": 0.0}]
)
def test_short_or_untold_answers_teach_no_speed(over):
    assert after(outcome(**over)).gen.n == 0


@pytest.mark.parametrize("result", [Result.CANCELLED, Result.FAULT, Result.OTHER])
def test_only_a_whole_answer_teaches_speed(result):
    profile = after(outcome(result=result, load_ms=3000.0))
    assert (profile.prompt.n, profile.gen.n, profile.loads_s) == (0, 0, ())


def test_cancelling_never_speaks_against_an_endpoint():
    profile = after(outcome(result=Result.CANCELLED))
    assert (profile.successes, profile.faults) == (0.0, 0.0)


def test_faults_and_successes_fade_by_half_a_day():
    profile = after(outcome(result=Result.FAULT), outcome(at_ms=1000 + 86_400_000))
    assert profile.faults == pytest.approx(0.5)
    assert profile.successes == pytest.approx(1.0)


def test_concurrency_is_taken_out_of_the_speed():
    crowded = after(outcome(concurrency=4.0))
    assert crowded.gen.value == pytest.approx(50.0 * 1.3)


def test_the_slow_down_per_request_is_learned_from_crowded_answers():
    profile = after(*[outcome()] * 20)
    for _ in range(60):
        profile = learn(profile, outcome(concurrency=3.0, gen_ms=4000.0), POLICY)
    assert profile.beta == pytest.approx(0.5, abs=0.1)
    assert profile.beta_n == 60


@pytest.mark.parametrize("times", [0.1, 0.25, 0.5, 2.0, 4.0])
def test_a_lasting_change_of_speed_is_followed_even_if_answers_always_come_in_crowds(times):
    """Laptop on battery, or another driver: 3 at a time, each 1.2 times slower than alone, as ever."""
    profile = after(*[outcome()] * 20)
    crowded = {"concurrency": 3.0, "gen_ms": 2400.0}
    for _ in range(40):
        profile = learn(profile, outcome(**crowded), POLICY)
    for _ in range(30):
        profile = learn(profile, outcome(**crowded | {"gen_ms": 2400.0 / times}), POLICY)
    expected = profile.gen.value / (1.0 + profile.beta * 2.0)
    assert expected == pytest.approx(times * 100 / 2.4, rel=0.15)


@pytest.mark.parametrize("gen_ms", [1e-320, 5e-324, 1e308, math.inf])
@pytest.mark.parametrize("concurrency", [1.0, 3.0])
def test_a_time_beyond_all_measure_teaches_nothing(gen_ms, concurrency):
    known = after(*[outcome()] * 30)
    changed = learn(known, outcome(gen_ms=gen_ms, concurrency=concurrency), POLICY)
    assert (changed.gen.n, changed.gen.mean, changed.beta) == (known.gen.n, known.gen.mean, known.beta)


def test_the_last_64_loads_are_kept_and_none_is_zero():
    profile = after(*[outcome(load_ms=float(ms)) for ms in range(1, 101)])
    assert len(profile.loads_s) == 64
    assert profile.loads_s[-1] == pytest.approx(0.1)
    assert after(outcome(load_ms=1.0)).loads_s == (0.05,)


def test_time_never_runs_backwards_in_a_profile():
    profile = after(outcome(at_ms=5000), outcome(at_ms=1000))
    assert profile.at_ms == 5000
    assert profile.successes == 2.0


def test_learning_leaves_the_old_profile_as_it_was():
    old = after(outcome())
    learn(old, outcome(), POLICY)
    assert old == after(outcome())
    assert replace(old, at_ms=1) != old
