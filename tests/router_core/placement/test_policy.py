"""Tuning that makes no sense is refused when it is built, not when a request meets it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from router_core.errors import LocalMisuse
from router_core.policy.authority import AuthorityMode, AuthorityPolicy
from router_core.policy.canonical import canonical, hash_of
from router_core.policy.placement import PRESETS, ClassTargets, PlacementPolicy, Weights
from router_core.policy.profile import ProfilePolicy


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Weights(slo=-0.1),
        lambda: Weights(speed=1.1),
        lambda: ClassTargets(ttft_s=0.0, tpot_s=None, deadline_ms=1),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=0.0, deadline_ms=1),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=None, deadline_ms=0),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=None, deadline_ms=1, hold_ms=-1),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=None, deadline_ms=1, share=0.0),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=None, deadline_ms=1, share=1.1),
        lambda: PlacementPolicy(hold_quantum_s=0.0),
        lambda: PlacementPolicy(hold_promote_ms=0),
        lambda: PlacementPolicy(shed_range=0.0),
        lambda: ClassTargets(ttft_s=2.0, tpot_s=None, deadline_ms=1_999),
        lambda: PlacementPolicy(veto_above=0.5),
        lambda: PlacementPolicy(pack_below=1.0),
        lambda: PlacementPolicy(herd_floor=9.0),
        lambda: PlacementPolicy(herd_floor=0.5),
        lambda: PlacementPolicy(rtt_s=0.0),
        lambda: PlacementPolicy(link_bytes_per_s=-1.0),
        lambda: PlacementPolicy(pareto_eps=1.0),
        lambda: PlacementPolicy(aliases=(("chat", ()),)),
        lambda: PlacementPolicy(match_min_bits=-1.0),
        lambda: PlacementPolicy(match_penalties=(0.1, 0.5, 0.3)),
        lambda: PlacementPolicy(match_penalties=(-0.1, 0.3, 0.5)),
        lambda: PlacementPolicy(match_opens_at=1.5),
        lambda: PlacementPolicy(spill_off_below=0.5),
        lambda: PlacementPolicy(spill_price=0.0),
        lambda: PlacementPolicy(spill_privacy=-0.1),
        lambda: ProfilePolicy(rate=0.0),
        lambda: ProfilePolicy(sd_least=0.9),
        lambda: ProfilePolicy(output_quantile=1.0),
        lambda: ProfilePolicy(profiles_kept=0),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(broken: Callable[[], object]) -> None:
    with pytest.raises(LocalMisuse):
        broken()


def test_the_classes_promise_what_their_table_says() -> None:
    policy = PlacementPolicy()
    assert policy.interactive == ClassTargets(
        ttft_s=2.0, tpot_s=0.1, deadline_ms=1_800_000, hold_ms=600_000, share=1.0
    )
    assert policy.batch == ClassTargets(
        ttft_s=60.0, tpot_s=None, deadline_ms=3_600_000, hold_ms=900_000, share=0.9
    )
    assert policy.background == ClassTargets(
        ttft_s=600.0, tpot_s=None, deadline_ms=3_600_000, hold_ms=1_800_000, share=0.7
    )


def test_the_default_is_the_balanced_preset() -> None:
    policy = PlacementPolicy()
    assert policy.name == "balanced"
    assert (policy.weights.slo, policy.weights.memory, policy.weights.switch) == (0.5, 0.2, 0.15)
    assert (policy.weights.pressure, policy.weights.speed) == (0.5, 1.0)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9000",
        "http://127.8.0.1:9000/place",
        "http://[::1]:9000/",
        "unix:/run/authority.sock",
    ],
)
def test_an_authority_is_asked_on_this_host(url: str) -> None:
    assert AuthorityPolicy(mode=AuthorityMode.ADVISORY, url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.7:9000",
        "http://0.0.0.0:9000",
        "http://localhost:9000",
        "http://example.org:9000",
        "https://127.0.0.1:9000",
        "http://127.0.0.1",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
        "http://user:secret@127.0.0.1:9000",
        "http://127.0.0.1:9000/?model=x",
        "http://127.0.0.1:9000/a b",
        "http://127.0.0.1:9000/\nHost: elsewhere",
        "unix:run/authority.sock",
        "unix:/" + "x" * 107,
        "ftp://127.0.0.1:9000",
        "127.0.0.1:9000",
        "http://[::1",
    ],
)
def test_no_other_place_is_an_authority(url: str) -> None:
    with pytest.raises(LocalMisuse, match="authority url"):
        AuthorityPolicy(mode=AuthorityMode.ADVISORY, url=url)


def test_an_authority_that_counts_needs_an_address() -> None:
    with pytest.raises(LocalMisuse, match="needs a url"):
        AuthorityPolicy(mode=AuthorityMode.AUTHORITATIVE)


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(LocalMisuse, match=r"herd.*; .*veto.*; rtt_s"):
        PlacementPolicy(herd_cap=0.5, veto_above=0.1, rtt_s=0.0)


def test_equal_numbers_have_one_hash_however_they_were_written() -> None:
    assert PlacementPolicy(herd_cap=8).hash == PlacementPolicy().hash == replace(PlacementPolicy()).hash
    assert PlacementPolicy(herd_cap=8) == PlacementPolicy()


def test_every_preset_and_every_other_number_has_a_hash_of_its_own() -> None:
    made = [*PRESETS.values(), PlacementPolicy(tie_fixed=0.02), PlacementPolicy(session_headers=())]
    made += [PlacementPolicy(aliases=aliases) for aliases in ((("a", ("b", "c")),), (("a", ("c", "b")),))]
    made.append(PlacementPolicy(weights=Weights(slo=0.4)))
    assert len({policy.hash for policy in made}) == len(made)
    assert [name for name, policy in PRESETS.items() if policy.name != name] == []


def test_the_hash_covers_the_canonical_text_and_nothing_else() -> None:
    assert '"hash"' not in canonical(PlacementPolicy())
    assert hash_of(PlacementPolicy()) == PlacementPolicy().hash


def test_a_value_without_a_canonical_text_is_refused() -> None:
    @dataclass
    class Odd:
        value: object

    for value in (object(), {1}, float("nan")):
        with pytest.raises((LocalMisuse, ValueError)):
            hash_of(Odd(value))
