"""All rows of a model judged for one request: who is out and why, who is in and at what cost. No choice, no chance.

Rules: only rows that offer the model are visited; pressure, stale pictures and open breakers exclude only as long as
something better is left. Refuses to choose.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.eligibility import Need, closed, is_soft, matches, need_of, unfit
from router_core.placement.estimates import estimate, reload_s
from router_core.placement.factors import affinity, pace_risk, slo_cost, speed_cost
from router_core.placement.fleet import Fleet
from router_core.placement.looseness import StandIn, stand_ins
from router_core.placement.offers import RowKey, offer_of, settled
from router_core.placement.reasons import Reason
from router_core.placement.record import Estimate, Factors
from router_core.placement.request import Endpoint, NodeRef, Pin, PlacementRequest
from router_core.placement.rows import Row
from router_core.policy.placement import Match, PlacementPolicy
from router_core.view.freshness import is_stale

_HALF_OPEN = 1
_EXACT = Match.EXACT
NO_FACTORS = Factors(slo=1.0, memory=1.0, switch=1.0, pressure=1.0, speed=1.0)


class Scored(Struct, gc=False, kw_only=True):
    """One row that could serve. ``reserve`` says why it is used only if nothing else is left; ``out`` (set while
    choosing) why it left the choice. ``busy``: requests there, own ones under way to it included; ``free``: one sent now
    would not queue."""

    row: Row
    est: Estimate
    pace: float
    slo: float
    age_ms: int
    queued: int
    busy: int
    free: bool
    resident: bool
    hit: int
    adj: float
    hint_bonus: float = 0.0
    affinity_bonus: float = 0.0
    f: Factors = NO_FACTORS
    score: float = 0.0
    reserve: str | None = None
    out: str | None = None
    match: Match = _EXACT

    @property
    def key(self) -> Endpoint:
        return self.row.key

    @property
    def model(self) -> str:
        return self.row.model

    @property
    def fill(self) -> float:
        return self.busy / self.row.k

    @property
    def period_ms(self) -> int:
        return self.row.period_ms


class Exclusion(Struct, frozen=True, gc=False, kw_only=True):
    """One row that is out. ``stand_in`` is set if it is of another model than the one asked for."""

    row: Row
    reason: Reason
    stand_in: StandIn | None = None
    detail: str | None = None


class Survey(Struct, frozen=True, kw_only=True):
    """What is known before choosing. ``scored`` are in the running, ``reserves`` back them up; ``offered`` if the
    model asked for is, ``invalid`` if it is no name at all."""

    resolved: str
    need: Need
    rows: tuple[Row, ...]
    scored: list[Scored]
    reserves: list[Scored]
    excluded: list[Exclusion]
    counts: dict[Reason, int]
    max_age_ms: int
    degraded: tuple[str, ...]
    offered: bool = True
    invalid: bool = False


def survey(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int) -> Survey:
    """Filters, estimates and factors of every row that offers the model. Reads ``fleet.live``, changes nothing."""
    offer = offer_of(request.model, fleet, policy)
    rows = offer.rows if offer is not None else ()
    group = rows[0].profile_key.model if rows else request.model
    profiles = fleet.profiles
    need = need_of(
        request,
        profiles.bytes_per_token(group),
        profiles.output_tokens(group, request.hints.request_class.value),
        policy,
    )
    degraded: list[str] = []
    costs: Mapping[RowKey, float] | None = None
    looser: Mapping[RowKey, StandIn] = {}
    if offer is not None:
        meant = settled(offer, need, fleet, now)
        need, rows, costs = meant.need, meant.rows, meant.costs
        if meant.conflict:
            degraded.append("digest_conflict")
        if need.match is not _EXACT:
            looser = stand_ins(meant.senses, need, fleet, policy)
    judged = _Judged(request, need, fleet, policy, costs, now)
    offered = len(rows) > 0
    if looser:
        rows = tuple([row for row in rows if (row.key, row.model) not in looser])
    for row in rows:
        judged.judge(row)
    if looser:
        judged.loosen(looser.values(), policy.match_opens_at)
        rows += tuple([stand_in.row for stand_in in looser.values()])
    if not judged.scored and judged.pressed:
        judged.forgive(policy.pareto_eps)
        degraded.append("pressure")
    reserves = judged.reserves
    if not judged.scored and reserves:
        judged.scored, reserves = reserves, []
        degraded.append("stale_view")
    if not judged.scored and judged.probe():
        degraded.append("probe")
    _score(judged.scored, reserves, need.prompt, policy)
    return Survey(
        resolved=offer.resolved if offer is not None else request.model,
        need=need,
        rows=rows,
        scored=judged.scored,
        reserves=reserves,
        excluded=judged.excluded,
        counts=judged.counts,
        max_age_ms=judged.max_age_ms,
        degraded=tuple(degraded),
        offered=offered,
        invalid=offer is None,
    )


class _Judged:
    """Rows of one survey, sorted as they are judged."""

    __slots__ = (
        "_breakers",
        "_costs",
        "_fleet",
        "_hint_bonus",
        "_loading",
        "_local",
        "_need",
        "_now",
        "_owed",
        "_pin",
        "_prefer",
        "_relaxed",
        "_repeated",
        "_watched",
        "counts",
        "excluded",
        "max_age_ms",
        "pressed",
        "reserves",
        "scored",
    )

    def __init__(
        self,
        request: PlacementRequest,
        need: Need,
        fleet: Fleet,
        policy: PlacementPolicy,
        costs: Mapping[RowKey, float] | None,
        now: int,
    ) -> None:
        self.scored: list[Scored] = []
        self.pressed: list[Scored] = []
        self.reserves: list[Scored] = []
        self.excluded: list[Exclusion] = []
        self.counts: dict[Reason, int] = {}
        self.max_age_ms = 0
        self._need = need
        self._relaxed = need if need.digest is None else replace(need, digest=None)
        self._fleet = fleet
        ledger = fleet.live.ledger
        self._local, self._owed, self._loading = ledger.local, ledger.owed, ledger.loading
        self._breakers = fleet.breakers
        self._watched = self._breakers is not None or len(fleet.live.suspects) > 0
        self._repeated = len(need.tried) > 0 or len(need.refused) > 0
        self._costs = costs
        self._now = now
        self._prefer = request.hints.prefer
        self._hint_bonus = policy.hint_bonus
        pin = request.pin
        self._pin = pin if pin is not None and now - pin.at_ms <= policy.affinity_ms else None

    def judge(self, row: Row, stand_in: StandIn | None = None) -> None:
        """Filter and estimate one row; ``stand_in`` if it is of another model than the one asked for."""
        need, now = self._need if stand_in is None else self._relaxed, self._now
        reason = closed(row, need, self._breakers, now) or unfit(row, need, self._loading)
        pressed = reason is Reason.PRESSURE and is_soft(row)
        if reason is not None and not pressed:
            self._exclude(row, reason, stand_in)
            return
        if row.is_self:
            if (row.endpoint, row.model) in self._fleet.live.leaving:
                self._exclude(row, Reason.DRAINING, stand_in)
                return
            age_ms, owed_s = 0, 0.0
            busy = self._local.in_flight(row.endpoint) + row.foreign
            in_flight, queued = min(busy, row.slots), max(0, busy - row.slots)
            work_s = self._local.work_s(row.endpoint, row.slots, now, row.foreign)
        else:
            age_ms, owed_s = now - row.taken_ms, 0.0
            if age_ms < 0:
                age_ms = 0
            if age_ms > self.max_age_ms:
                self.max_age_ms = age_ms
            in_flight, queued, work_s = row.in_flight, row.queued, row.work_s
            busy = in_flight + queued
            owed = self._owed.get(row.key)
            if owed is not None:
                busy += owed.requests
                owed_s = owed.work_s * self._fleet.m_r
        if busy >= row.ceiling:
            self._exclude(row, Reason.QUEUE_FULL, stand_in)
            return
        hit = 0 if self._pin is None else _hit(row, self._pin, need.prompt)
        est = estimate(row, need, work_s, in_flight, age_ms, owed_s, hit)
        if now + 1000.0 * est.ttft > need.until_ms:
            guessed_s = owed_s * (1.0 - 1.0 / self._fleet.m_r) / row.k
            if now + 1000.0 * (est.ttft - guessed_s) > need.until_ms:
                self._exclude(row, Reason.DEADLINE, stand_in)
                return
        if self._repeated and (row.key in need.tried or row.key in need.refused):
            self._exclude(row, Reason.TRIED if row.key in need.tried else Reason.REFUSED, stand_in)
            return
        reserve = row.backup
        if reserve is None and (self._watched or age_ms > row.period_ms):
            reserve = self._reserve(row, age_ms)
        pace = pace_risk(row, need, est.tpot)
        scored = Scored(
            row=row,
            est=est,
            pace=pace,
            slo=slo_cost(row, need, est.ttft, est.sd, pace),
            age_ms=age_ms,
            queued=queued,
            busy=busy,
            free=busy < row.slots,
            resident=row.resident and (need.num_ctx is None or not reload_s(row, need)),
            hit=hit,
            adj=0.0,
            hint_bonus=_preference(row, self._prefer, self._hint_bonus) if self._prefer else 0.0,
            reserve=reserve,
        )
        if stand_in is not None:
            scored.adj, scored.match = stand_in.cost, stand_in.match
        elif self._costs is not None:
            scored.adj = self._costs[row.key, row.model]
        if pressed:
            self._exclude(row, Reason.PRESSURE, stand_in)
            if reserve is None:
                self.pressed.append(scored)
        elif reserve is not None:
            self.reserves.append(scored)
        else:
            self.scored.append(scored)

    def loosen(self, looser: Iterable[StandIn], enough: float) -> None:
        """Judge stand-ins level by level; a level stays shut once a stricter row risks its targets by less than
        ``enough``."""
        match, shut = _EXACT, False
        for stand_in in looser:
            if stand_in.match is not match:
                match = stand_in.match
                shut = shut or any(scored.slo < enough for scored in self.scored)
            if shut:
                self._exclude(stand_in.row, Reason.MODEL_ABSENT, stand_in, "better_match")
            else:
                self.judge(stand_in.row, stand_in)

    def probe(self) -> bool:
        """If open breakers are all that is in the way, take the least recently failed row back in, one at a time."""
        breakers, self._breakers = self._breakers, None
        opened = [gone for gone in self.excluded if gone.reason is Reason.BREAKER_OPEN]
        if (
            breakers is None
            or not opened
            or any(reason.order > Reason.BREAKER_OPEN.order for reason in self.counts)
            or any(self._fleet.live.ledger.holds(gone.row.key) for gone in opened)
        ):
            return False
        for gone in sorted(
            opened, key=lambda gone: (breakers.last_fault_ms(gone.row.key) or 0, gone.row.key)
        ):
            row, known = gone.row, len(self.excluded)
            self.judge(row, gone.stand_in)
            if len(self.excluded) == known:
                self.scored, self.reserves = self.scored or self.reserves, []
                self._readmit({(row.key, row.model)}, Reason.BREAKER_OPEN)
                return True
            self._uncount(self.excluded.pop().reason, 1)
        return False

    def forgive(self, eps: float) -> None:
        """Take the least pressed rows back in: the least one and those within ``eps`` of it."""
        least = min(scored.row.pressure for scored in self.pressed)
        self.scored = [scored for scored in self.pressed if scored.row.pressure <= least + eps]
        self._readmit({(scored.row.key, scored.row.model) for scored in self.scored}, Reason.PRESSURE)

    def _readmit(self, back: set[tuple[Endpoint, str]], reason: Reason) -> None:
        self.excluded = [gone for gone in self.excluded if (gone.row.key, gone.row.model) not in back]
        self._uncount(reason, len(back))

    def _uncount(self, reason: Reason, by: int) -> None:
        left = self.counts[reason] - by
        if left:
            self.counts[reason] = left
        else:
            del self.counts[reason]

    def _exclude(self, row: Row, reason: Reason, stand_in: StandIn | None, detail: str | None = None) -> None:
        self.excluded.append(Exclusion(row=row, reason=reason, stand_in=stand_in, detail=detail))
        self.counts[reason] = self.counts.get(reason, 0) + 1

    def _reserve(self, row: Row, age_ms: int) -> str | None:
        if is_stale(age_ms, row.period_ms):
            return "stale"
        if row.key in self._fleet.live.suspects:
            return "stalled"
        if self._breakers is not None and self._breakers.state(row.key, self._now) == _HALF_OPEN:
            return "half_open"
        return None


def _hit(row: Row, pin: Pin, prompt: int) -> int:
    if not row.resident or pin.endpoint != row.key or pin.model != row.model:
        return 0
    return min(prompt, pin.tokens)


def _preference(row: Row, prefer: tuple[NodeRef, ...], bonus: float) -> float:
    for rank, ref in enumerate(prefer):
        if matches(ref, row):
            return bonus / (1.0 + rank)
    return 0.0


def _score(main: list[Scored], reserves: list[Scored], prompt: int, policy: PlacementPolicy) -> None:
    if not main:
        return
    weights = policy.weights
    w_slo, w_memory, w_switch = weights.slo, weights.memory, weights.switch
    w_pressure, w_speed = weights.pressure, weights.speed
    least = min([scored.est.ect for scored in main])
    hits = any(scored.hit for scored in main)
    mean_queued = sum([scored.queued for scored in main]) / len(main) if hits else 0.0
    for scored in (*main, *reserves):
        row = scored.row
        speed = speed_cost(scored.est.ect, least)
        scored.f = Factors(
            slo=scored.slo, memory=row.memory, switch=row.switch, pressure=row.pressure, speed=speed
        )
        if scored.hit:
            scored.affinity_bonus = affinity(
                scored.hit, prompt, scored.queued, mean_queued, policy.affinity_bonus
            )
        scored.adj -= scored.hint_bonus + scored.affinity_bonus
        scored.score = (
            w_slo * scored.slo
            + w_memory * row.memory
            + w_switch * row.switch
            + w_pressure * row.pressure
            + w_speed * speed
            + scored.adj
        )
