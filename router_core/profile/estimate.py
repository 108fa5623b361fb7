"""What to expect of one row: own experience, shrunk towards a peer's claim or the prior.

Rules: a peer's claim replaces the prior, capped in weight and value; both fade to nothing as own samples come in, and a
claim that a few of these contradict counts nothing at once, so a liar is ranked by observation. It knows
nothing of the request.
"""

import math

from msgspec import Struct

from router_core.policy.profile import ProfilePolicy
from router_core.profile.learn import Profile
from router_core.profile.priors import Prior
from router_core.profile.series import Series, contradicts, shrunk
from router_core.record.state import ProfileFacts

_SUCCESSES = 19.0
_TRIALS = 20.0
_HOUR_MS = 3_600_000


class Abilities(Struct, frozen=True, gc=False, kw_only=True):
    """Expected speeds (tokens/s, one request alone), slow-down per further request, load time and log spreads.

    ``first_s`` passes before the first token however short the prompt, 0 if unknown. ``load_known`` tells whether
    ``load_s`` was observed or claimed, or is a prior. ``n`` counts own samples, begun ones too.
    """

    prompt: float
    gen: float
    beta: float
    load_s: float
    load_known: bool
    s_prompt: float
    s_gen: float
    s_load: float
    success: float
    n: int
    first_s: float = 0.0


def abilities(
    profile: Profile | None, prior: Prior, claim: ProfileFacts | None, now: int, policy: ProfilePolicy
) -> Abilities:
    """Expectations of one row at ``now`` (boot ms)."""
    own = profile if profile is not None else Profile()
    load_s, load_known = _load(own, prior, claim, policy)
    claimed_beta = claim.beta_m / 1000.0 if claim is not None and claim.beta_m is not None else policy.beta
    return Abilities(
        prompt=_speed(own.prompt, prior.prompt, claim, policy, prompt=True),
        gen=_speed(own.gen, prior.gen, claim, policy, prompt=False),
        beta=min(1.0, own.beta if own.beta is not None else claimed_beta),
        load_s=load_s,
        load_known=load_known,
        s_prompt=own.prompt.spread(policy),
        s_gen=own.gen.spread(policy),
        s_load=_load_spread(own.loads_s, policy),
        success=success(own, now, policy),
        n=math.ceil(own.n),
        first_s=own.first.value or 0.0,
    )


def success(profile: Profile, now: int, policy: ProfilePolicy) -> float:
    """Probability that an attempt succeeds: Laplace-like, prior 19 of 20, older outcomes fading."""
    fade = math.pow(0.5, max(0, now - profile.at_ms) / policy.success_half_life_ms)
    good, bad = profile.successes * fade, profile.faults * fade
    return (good + _SUCCESSES) / (good + bad + _TRIALS)


def _speed(
    series: Series, prior: float, claim: ProfileFacts | None, policy: ProfilePolicy, *, prompt: bool
) -> float:
    fading = max(0.0, 1.0 - series.n / policy.claim_cap)
    told = None
    if claim is not None:
        told = claim.prompt_dtps if prompt else claim.gen_dtps
    if claim is not None and told and claim.n:
        value = min(told / 10.0, policy.prompt_most if prompt else policy.gen_most)
        if not contradicts(series, value, policy):
            return shrunk(series, value, fading * min(claim.n, policy.claim_cap))
    return shrunk(series, prior, fading * policy.prior_weight)


def _load(
    own: Profile, prior: Prior, claim: ProfileFacts | None, policy: ProfilePolicy
) -> tuple[float, bool]:
    if own.loads_s:
        return quantile(own.loads_s, 0.75), True
    if claim is not None and claim.load_p75_ds:
        return max(policy.load_least_s, claim.load_p75_ds / 10.0), True
    return prior.load_s, False


def _load_spread(loads_s: tuple[float, ...], policy: ProfilePolicy) -> float:
    if not loads_s:
        return policy.sd_untried
    if len(loads_s) < policy.few:
        return policy.sd_few
    logs = [math.log(load) for load in loads_s]
    mean = sum(logs) / len(logs)
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / len(logs))
    return min(policy.sd_most, max(policy.sd_least, sd))


def quantile(values: tuple[float, ...], q: float) -> float:
    """The smallest value that at least a share ``q`` of ``values`` does not exceed."""
    return sorted(values)[rank(len(values), q)]


def rank(count: int, q: float) -> int:
    """Where among ``count`` values in order, from 0, their ``quantile`` is."""
    return max(0, math.ceil(q * count) - 1)


def claim_of(profile: Profile, model: int, engine: int, ctx: int, parallel: int, now: int) -> ProfileFacts:
    """What to publish of ``profile`` for the model and engine at these positions of S."""
    prompt, gen = profile.prompt, profile.gen
    beta = profile.beta
    return ProfileFacts(
        model=model,
        engine=engine,
        ctx=ctx,
        parallel=parallel,
        n=min(math.ceil(profile.n), 0xFFFF),
        prompt_dtps=_deci(prompt),
        gen_dtps=_deci(gen),
        beta_m=round(beta * 1000) if beta is not None else None,
        prompt_sd_c=_centi(prompt),
        gen_sd_c=_centi(gen),
        load_p75_ds=min(0xFFFF, math.ceil(quantile(profile.loads_s, 0.75) * 10)) if profile.loads_s else None,
        success_c=round(
            100 * (profile.successes + _SUCCESSES) / (profile.successes + profile.faults + _TRIALS)
        ),
        idle_h=min(0xFFFF, max(0, now - profile.at_ms) // _HOUR_MS),
    )


def _deci(series: Series) -> int | None:
    value = series.value
    return None if value is None else min(0xFFFF_FFFF, max(1, round(value * 10)))


def _centi(series: Series) -> int | None:
    return min(0xFFFF, round(100 * math.sqrt(series.var))) if series.n >= 2 else None
