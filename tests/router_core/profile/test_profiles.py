"""The table of profiles: look-ups that fall back, sizes that are learned, ceilings that hold."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.errors import RemoteFault
from router_core.ids import Id16
from router_core.policy.profile import ProfilePolicy
from router_core.profile.learn import Profile
from router_core.profile.outcome import Outcome, ProfileKey, Result
from router_core.profile.profiles import Profiles, decode_profile, encode_profile

KEY = ProfileKey(node=Id16(bytes(16)), endpoint="e", model="m", quant="Q4_K_M", ctx=8192, parallel=4)


def outcome(key: ProfileKey = KEY, **over: Any) -> Outcome:
    fields: dict[str, Any] = {
        "key": key,
        "at_ms": 1000,
        "result": Result.OK,
        "prompt_tokens": 1000,
        "prompt_ms": 1000.0,
        "gen_tokens": 101,
        "gen_ms": 2000.0,
    }
    return Outcome(**(fields | over))


def test_a_look_up_falls_back_from_parallel_to_context_and_no_further() -> None:
    profiles = Profiles(ProfilePolicy())
    profiles.learn(outcome())
    assert profiles.find(KEY) is not None
    assert profiles.find(replace(KEY, parallel=1)) is profiles.find(KEY)
    assert profiles.find(replace(KEY, parallel=1, ctx=4096)) is profiles.find(KEY)
    others = ({"quant": "Q8_0"}, {"model": "x"}, {"endpoint": "f"}, {"offload_pct": 50})
    for other in (replace(KEY, **over) for over in others):
        assert profiles.find(other) is None


def test_the_same_context_is_nearer_than_the_latest_one() -> None:
    profiles = Profiles(ProfilePolicy())
    same = profiles.learn(outcome(replace(KEY, parallel=2)))
    profiles.learn(outcome(replace(KEY, ctx=4096)))
    assert profiles.find(KEY) is same


def test_bytes_per_token_follow_what_engines_report_within_bounds() -> None:
    profiles = Profiles(ProfilePolicy())
    assert profiles.bytes_per_token("m") == 3.6
    for _ in range(100):
        profiles.learn(outcome(text_bytes=2500))
    assert profiles.bytes_per_token("m") == pytest.approx(2.5, abs=0.01)
    assert profiles.bytes_per_token("other") == 3.6
    for _ in range(200):
        profiles.learn(outcome(text_bytes=10**7))
    assert profiles.bytes_per_token("m") == 8.0


def test_cached_tokens_count_as_prompt_bytes() -> None:
    profiles = Profiles(ProfilePolicy())
    for _ in range(200):
        profiles.learn(outcome(text_bytes=8000, prompt_tokens=100, cached_tokens=1900))
    assert profiles.bytes_per_token("m") == pytest.approx(4.0, abs=0.01)


def test_outputs_are_learned_per_model_and_class() -> None:
    profiles = Profiles(ProfilePolicy())
    assert profiles.output_tokens("m", "interactive") is None
    for tokens in range(1, 101):
        profiles.learn(outcome(gen_tokens=tokens))
    assert profiles.output_tokens("m", "interactive") == 81
    assert profiles.output_tokens("m", "batch") is None


def test_failed_attempts_teach_no_sizes() -> None:
    profiles = Profiles(ProfilePolicy())
    profiles.learn(outcome(result=Result.CANCELLED, text_bytes=100))
    assert profiles.output_tokens("m", "interactive") is None
    assert profiles.bytes_per_token("m") == 3.6


def test_every_table_stays_at_its_ceiling() -> None:
    profiles = Profiles(ProfilePolicy(profiles_kept=50, names_kept=20))
    for number in range(2000):
        profiles.learn(outcome(replace(KEY, model=f"m{number}"), text_bytes=3000))
    assert len(profiles) == 50
    assert profiles.find(replace(KEY, model="m1999")) is not None
    assert profiles.find(replace(KEY, model="m1")) is None
    assert profiles.output_tokens("m1", "interactive") is None
    assert profiles.output_tokens("m1999", "interactive") == 101
    assert len(profiles._places) == 50
    assert len(profiles._bytes_per_token) == len(profiles._outputs) == 20


def test_what_was_learned_survives_the_store() -> None:
    profiles = Profiles(ProfilePolicy())
    profile = profiles.learn(outcome(load_ms=3000.0))
    key, back = decode_profile(encode_profile(KEY, profile), now=5)
    assert key == KEY
    assert back == replace(profile, at_ms=5)
    fresh = Profiles(ProfilePolicy())
    fresh.restore(key, back)
    assert fresh.find(KEY) == back
    newer = fresh.learn(outcome())
    fresh.restore(key, back)
    assert fresh.find(KEY) is newer


def test_every_change_raises_the_generation() -> None:
    profiles = Profiles(ProfilePolicy())
    profiles.learn(outcome())
    profiles.restore(replace(KEY, model="x"), Profile())
    assert profiles.gen == 2


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_profile_or_a_remote_fault(data: bytes) -> None:
    try:
        key, profile = decode_profile(data, now=1)
    except RemoteFault:
        return
    assert isinstance(key, ProfileKey)
    assert isinstance(profile, Profile)
