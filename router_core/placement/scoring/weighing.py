"""The rows of one survey, estimated: each is scored, kept in reserve or excluded by what only the moment tells.

Rules: clock, load and the request's earlier attempts filter here, what holds for a whole snapshot in ``sift``; of a
large field those are weighed that could be chosen. Rows are not compared here.
"""

from collections.abc import Iterable
from itertools import groupby, islice
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row, logistic
from router_core.placement.candidates.circuits import Breaking
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.candidates.pace import Pace, excess, pace_of, tpot_s
from router_core.placement.candidates.passed import Exclusion, Sifted
from router_core.placement.filters.eligibility import Need, context_of, matches
from router_core.placement.filters.static import passed
from router_core.placement.reasons import Reason
from router_core.placement.record import Estimate, Factors
from router_core.placement.request.request import Endpoint, NodeRef, Pin, PlacementRequest
from router_core.placement.scoring.estimates import ahead_of, costs_of, estimate, herd_of, reload_s
from router_core.placement.scoring.factors import slo_cost
from router_core.policy.placement import Match, PlacementPolicy
from router_core.view.freshness import is_stale

_HALF_OPEN = 1
_CRAMPED_TIMES = 10.0
"""How many times as dear a row looks, per point of score, whose context is probably too small: enough to rank it behind
rows that are not far slower."""
_EXACT = Match.EXACT
_MATCH = attrgetter("match")


class Scored(Struct, gc=False):
    """One row that could serve. ``reserve`` says why it is used only if nothing else is left. ``busy``: requests there,
    own ones under way to it included; ``free``: one sent now would not queue. ``adj`` is what the bonuses leave of the
    price of an alias and a looser match, ``worst`` the largest factor but ``speed``."""

    row: Row
    key: Endpoint
    est: Estimate
    slo: float
    memory: float
    switch: float
    pressure: float
    worst: float
    age_ms: int
    queued: int
    busy: int
    free: bool
    resident: bool
    hit: int
    reserve: str | None
    score: float
    speed: float = 0.0
    spill: float = 0.0
    adj: float = 0.0
    hint_bonus: float = 0.0
    affinity_bonus: float = 0.0
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


class Weighing(Struct):
    """The estimates of one survey, and the filters that read clock, load and the request's earlier attempts; ``breakers`` is
    None while every one is closed."""

    request: PlacementRequest
    need: Need
    sifted: Sifted
    fleet: Fleet
    policy: PlacementPolicy
    breakers: Breaking | None
    now: int
    scored: list[Scored] = []
    reserves: list[Scored] = []
    excluded: list[Exclusion] = []

    def anew(self) -> "Weighing":
        """Another one of the same request."""
        return replace(self, scored=[], reserves=[], excluded=[])

    def weigh(self, paces: Iterable[Pace]) -> None:
        """Estimate rows and sort them into scored, reserves and excluded."""
        request, need, fleet, policy, now = self.request, self.need, self.fleet, self.policy, self.now
        ledger, pin, prefer = fleet.live.ledger, self._pin(), request.hints.prefer
        local, owed_by, herd = ledger.local, ledger.owed, herd_of(fleet.m_r, policy)
        watched = self.breakers is not None or len(fleet.live.suspects) > 0
        tried, refused = request.tried, request.refused
        repeated = len(tried) > 0 or len(refused) > 0
        left_s, share = (need.until_ms - now) / 1000.0, need.share
        usual_ctx, ctx_need, loading = need.num_ctx is None, need.ctx, ledger.loading
        looser, costs, leaving = self.sifted.looser, self.sifted.costs, fleet.live.leaving
        particular = len(prefer) > 0 or len(looser) > 0 or costs is not None
        doubt, decode_share, wait_by_size = policy.wait_doubt, policy.decode_share, policy.wait_by_size
        whole, scored_rows, late, spare = share == 1.0, self.scored, fleet.live.late, request.spare
        for pace in paces:
            row = pace.row
            key = row.key
            if row.is_self:
                if leaving and (row.endpoint, row.model) in leaving:
                    self._exclude(row, Reason.DRAINING)
                    continue
                age_ms = 0
                busy = local.in_flight(row.endpoint) + row.foreign
                queued, tpot = max(0, busy - row.slots), tpot_s(row, min(busy, row.slots))
                ahead = excess(busy - row.k + 1.0, doubt)
            else:
                age_ms = now - row.taken_ms
                if age_ms < 0:
                    age_ms = 0
                queued, busy, tpot = row.queued, pace.told, pace.tpot_s
                owed = owed_by.get(key)
                if owed is not None:
                    busy += owed.requests
                    ahead = ahead_of(pace, owed.requests * herd, age_ms, policy)
                elif pace.is_free:
                    ahead = pace.ahead
                else:
                    ahead = ahead_of(pace, 0.0, age_ms, policy)
            if busy >= (row.ceiling if whole else share * row.ceiling) or (
                spare and (busy >= row.slots or not row.resident or row.cloud)
            ):
                self._exclude(row, Reason.QUEUE_FULL)
                continue
            hit = 0 if pin is None else _hit(row, pin, need)
            est = estimate(pace, need, ahead, tpot, age_ms, hit, decode_share, wait_by_size)
            if left_s <= 0.0:
                self._exclude(row, Reason.DEADLINE)
                continue
            if repeated and (key in tried or key in refused):
                self._exclude(row, Reason.TRIED if key in tried else Reason.REFUSED)
                continue
            reserve = row.backup
            if (watched or age_ms > row.period_ms) and reserve is None:
                reserve = self._reserve(row, age_ms)
            slo = 1.0 if est.ttft > left_s else slo_cost(row, need, est.ttft, est.sd, tpot)
            worst = pace.worst
            scored = Scored(
                row,
                key,
                est,
                slo,
                row.memory,
                row.switch,
                row.pressure,
                slo if slo > worst else worst,
                age_ms,
                queued,
                busy,
                busy < row.slots,
                row.resident and (usual_ctx or not reload_s(row, need)),
                hit,
                reserve,
                pace.fixed,
            )
            if particular:
                scored.hint_bonus = _preference(row, prefer, policy.hint_bonus)
                if (stand_in := looser.get((key, row.model))) is not None:
                    scored.adj, scored.match = stand_in.cost, stand_in.match
                elif costs is not None:
                    scored.adj = costs[key, row.model]
            if late and key in late:
                scored.adj += late[key]
            if row.ctx is not None and row.ctx < ctx_need:
                scored.adj += _cramped(row, need, self.policy)
            if loading and row.node in loading and not (row.resident or row.loading):
                _squeeze(scored, loading[row.node], self.policy)
            if reserve is None:
                scored_rows.append(scored)
            else:
                self.reserves.append(scored)

    def loosen(self) -> tuple[Row, ...]:
        """Weigh stand-ins level by level; a level stays shut once a stricter row risks its targets by less than the policy
        says. Returns those that only pressure keeps out, and only as long as something better is left."""
        need, looser = self.need, self.sifted.looser
        relaxed = need if need.digest is None else replace(need, digest=None)
        soft: tuple[Row, ...] = ()
        shut = False
        for _, level in groupby(looser.values(), key=_MATCH):
            shut = shut or any(
                scored.slo < self.policy.match_opens_at and not scored.row.cloud for scored in self.scored
            )
            if shut:
                self.excluded += [
                    Exclusion(row=one.row, reason=Reason.MODEL_ABSENT, stand_in=one, detail="better_match")
                    for one in level
                ]
                continue
            through = passed([one.row for one in level], relaxed, self.fleet, self.now, looser)
            self.excluded += through.excluded
            soft += through.soft
            self.weigh([pace_of(row, self.fleet.profiles, self.policy) for row in through.open])
        return soft

    def _pin(self) -> Pin | None:
        """Where the request's session is, unless that was too long ago."""
        pin = self.request.pin
        return pin if pin is not None and self.now - pin.at_ms <= self.policy.affinity_ms else None

    def _exclude(self, row: Row, reason: Reason) -> None:
        stand_in = self.sifted.looser.get((row.key, row.model))
        self.excluded.append(Exclusion(row=row, reason=reason, stand_in=stand_in))

    def weigh_best(self) -> int:
        """Weigh the rows of a large field that would cost least, and those that something else speaks for: a hint, a
        pin, an authority, little pressure, being at hand. Returns how many were not weighed."""
        sifted, policy, request = self.sifted, self.policy, self.request
        rows, paces, places = sifted.passed.open, sifted.paces, sifted.places
        costs = costs_of(paces, self.need, self.now, policy)
        if self.need.ctx > sifted.passed.narrowest:
            for place, row in enumerate(rows):
                if row.ctx is not None and row.ctx < self.need.ctx:
                    costs[place] *= 1.0 + _CRAMPED_TIMES * _cramped(row, self.need, policy)
        herd = herd_of(self.fleet.m_r, policy)
        for endpoint, owed in self.fleet.live.ledger.owed.items():
            for place in places.get(endpoint, ()):
                pace = paces[place]
                age_ms = max(0, self.now - pace.row.taken_ms)
                ahead = ahead_of(pace, owed.requests * herd, age_ms, policy)
                costs[place] += pace.turn_s * (ahead - ahead_of(pace, 0.0, age_ms, policy))
        pin = self._pin()
        named = [pin.endpoint] if pin is not None else []
        if request.advice is not None and request.advice.advice is not None:
            named += request.advice.advice.order
        wanted = {*sifted.always, *(place for endpoint in named for place in places.get(endpoint, ()))}
        if request.hints.prefer:
            refs = request.hints.prefer
            wanted.update(place for place, row in enumerate(rows) if any(matches(ref, row) for ref in refs))
        ranked = iter(sorted(range(len(rows)), key=costs.__getitem__))
        wanted.update(islice(ranked, policy.scored_best))
        self.weigh([paces[place] for place in sorted(wanted)])
        left = [place for place in ranked if place not in wanted]
        while left and len(self.scored) < policy.scored_best:
            more = policy.scored_best - len(self.scored)
            self.weigh([paces[place] for place in left[:more]])
            left = left[more:]
        return len(left)

    def _reserve(self, row: Row, age_ms: int) -> str | None:
        breakers = self.breakers
        if is_stale(age_ms, row.period_ms):
            return "stale"
        if row.key in self.fleet.live.suspects:
            return "stalled"
        if breakers is not None and breakers.state(row.key, self.now) == _HALF_OPEN:
            return "half_open"
        return None


def _hit(row: Row, pin: Pin, need: Need) -> int:
    """How many tokens of the prompt are probably cached there; loading the model anew forgets them."""
    if not row.resident or pin.endpoint != row.key or pin.model != row.model or reload_s(row, need):
        return 0
    return min(need.prompt, pin.tokens)


def _cramped(row: Row, need: Need, policy: PlacementPolicy) -> float:
    """What it costs that the context is probably too small."""
    ctx = context_of(row, need)
    if ctx is None or ctx >= need.ctx:
        return 0.0
    return policy.context_most * min(1.0, need.ctx / max(1, ctx) - 1.0)


def _squeeze(scored: Scored, loading: int, policy: PlacementPolicy) -> None:
    """Take into account what own loads, of which the node has not told yet, probably leave for this one."""
    row = scored.row
    if row.room_bytes is None or not row.need_bytes:
        return
    memory = logistic((row.need_bytes + loading - row.room_bytes) / row.fit_scale)
    if memory > scored.memory:
        scored.score += policy.weights.memory * (memory - scored.memory)
        scored.memory = memory
        scored.worst = max(scored.worst, memory)


def _preference(row: Row, prefer: tuple[NodeRef, ...], bonus: float) -> float:
    for rank, ref in enumerate(prefer):
        if matches(ref, row):
            return bonus / (1.0 + rank)
    return 0.0
