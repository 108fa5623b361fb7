"""The rows of one survey, estimated: each is scored, kept in reserve or excluded by what only the moment tells.

Rules: clock, load and the request's earlier attempts filter here, what holds for a whole snapshot in ``sift``; of a
large field those are weighed that could be chosen. Refuses to compare rows.
"""

from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.eligibility import Need, matches
from router_core.placement.estimates import completions, estimate, reload_s
from router_core.placement.factors import slo_cost
from router_core.placement.fleet import Fleet
from router_core.placement.reasons import Reason
from router_core.placement.record import Estimate, Factors
from router_core.placement.request import Endpoint, NodeRef, Pin, PlacementRequest
from router_core.placement.rows import Row
from router_core.placement.sift import Exclusion, Sifted, passed
from router_core.policy.placement import Match, PlacementPolicy
from router_core.view.freshness import is_stale

_HALF_OPEN = 1
_EXACT = Match.EXACT
_MATCH = attrgetter("match")


class Scored(Struct, gc=False, kw_only=True):
    """One row that could serve. ``reserve`` says why it is used only if nothing else is left. ``busy``: requests there,
    own ones under way to it included; ``free``: one sent now would not queue. ``adj`` is what the bonuses leave of the
    price of an alias and a looser match."""

    row: Row
    est: Estimate
    slo: float
    age_ms: int
    queued: int
    busy: int
    free: bool
    resident: bool
    hit: int
    reserve: str | None
    adj: float = 0.0
    hint_bonus: float = 0.0
    affinity_bonus: float = 0.0
    memory: float
    switch: float
    pressure: float
    speed: float = 0.0
    spill: float = 0.0
    score: float = 0.0
    match: Match = _EXACT

    @property
    def f(self) -> Factors:
        """The factors together, for those who show them."""
        return Factors(
            slo=self.slo,
            memory=self.memory,
            switch=self.switch,
            pressure=self.pressure,
            speed=self.speed,
            spill=self.spill,
        )

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

    @property
    def samples(self) -> int:
        return self.row.samples


class Weighing:
    """The estimates of one survey, and the filters that read clock, load and the request's earlier attempts."""

    def __init__(
        self,
        request: PlacementRequest,
        need: Need,
        sifted: Sifted,
        fleet: Fleet,
        policy: PlacementPolicy,
        now: int,
    ) -> None:
        self.scored: list[Scored] = []
        self.reserves: list[Scored] = []
        self.excluded: list[Exclusion] = []
        self.max_age_ms = 0
        self._request = request
        self._need = need
        self._sifted = sifted
        self._fleet = fleet
        self._policy = policy
        self._now = now
        pin = request.pin
        self._pin = pin if pin is not None and now - pin.at_ms <= policy.affinity_ms else None

    def anew(self) -> "Weighing":
        """Another one of the same request."""
        return Weighing(self._request, self._need, self._sifted, self._fleet, self._policy, self._now)

    def weigh(self, rows: Iterable[Row]) -> None:
        """Estimate ``rows`` and sort them into scored, reserves and excluded."""
        request, need, fleet, now = self._request, self._need, self._fleet, self._now
        ledger, pin, prefer = fleet.live.ledger, self._pin, request.hints.prefer
        local, owed_by, m_r = ledger.local, ledger.owed, fleet.m_r
        watched = fleet.breakers is not None or len(fleet.live.suspects) > 0
        tried, refused = request.tried, request.refused
        repeated = len(tried) > 0 or len(refused) > 0
        left_s = (need.until_ms - now) / 1000.0
        looser, costs, leaving = self._sifted.looser, self._sifted.costs, fleet.live.leaving
        oldest = self.max_age_ms
        for row in rows:
            owed_s = 0.0
            if row.is_self:
                if leaving and (row.endpoint, row.model) in leaving:
                    self._exclude(row, Reason.DRAINING)
                    continue
                age_ms = 0
                busy = local.in_flight(row.endpoint) + row.foreign
                in_flight, queued = min(busy, row.slots), max(0, busy - row.slots)
                work_s = local.work_s(row.endpoint, row.slots, now, row.foreign)
            else:
                age_ms = now - row.taken_ms
                if age_ms > oldest:
                    oldest = age_ms
                elif age_ms < 0:
                    age_ms = 0
                in_flight, queued, work_s = row.in_flight, row.queued, row.work_s
                busy = in_flight + queued
                owed = owed_by.get(row.key)
                if owed is not None:
                    busy += owed.requests
                    owed_s = owed.work_s * m_r
            if busy >= need.share * row.ceiling:
                self._exclude(row, Reason.QUEUE_FULL)
                continue
            hit = 0 if pin is None else _hit(row, pin, need.prompt)
            est = estimate(row, need, work_s, in_flight, age_ms, owed_s, hit)
            if est.ttft > left_s and est.ttft - owed_s * (1.0 - 1.0 / m_r) / row.k > left_s:
                self._exclude(row, Reason.DEADLINE)
                continue
            if repeated and (row.key in tried or row.key in refused):
                self._exclude(row, Reason.TRIED if row.key in tried else Reason.REFUSED)
                continue
            reserve = row.backup
            if reserve is None and (watched or age_ms > row.period_ms):
                reserve = self._reserve(row, age_ms)
            scored = Scored(
                row=row,
                est=est,
                slo=slo_cost(row, need, est.ttft, est.sd, est.tpot),
                age_ms=age_ms,
                queued=queued,
                busy=busy,
                free=busy < row.slots,
                resident=row.resident and (need.num_ctx is None or not reload_s(row, need)),
                hit=hit,
                reserve=reserve,
                memory=row.memory,
                switch=row.switch,
                pressure=row.pressure,
            )
            if prefer:
                scored.hint_bonus = _preference(row, prefer, self._policy.hint_bonus)
            if looser and (stand_in := looser.get((row.key, row.model))) is not None:
                scored.adj, scored.match = stand_in.cost, stand_in.match
            elif costs is not None:
                scored.adj = costs[row.key, row.model]
            (self.scored if reserve is None else self.reserves).append(scored)
        self.max_age_ms = oldest

    def loosen(self) -> tuple[Row, ...]:
        """Weigh stand-ins level by level; a level stays shut once a stricter row risks its targets by less than the policy
        says. Returns those that only pressure keeps out, and only as long as something better is left."""
        need, looser = self._need, self._sifted.looser
        relaxed = need if need.digest is None else replace(need, digest=None)
        soft: tuple[Row, ...] = ()
        shut = False
        for _, level in groupby(looser.values(), key=_MATCH):
            shut = shut or any(
                scored.slo < self._policy.match_opens_at and not scored.row.cloud for scored in self.scored
            )
            if shut:
                self.excluded += [
                    Exclusion(row=one.row, reason=Reason.MODEL_ABSENT, stand_in=one, detail="better_match")
                    for one in level
                ]
                continue
            through = passed([one.row for one in level], relaxed, self._fleet, self._now, looser)
            self.excluded += through.excluded
            soft += through.soft
            self.weigh(through.open)
        return soft

    def _exclude(self, row: Row, reason: Reason) -> None:
        stand_in = self._sifted.looser.get((row.key, row.model))
        self.excluded.append(Exclusion(row=row, reason=reason, stand_in=stand_in))

    def weigh_best(self) -> int:
        """Weigh the rows of a large field that would be done first, and those that something else speaks for: a hint, a
        pin, an authority, little pressure, being at hand. Returns how many were not weighed."""
        sifted, policy, request = self._sifted, self._policy, self._request
        rows, places = sifted.passed.open, sifted.places
        times = completions(rows, self._need, self._now)
        for endpoint, owed in self._fleet.live.ledger.owed.items():
            for place in places.get(endpoint, ()):
                times[place] += owed.work_s * self._fleet.m_r / rows[place].k
        named = [self._pin.endpoint] if self._pin is not None else []
        if request.advice is not None and request.advice.advice is not None:
            named += request.advice.advice.order
        wanted = {*sifted.always, *(place for endpoint in named for place in places.get(endpoint, ()))}
        if request.hints.prefer:
            refs = request.hints.prefer
            wanted.update(place for place, row in enumerate(rows) if any(matches(ref, row) for ref in refs))
        ranked = iter(sorted(range(len(rows)), key=times.__getitem__))
        wanted.update(islice(ranked, policy.scored_best))
        self.weigh([rows[place] for place in sorted(wanted)])
        left = [place for place in ranked if place not in wanted]
        while left and len(self.scored) < policy.scored_best:
            more = policy.scored_best - len(self.scored)
            self.weigh([rows[place] for place in left[:more]])
            left = left[more:]
        return len(left)

    def _reserve(self, row: Row, age_ms: int) -> str | None:
        fleet = self._fleet
        if is_stale(age_ms, row.period_ms):
            return "stale"
        if row.key in fleet.live.suspects:
            return "stalled"
        if fleet.breakers is not None and fleet.breakers.state(row.key, self._now) == _HALF_OPEN:
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
