"""Own samples, claims and priors, and how they weigh against each other."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.ids import Id16
from router_core.policy.profile import ProfilePolicy
from router_core.profile.bits import nominal_bits
from router_core.profile.estimate import abilities, claim_of, quantile
from router_core.profile.learn import Profile
from router_core.profile.outcome import ProfileKey
from router_core.profile.priors import Prior, calibration, prior_of, weight_bytes
from router_core.profile.series import Series
from router_core.record.state import EngineFacts, GpuFacts, ModelFacts, ProfileFacts, Static

POLICY = ProfilePolicy()
PRIOR = Prior(prompt=1500.0, gen=50.0, load_s=4.0)
NOW = 10_000
KEY = ProfileKey(node=Id16(bytes(16)), endpoint="e", model="m")


def own(n: int, gen: float = 10.0) -> Profile:
    return Profile(prompt=Series(n=n, mean=math.log(300.0)), gen=Series(n=n, mean=math.log(gen)), at_ms=NOW)


def claim(n: int, gen_dtps: int = 5000, **over: Any) -> ProfileFacts:
    return ProfileFacts(model=0, engine=0, n=n, gen_dtps=gen_dtps, prompt_dtps=15_000, **over)


def gen(profile: Profile | None, told: ProfileFacts | None) -> float:
    return abilities(profile, PRIOR, told, NOW, POLICY).gen


def test_without_experience_the_prior_stands() -> None:
    able = abilities(None, PRIOR, None, NOW, POLICY)
    assert (able.prompt, able.gen) == pytest.approx((1500.0, 50.0))
    assert able.load_s == 4.0
    assert (able.beta, able.success, able.n) == (0.1, 0.95, 0)
    assert (able.s_prompt, able.s_gen, able.s_load) == (0.7, 0.7, 0.7)
    assert not able.load_known


def test_four_samples_meet_the_prior_halfway_and_twenty_silence_it() -> None:
    assert gen(own(4), None) == pytest.approx(math.sqrt(500.0))
    assert gen(own(20), None) == pytest.approx(10.0)


def test_a_claim_replaces_the_prior_until_own_samples_do() -> None:
    assert gen(None, claim(500)) == pytest.approx(500.0)
    assert gen(own(8, 200), claim(500)) == pytest.approx(math.exp(0.4 * math.log(200) + 0.6 * math.log(500)))
    assert gen(own(20, 200), claim(500)) == pytest.approx(200.0)
    assert gen(own(200), claim(60_000)) == pytest.approx(10.0)


@pytest.mark.threat("T12")
def test_three_samples_that_contradict_a_claim_silence_it() -> None:
    assert gen(own(2), claim(500)) == pytest.approx(math.exp((2 * math.log(10) + 18 * math.log(500)) / 20))
    assert gen(own(3), claim(500)) == gen(own(3), None)
    assert gen(own(3), claim(500)) == pytest.approx(math.exp((3 * math.log(10) + 4.25 * math.log(50)) / 7.25))


@pytest.mark.threat("T12")
@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 60),
    st.floats(0.1, 2_000),
    st.none() | st.builds(claim, st.integers(0, 65_535), st.integers(0, 2**32 - 1)),
)
def test_no_claim_or_prior_outweighs_what_was_observed(
    n: int, speed: float, told: ProfileFacts | None
) -> None:
    """The estimate lies between what was observed and what is told; after 20 samples it is what was observed."""
    expected = gen(own(n, speed), told)
    claimed = [min(2_000.0, told.gen_dtps / 10)] if told is not None and told.gen_dtps else []
    anchors = [PRIOR.gen, *claimed, *([speed] if n else [])]
    assert min(anchors) * 0.999 <= expected <= max(anchors) * 1.001
    if n >= 20:
        assert expected == pytest.approx(speed)


def test_a_claim_without_samples_or_speed_counts_nothing() -> None:
    assert gen(None, claim(0)) == pytest.approx(50.0)
    assert gen(None, ProfileFacts(model=0, engine=0, n=9)) == pytest.approx(50.0)


def test_a_claim_is_clamped() -> None:
    assert gen(None, claim(20, gen_dtps=2**32 - 1)) == pytest.approx(2000.0)
    told = claim(20, load_p75_ds=0)
    assert abilities(None, PRIOR, told, NOW, POLICY).load_s == 4.0
    assert abilities(None, PRIOR, claim(20, load_p75_ds=30), NOW, POLICY).load_s == 3.0


def test_own_load_times_beat_claims_and_priors() -> None:
    profile = Profile(loads_s=(1.0, 2.0, 3.0, 8.0), at_ms=NOW)
    able = abilities(profile, PRIOR, claim(20, load_p75_ds=100), NOW, POLICY)
    assert (able.load_s, able.load_known, able.s_load) == (3.0, True, 0.5)


@pytest.mark.parametrize(("loads_s", "spread"), [((2.0,) * 10, 0.1), ((0.1, 90.0) * 5, 0.7)])
def test_the_spread_of_load_times_is_never_certain_and_never_boundless(
    loads_s: tuple[float, ...], spread: float
) -> None:
    assert abilities(Profile(loads_s=loads_s, at_ms=NOW), PRIOR, None, NOW, POLICY).s_load == spread


def test_nobody_is_believed_to_slow_down_more_than_by_taking_turns() -> None:
    assert abilities(None, PRIOR, claim(20, beta_m=9_000), NOW, POLICY).beta == 1.0


def test_success_starts_at_19_of_20_and_follows_what_happens() -> None:
    faulty = Profile(faults=20.0, at_ms=NOW)
    assert abilities(faulty, PRIOR, None, NOW, POLICY).success == pytest.approx(19 / 40)
    later = abilities(faulty, PRIOR, None, NOW + 86_400_000, POLICY)
    assert later.success == pytest.approx(19 / 30)
    good = Profile(successes=80.0, at_ms=NOW)
    assert abilities(good, PRIOR, None, NOW, POLICY).success == pytest.approx(0.99)


def test_what_is_published_reads_back_as_a_claim() -> None:
    profile = Profile(
        prompt=Series(n=30, mean=math.log(300.0), var=0.04),
        gen=Series(n=30, mean=math.log(12.0), var=0.01),
        beta=0.25,
        loads_s=(2.0, 4.0),
        successes=80.0,
        at_ms=NOW,
    )
    told = claim_of(profile, 3, 1, 8192, 4, NOW + 2 * 3_600_000)
    assert (told.model, told.engine, told.ctx, told.parallel, told.n) == (3, 1, 8192, 4, 30)
    assert (told.prompt_dtps, told.gen_dtps, told.beta_m) == (3000, 120, 250)
    assert (told.prompt_sd_c, told.gen_sd_c) == (20, 10)
    assert (told.load_p75_ds, told.success_c, told.idle_h) == (40, 99, 2)
    able = abilities(None, PRIOR, told, NOW, POLICY)
    assert able.gen == pytest.approx(12.0)
    assert able.beta == 0.25


def test_an_empty_profile_publishes_unknowns_not_zeros() -> None:
    told = claim_of(Profile(), 0, 0, 0, 0, NOW)
    assert (told.prompt_dtps, told.gen_dtps, told.beta_m, told.load_p75_ds) == (None, None, None, None)


@pytest.mark.parametrize(("q", "value"), [(0.75, 3.0), (0.5, 2.0), (1.0, 4.0), (0.01, 1.0)])
def test_a_quantile_is_one_of_the_values(q: float, value: float) -> None:
    assert quantile((4.0, 1.0, 3.0, 2.0), q) == value


def static(*bandwidths: int | None) -> Static:
    return Static(gpus=tuple(GpuFacts(uuid8=bytes(8), name="g", mem_bw_gbs=value) for value in bandwidths))


def prior(gpus: Static, **model: Any) -> Prior:
    engine = EngineFacts(name="e", kind="llamacpp", gpus=tuple(range(len(gpus.gpus))))
    return prior_of(gpus, engine, ModelFacts(name="m", engine=0, **model), POLICY)


def test_generation_is_bound_by_bandwidth_over_active_bytes() -> None:
    dense = prior(static(1000), size_mib=4096)
    assert dense.gen == pytest.approx(0.6 * 1e12 / (4096 * 2**20))
    assert dense.prompt == pytest.approx(30 * dense.gen)
    assert dense.load_s == pytest.approx(4.0 / 1.19)
    sparse = prior(static(1000), size_mib=4096, params_m=30_000, active_m=3_000)
    assert sparse.gen == pytest.approx(10 * dense.gen)


def test_a_cpu_is_expected_to_be_slower_than_an_unknown_gpu() -> None:
    assert prior(static(), size_mib=4096).gen < prior(static(None), size_mib=4096).gen
    assert prior(static(1000, 500), size_mib=4096).gen == prior(static(500), size_mib=4096).gen


def test_a_gpu_told_without_any_bandwidth_is_an_unknown_gpu() -> None:
    assert prior(static(0)) == prior(static(None))
    assert prior(static(0, 100)) == prior(static(100))


def test_a_tiny_model_is_not_expected_to_beat_the_clamp() -> None:
    tiny = prior(static(1000), size_mib=1)
    assert (tiny.gen, tiny.prompt, tiny.load_s) == (2000.0, 60_000.0, 0.05)


def test_size_comes_from_parameters_and_quantisation_if_not_told() -> None:
    assert weight_bytes(ModelFacts(name="m", engine=0, params_m=8000, quant="Q8_0")) == pytest.approx(8.5e9)
    assert weight_bytes(ModelFacts(name="m", engine=0, params_m=8000)) is None
    assert weight_bytes(ModelFacts(name="m", engine=0, size_mib=0)) == 0.0


def test_quantisations_are_ordered_by_bits() -> None:
    names = [
        "F32",
        "BF16",
        "Q8_0",
        "Q6_K",
        "Q5_K_M",
        "Q4_K_M",
        "IQ4_XS",
        "Q3_K_M",
        "IQ3_XXS",
        "Q2_K",
        "IQ2_M",
        "IQ1_S",
    ]
    bits = [nominal_bits(name) or 0.0 for name in names]
    assert all(bits)
    assert bits == sorted(bits, reverse=True)
    assert nominal_bits("q4_k_m") == nominal_bits("Q4_K_M")
    assert (nominal_bits(None), nominal_bits("weird")) == (None, None)


def test_calibration_is_a_clamped_median() -> None:
    assert calibration([], POLICY) is None
    assert calibration([0.1, 0.2, 9.0], POLICY) == 0.2
    assert calibration([100.0], POLICY) == 5.0
    assert calibration([11.0], POLICY, alike=True) == 11.0
    assert calibration([100.0], POLICY, alike=True) == 50.0
    assert calibration([1e-9], POLICY) == 0.02
