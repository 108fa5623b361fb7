"""The rules of placement written down once more, row by row and formula by formula, as slowly as they read.

What ``decide`` does fast must come out the same. Reading names and bodies is not repeated here: needs, offers and terms
of ``require`` are taken from the code.
"""

import math
from dataclasses import dataclass, field

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.eligibility import in_subset, matches, need_of
from router_core.placement.filters.model_match import offer_of, settled
from router_core.placement.reasons import Reason
from router_core.placement.request.request import Locality, PlacementRequest
from router_core.policy.placement import PlacementPolicy


@dataclass
class Judged:
    """One row with its times in seconds, its factors and its score; ``out`` says why it left the choice."""

    row: Row
    wait: float
    load: float
    prefill: float
    tpot: float
    ttft: float
    ect: float
    cost: float
    sd: float
    slo: float
    queued: int
    busy: int
    hit: int
    free: bool
    resident: bool
    reserve: str | None
    age_ms: int
    adj: float = 0.0
    bonus: float = 0.0
    speed: float = 0.0
    score: float = 0.0
    out: str | None = None

    @property
    def name(self) -> tuple[str, str]:
        return self.row.key, self.row.model

    @property
    def factors(self) -> tuple[float, ...]:
        return (self.slo, self.row.memory, self.row.switch, self.row.pressure, self.speed)

    @property
    def worst(self) -> float:
        return max(self.slo, self.row.memory, self.row.switch, self.row.pressure)


@dataclass
class Outcome:
    """``tied`` are the rows that share the draw with their chances; the best first in ``standing``."""

    excluded: dict[tuple[str, str], Reason]
    main: list[Judged] = field(default_factory=list)
    reserves: list[Judged] = field(default_factory=list)
    standing: list[Judged] = field(default_factory=list)
    tied: list[tuple[Judged, float]] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)


class Plain:
    """One request against one fleet."""

    def __init__(self, request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int) -> None:
        self.request, self.fleet, self.policy, self.now = request, fleet, policy, now
        self.breakers = fleet.breakers

    def outcome(self) -> Outcome:
        offer = offer_of(self.request.model, self.fleet, self.policy)
        if offer is None:
            return Outcome({})
        group = offer.rows[0].profile_key.model if offer.rows else self.request.model
        profiles = self.fleet.profiles
        learned = profiles.output_tokens(group, self.request.hints.request_class.value)
        need = need_of(self.request, profiles.bytes_per_token(group), learned, self.policy)
        meant = settled(offer, need, self.fleet, self.now)
        self.need, rows, self.costs = meant.need, meant.rows, meant.costs or {}
        told = Outcome({})
        if meant.conflict:
            told.degraded.append("digest_conflict")
        soft = []
        for row in rows:
            reason = self.first_filter(row)
            if reason is None:
                judged = self.judged(row)
                (told.main if judged.reserve is None else told.reserves).append(judged)
            else:
                told.excluded[row.key, row.model] = reason
                if reason is Reason.PRESSURE and row.gate is Gate.SOFT and (self.warm(row) or row.loads):
                    soft.append(row)
        self.fall_back(told, rows, soft)
        self.score(told)
        self.choose(told)
        return told

    # --- filters ---------------------------------------------------------------------------------------------

    @staticmethod
    def warm(row: Row) -> bool:
        return row.resident or row.loading

    def first_filter(self, row: Row, *, forgiven: bool = False) -> Reason | None:
        need, request, warm = self.need, self.request, self.warm(row)
        owed = self.fleet.live.ledger.owed.get(row.key)
        state = 0 if self.breakers is None else self.breakers.state(row.key, self.now)
        lacks = (row.cap_no & need.inferred) or (need.explicit & ~row.cap_yes)
        least_m, bits = request.hints.params_least_m, request.hints.bits_least
        small = (least_m is not None and (row.params_m is None or row.params_m < least_m)) or (
            bits is not None and (row.bits is None or row.bits < bits)
        )
        ctx = row.ctx_most if need.num_ctx is not None and row.reload_s else row.ctx
        least, stale = (
            request.hints.ctx_least,
            not row.is_self and self.now - row.taken_ms > 5 * row.period_ms,
        )
        too_long = need.sure > (ctx or 0) and row.engine != "ollama"
        busy = self.busy(row) + (owed.requests if owed is not None and not row.is_self else 0)
        checks = (
            (Reason.UNTRUSTED, row.untrusted),
            (
                Reason.LOCALITY,
                row.cloud or (request.hints.locality is Locality.HOST and not row.is_self),
            ),
            (Reason.NOT_IN_SUBSET, not in_subset(row, request.hints)),
            (Reason.UNREACHABLE, row.down is not None),
            (Reason.BREAKER_OPEN, state == 2),
            (Reason.DRAINING, row.draining),
            (
                Reason.MODEL_ABSENT,
                (need.digest is not None and row.digest is not None and row.digest != need.digest)
                or not (warm or row.loadable),
            ),
            (Reason.CAPABILITY, not row.dialects & need.dialect or bool(lacks) or small),
            (
                Reason.CONTEXT_TOO_SMALL,
                ctx is not None and (too_long or (least is not None and ctx < least)),
            ),
            (
                Reason.DOES_NOT_FIT,
                not warm and not stale and row.reach_bytes is not None and row.weight_bytes > row.reach_bytes,
            ),
            (Reason.PRESSURE, not forgiven and (row.gate is not Gate.OPEN or not (warm or row.loads))),
            (Reason.QUEUE_FULL, busy >= need.share * row.ceiling),
            (Reason.DEADLINE, self.now >= need.until_ms),
            (Reason.TRIED, row.key in request.tried),
            (Reason.REFUSED, row.key in request.refused),
        )
        return next((reason for reason, failed in checks if failed), None)

    def busy(self, row: Row) -> int:
        if row.is_self:
            return self.fleet.live.ledger.local.in_flight(row.endpoint) + row.foreign
        return row.in_flight + row.queued

    def usual_s(self, row: Row) -> float:
        """What a usual request takes there beside as many as are served at a time."""
        usual = self.fleet.profiles.usual(row.profile_key.model)
        return usual.prompt * row.prefill_s_per_token + usual.output * self.full_token_s(row)

    @staticmethod
    def full_token_s(row: Row) -> float:
        return row.token_s * (1 + row.beta * (row.k - 1))

    def ahead(self, row: Row, age_ms: int) -> float:
        """How many have to end before one that is sent now is served, in the mean."""
        policy, told = self.policy, self.busy(row)
        owed = self.fleet.live.ledger.owed.get(row.key)
        added = 0.0
        if owed is not None and not row.is_self:
            added = owed.requests * max(1.0, policy.herd_share * self.fleet.m_r)
        gone = 0.0
        if not row.is_self and (added or told >= row.k - 1):
            gone = min(told + added / 2, row.k) * min(1.0, age_ms / 1000 / self.usual_s(row))
        variance = policy.wait_doubt + policy.wait_doubt_each * added
        aged = mean_above_0(told + added - gone - row.k + 1, variance + policy.wait_doubt_each * gone)
        return max(aged, mean_above_0(min(0.0, told + added - row.k + 1), variance))

    def reserve(self, row: Row, age_ms: int) -> str | None:
        if row.backup is not None:
            return row.backup
        if age_ms > 5 * row.period_ms:
            return "stale"
        if row.key in self.fleet.live.suspects:
            return "stalled"
        half_open = self.breakers is not None and self.breakers.state(row.key, self.now) == 1
        return "half_open" if half_open else None

    def fall_back(self, told: Outcome, rows: tuple[Row, ...], soft: list[Row]) -> None:
        if not told.main and soft:
            able: list[Judged] = []
            spare: list[Judged] = []
            for row in soft:
                reason = self.first_filter(row, forgiven=True)
                if reason is not None:
                    told.excluded[row.key, row.model] = reason
                else:
                    judged = self.judged(row)
                    (able if judged.reserve is None else spare).append(judged)
            if not able and not told.reserves:
                able = spare
            least = min((judged.row.pressure for judged in able), default=0.0)
            told.main = [judged for judged in able if judged.row.pressure <= least + self.policy.pareto_eps]
            for judged in told.main:
                del told.excluded[judged.name]
            if told.main:
                told.degraded.append("pressure")
                if told.main[0].reserve is not None:
                    told.degraded.append("stale_view")
        if not told.main and told.reserves:
            told.main, told.reserves = told.reserves, []
            told.degraded.append("stale_view")
        if not told.main and self.breakers is not None:
            self.probe(told, rows)

    def probe(self, told: Outcome, rows: tuple[Row, ...]) -> None:
        breakers, self.breakers = self.breakers, None
        assert breakers is not None
        opened = [row for row in rows if told.excluded[row.key, row.model] is Reason.BREAKER_OPEN]
        if any(reason in (Reason.QUEUE_FULL, Reason.REFUSED) for reason in told.excluded.values()):
            return
        if any(breakers.is_on_trial(row.key) for row in opened):
            return
        for row in sorted(opened, key=lambda row: (breakers.last_fault_ms(row.key) or 0, row.key)):
            if self.first_filter(row) is None:
                told.main = [self.judged(row)]
                del told.excluded[row.key, row.model]
                told.degraded.append("probe")
                return

    # --- estimates and factors -------------------------------------------------------------------------------

    def judged(self, row: Row) -> Judged:
        need, request = self.need, self.request
        if row.is_self:
            age_ms, busy = 0, self.busy(row)
            in_flight, queued = min(busy, row.slots), max(0, busy - row.slots)
        else:
            age_ms, in_flight, queued = max(0, self.now - row.taken_ms), row.in_flight, row.queued
        ahead = self.ahead(row, age_ms)
        wait = ahead * self.usual_s(row) / row.k
        reload_s = 0.0
        if need.num_ctx is not None and row.resident and row.resident_ctx not in (None, need.num_ctx):
            reload_s = row.reload_s
        pin = request.pin
        hit = 0
        if (
            pin is not None
            and self.now - pin.at_ms <= self.policy.affinity_ms
            and row.resident
            and not reload_s
        ):
            hit = min(need.prompt, pin.tokens) if (pin.endpoint, pin.model) == (row.key, row.model) else 0
        load = reload_s or row.load_s
        prefill = row.first_s + (need.prompt - hit) * row.prefill_s_per_token
        tpot = (1 + row.beta * (min(row.k, in_flight + 1) - 1)) * row.token_s
        if row.samples == 0:
            tpot *= 0.8
        net = 0.0 if row.is_self else need.transfer_s + row.way_s
        ttft = net + wait + load + prefill
        spreads = [0.3 + 0.1 * age_ms / row.period_ms, row.s_speed, row.s_load if load else 0.0]
        sd = min(1.0, max(spreads))
        size = need.prompt * row.prefill_s_per_token + need.output * self.full_token_s(row)
        by_size = self.policy.wait_by_size * size / self.usual_s(row)
        cost = net + load + prefill + wait * (1 + by_size) + self.policy.decode_share * need.output * tpot
        late = risk(ttft, need.ttft_s, sd)
        pace = risk(tpot, need.tpot_s, row.s_gen) if need.tpot_s is not None and need.output else 0.0
        owed = self.fleet.live.ledger.owed.get(row.key)
        ours = 0 if row.is_self or owed is None else owed.requests
        return Judged(
            row=row,
            wait=wait,
            load=load,
            prefill=prefill,
            tpot=tpot,
            ttft=ttft,
            ect=ttft + need.output * tpot,
            cost=cost,
            sd=sd,
            slo=1.0 if self.now + 1000 * ttft > need.until_ms else 1 - (1 - max(late, pace)) * row.success,
            queued=queued,
            busy=self.busy(row) + ours,
            hit=hit,
            free=self.busy(row) + ours < row.slots,
            resident=row.resident and not reload_s,
            reserve=self.reserve(row, age_ms),
            age_ms=age_ms,
        )

    def score(self, told: Outcome) -> None:
        if not told.main:
            return
        least = min(judged.cost for judged in told.main)
        mean = sum(judged.queued for judged in told.main) / len(told.main)
        weights = self.policy.weights
        for judged in (*told.main, *told.reserves):
            both = judged.cost + least + self.policy.cost_least_s
            judged.speed = max(0.0, judged.cost - least) / both if both > 0 else 0.0
            judged.adj = self.costs.get(judged.name, 0.0)
            row, need = judged.row, self.need
            ctx = row.ctx_most if need.num_ctx is not None and row.reload_s else row.ctx
            if ctx is not None and row.ctx is not None:
                over = max(0.0, need.ctx / ctx - 1)
                judged.adj += self.policy.context_most * min(1.0, over)
            ranks = [n for n, ref in enumerate(self.request.hints.prefer) if matches(ref, judged.row)]
            if ranks:
                judged.bonus += self.policy.hint_bonus / (1 + ranks[0])
            d = judged.queued
            if judged.hit and not (d > 4 + mean and d > 1.5 * mean):
                judged.bonus += self.policy.affinity_bonus * (judged.hit / self.need.prompt) / (1 + d / 2)
            judged.adj -= judged.bonus
            parts = (weights.slo, weights.memory, weights.switch, weights.pressure, weights.speed)
            judged.score = judged.adj + sum(w * f for w, f in zip(parts, judged.factors, strict=True))

    # --- choice ----------------------------------------------------------------------------------------------

    def choose(self, told: Outcome) -> None:
        rows = sorted(told.main, key=lambda judged: (judged.score, judged.name))
        if not rows:
            return
        policy = self.policy
        if min(judged.worst for judged in rows) < policy.veto_needs_below:
            for judged in rows:
                if judged.worst > policy.veto_above:
                    judged.out = "veto"
        warm = [judged.ect for judged in rows if judged.resident and judged.free and judged.out is None]
        for judged in rows:
            if judged.out is None and not judged.resident and warm and judged.ect > min(warm):
                judged.out = "cold"
        for judged in rows:
            beaten = judged.out is None and any(
                self.dominates(other, judged) for other in rows if other is not judged
            )
            if beaten:
                judged.out = "dominated"
        told.standing = [judged for judged in rows if judged.out is None]
        if not told.standing:
            best = next(judged for judged in rows if judged.out not in ("veto", "cold"))
            best.out = None
            told.standing = [best]
        best = told.standing[0]
        margin = policy.tie_fixed + policy.tie_per_period * min(1, best.age_ms / best.row.period_ms)
        tied = [judged for judged in told.standing if judged.score <= best.score + margin]
        if any(judged.resident for judged in tied):
            tied = [judged for judged in tied if judged.resident]
        widest = best.score + policy.tie_fixed + policy.tie_per_period
        untried = [
            judged
            for judged in told.standing
            if judged.row.samples == 0 and judged.free and judged.resident and judged.score <= widest
        ]
        tied = untried or tied
        told.tied = [(judged, self.capacity(judged.row) / (1 + judged.wait)) for judged in tied]

    def dominates(self, other: Judged, judged: Judged) -> bool:
        eps = self.policy.pareto_eps
        pairs = list(zip(other.factors, judged.factors, strict=True))
        return (
            all(theirs <= ours + eps for theirs, ours in pairs)
            and any(theirs < ours - eps for theirs, ours in pairs)
            and other.adj <= judged.adj
        )

    def capacity(self, row: Row) -> float:
        full = row.token_s * (1 + row.beta * (row.k - 1))
        return row.k / max(1e-6, self.need.prompt * row.prefill_s_per_token + self.need.output * full)


def mean_above_0(mean: float, variance: float) -> float:
    """What of a normal variable is above 0, in the mean."""
    sd = math.sqrt(variance)
    z = mean / sd
    if z < -4:
        return 0.0
    return sd * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) + mean * (1 + math.erf(z / math.sqrt(2))) / 2


def risk(predicted: float, target: float, spread: float) -> float:
    """Chance that ``predicted`` turns out above ``target``; the spread is 0.3 above it."""
    if predicted <= 0:
        return 0.0
    z = math.log(predicted / target) / (spread if predicted <= target else 0.3)
    return 1 / (1 + math.exp(-1.702 * max(-400, min(400, z))))


def drawn(tied: list[tuple[Judged, float]], chance: float) -> Judged:
    """The row on which ``chance`` in 0..1 falls."""
    left = chance * sum(weight for _, weight in tied)
    for judged, weight in tied:
        left -= weight
        if left < 0:
            return judged
    return tied[-1][0]


def tried_instead(told: Outcome, chosen: Judged, lot: float, attempt: int, policy: PlacementPolicy) -> Judged:
    """The row that is tried in place of ``chosen`` if ``lot`` in 0..1 says so and it costs nobody, else ``chosen``."""
    if lot >= policy.explore_share or attempt > 1 or told.degraded or chosen.bonus:
        return chosen
    for judged in sorted(told.main, key=lambda judged: (judged.score, judged.name)):
        if (
            judged is not chosen
            and judged.row.samples < policy.explore_samples
            and (judged.row.samples == 0 or judged.ect <= 1.15 * chosen.ect)
            and judged.resident
            and judged.busy == 0
            and max(judged.slo, chosen.slo) < policy.explore_risk
            and judged.adj <= chosen.adj
            and judged.row.pressure <= min(policy.veto_above, chosen.row.pressure + policy.pareto_eps)
        ):
            return judged
    return chosen


def plainly(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int) -> Outcome:
    return Plain(request, fleet, policy, now).outcome()
