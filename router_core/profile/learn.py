"""One outcome folded into the profile of one engine configuration. Pure.

Rules: cancelled, failed or truncated attempts teach no speed; a short prompt teaches what every answer takes before its
first token, and no rate; a short answer teaches little; a whole answer teaches by its time as a whole; a success or fault
counts as the breaker counts it. It does not know which requests exist.
"""

import math

from msgspec import Struct
from msgspec.structs import replace

from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Outcome, Result
from router_core.profile.series import EMPTY, Series, fold_sample

_BETA_MOST = 1.0
_ALONE = 1.5


class Profile(Struct, frozen=True, gc=False, kw_only=True):
    """Learned facts. Speeds in tokens/s, ``first`` the seconds until the first token of short prompts, ``loads_s`` the last
    load times in seconds, ``at_ms`` the last outcome.

    ``beta`` is the relative slow-down per further concurrent request, learned from ``beta_n`` crowded answers once the
    speed alone is known. ``successes`` and ``faults`` decay with the policy's half-life.
    """

    prompt: Series = EMPTY
    gen: Series = EMPTY
    beta: float | None = None
    beta_n: int = 0
    loads_s: tuple[float, ...] = ()
    successes: float = 0.0
    faults: float = 0.0
    at_ms: int = 0
    first: Series = EMPTY

    @property
    def n(self) -> float:
        """Samples behind the speeds: the fewer of the two, or those of the only one (embeddings generate nothing)."""
        return min(self.prompt.n or self.gen.n, self.gen.n or self.prompt.n)


def learn(profile: Profile, outcome: Outcome, policy: ProfilePolicy) -> Profile:
    """``profile`` after one more attempt."""
    fade = math.pow(0.5, max(0, outcome.at_ms - profile.at_ms) / policy.success_half_life_ms)
    successes, faults = profile.successes * fade, profile.faults * fade
    prompt, gen, beta, beta_n, loads = (
        profile.prompt,
        profile.gen,
        profile.beta,
        profile.beta_n,
        profile.loads_s,
    )
    first = profile.first
    if outcome.result is Result.OK:
        successes += 1.0
        if outcome.prompt_tokens is not None and (waited := _first_s(outcome)) is not None:
            if outcome.prompt_tokens < policy.least_prompt_tokens:
                first = fold_sample(first, waited, policy)
            else:
                prompt = fold_sample(prompt, _prompt_speed(outcome, waited, profile), policy)
        tg = _gen_speed(outcome, profile, policy)
        if tg is not None:
            weight = min(1.0, (outcome.gen_tokens or 0) / policy.telling_output_tokens)
            if _is_the_crowd(gen, tg, outcome.concurrency, policy):
                beta, beta_n = _fold_beta(profile, tg, outcome.concurrency, policy), beta_n + 1
                gen = replace(gen, streak=0) if gen.streak else gen
            else:
                slowed = beta if beta is not None else policy.beta
                gen = fold_sample(gen, tg * (1.0 + slowed * (outcome.concurrency - 1.0)), policy, weight)
        if outcome.load_ms is not None and outcome.load_ms > 0:
            loads = (*loads, max(policy.load_least_s, outcome.load_ms / 1000.0))[-policy.loads_kept :]
    elif outcome.result is Result.FAULT:
        faults += 1.0
    return Profile(
        prompt=prompt,
        gen=gen,
        beta=beta,
        beta_n=beta_n,
        loads_s=loads,
        successes=successes,
        faults=faults,
        at_ms=max(profile.at_ms, outcome.at_ms),
        first=first,
    )


def _first_s(outcome: Outcome) -> float | None:
    """Seconds that the engine took until the first token, as it told, else as seen from here."""
    if outcome.prompt_ms is not None and outcome.prompt_ms > 0:
        return outcome.prompt_ms / 1000.0
    if outcome.ttft_ms is None or outcome.load_ms is not None:
        return None
    computing = outcome.ttft_ms - outcome.wait_ms - outcome.net_ms
    return computing / 1000.0 if computing > 0 else None


def _prompt_speed(outcome: Outcome, waited_s: float, profile: Profile) -> float:
    """Tokens per second of a long prompt. What was seen from here has what any answer takes in it; at most half of it, or
    a slow start once would make any prompt fast."""
    tokens = float(outcome.prompt_tokens or 0)
    told = outcome.prompt_ms is not None and outcome.prompt_ms > 0
    usual_s = 0.0 if told else profile.first.value or 0.0
    return tokens / max(0.5 * waited_s, waited_s - usual_s)


def _gen_speed(outcome: Outcome, profile: Profile, policy: ProfilePolicy) -> float | None:
    """Tokens per second of one answer: by the gaps of a stream, else by the time as a whole, without what is known to pass
    before the first token. A stream that came in one piece, faster than any engine, tells no more than a whole answer."""
    tokens = outcome.gen_tokens
    if tokens is None or tokens < 1:
        return None
    if outcome.gen_ms is not None:
        if tokens > 1 and outcome.gen_ms > 0 and 1000.0 * (tokens - 1) / outcome.gen_ms <= policy.gen_most:
            return 1000.0 * (tokens - 1) / outcome.gen_ms or None
        if tokens < 2:
            return None
    total_ms = outcome.total_ms
    if total_ms is None or total_ms <= 0 or outcome.load_ms is not None:
        return None
    before_ms = outcome.wait_ms + outcome.net_ms
    if profile.first.n:
        before_ms += 1000.0 * (profile.first.value or 0.0)
    if profile.prompt.value and outcome.prompt_tokens:
        before_ms += 1000.0 * outcome.prompt_tokens / profile.prompt.value
    return 1000.0 * tokens / max(policy.least_gen_share * total_ms, total_ms - before_ms) or None


def _is_the_crowd(gen: Series, tg: float, concurrency: float, policy: ProfilePolicy) -> bool:
    """True if ``tg`` tells of others in the batch: the speed alone is known, and some slow-down per request explains the
    difference. If none does, the speed itself has changed."""
    if concurrency <= _ALONE or gen.n - gen.before < policy.claim_cap:
        return False
    reach = policy.outlier_sds * gen.spread(policy)
    least, most = math.log(tg), math.log(tg * (1.0 + _BETA_MOST * (concurrency - 1.0)))
    return least <= gen.mean + reach and most >= gen.mean - reach


def _fold_beta(profile: Profile, tg: float, concurrency: float, policy: ProfilePolicy) -> float:
    known = profile.beta if profile.beta is not None else policy.beta
    alone = profile.gen.value
    if alone is None:
        return known
    sample = min(_BETA_MOST, max(0.0, (alone / tg - 1.0) / (concurrency - 1.0)))
    return known + policy.rate * (sample - known)
