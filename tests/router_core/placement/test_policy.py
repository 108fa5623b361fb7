"""Tuning that makes no sense is refused when it is built, not when a request meets it."""

import pytest

from router_core.errors import LocalMisuse
from router_core.policy.placement import ClassTargets, PlacementPolicy, Weights
from router_core.policy.profile import ProfilePolicy


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Weights(slo=-0.1),
        lambda: Weights(speed=1.1),
        lambda: ClassTargets(ttft_s=0.0, tpot_s=None, deadline_ms=1),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=0.0, deadline_ms=1),
        lambda: ClassTargets(ttft_s=1.0, tpot_s=None, deadline_ms=0),
        lambda: PlacementPolicy(herd_floor=9.0),
        lambda: PlacementPolicy(herd_floor=0.5),
        lambda: PlacementPolicy(rtt_s=0.0),
        lambda: PlacementPolicy(link_bytes_per_s=-1.0),
        lambda: PlacementPolicy(pareto_eps=1.0),
        lambda: PlacementPolicy(aliases=(("chat", ()),)),
        lambda: ProfilePolicy(rate=0.0),
        lambda: ProfilePolicy(sd_least=0.9),
        lambda: ProfilePolicy(output_quantile=1.0),
        lambda: ProfilePolicy(profiles_kept=0),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(broken):
    with pytest.raises(LocalMisuse):
        broken()


def test_the_default_is_the_balanced_preset():
    policy = PlacementPolicy()
    assert policy.name == "balanced"
    assert (policy.weights.slo, policy.weights.memory, policy.weights.switch) == (0.5, 0.2, 0.15)
    assert (policy.weights.pressure, policy.weights.speed) == (0.15, 0.1)
