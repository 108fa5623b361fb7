"""All rows of a model judged for one request: who is out and why, who is in and at what cost. No choice, no chance.

Rules: only rows that offer the model are visited; pressure, stale pictures and open breakers exclude only as long as
something better is left; of a large field those are scored that could be chosen. Nothing is chosen here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.circuits import Breaking
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.candidates.pace import pace_of
from router_core.placement.candidates.passed import Exclusion, Sifted
from router_core.placement.filters.eligibility import Need, closed, unfit
from router_core.placement.filters.static import sift
from router_core.placement.ledger import Ledger
from router_core.placement.reasons import Reason
from router_core.placement.request.request import PlacementRequest
from router_core.placement.scoring.factors import affinity
from router_core.placement.scoring.spill import price_of, spill_cost, spills
from router_core.placement.scoring.weighing import Scored, Weighing
from router_core.policy.placement import PlacementPolicy

FULL = frozenset({Reason.QUEUE_FULL, Reason.REFUSED})
"""Rows that are worth waiting for: they would serve but for being full, by their record or their own word."""


class Survey(Struct, frozen=True, gc=False, kw_only=True):
    """What is known before choosing. ``scored`` are in the running, ``reserves`` back them up, ``cut`` rows passed the
    filters of the snapshot but were too far behind to be scored; ``offered`` if the model asked for is, ``invalid`` if it is
    no name at all. ``sifted`` is what the snapshot settled. ``spill_on`` tells whether rows outside the mesh were needed
    beside those in it, None if that says nothing about other requests."""

    sifted: Sifted
    resolved: str
    need: Need
    rows: tuple[Row, ...]
    scored: list[Scored]
    reserves: list[Scored]
    excluded: tuple[Exclusion, ...]
    counts: Mapping[Reason, int]
    cut: int
    max_age_ms: int
    degraded: tuple[str, ...]
    spill_on: bool | None = None
    offered: bool = True
    invalid: bool = False


def survey(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int) -> Survey:
    """Filters, estimates and factors of every row that offers the model. Reads ``fleet.live``, changes nothing."""
    breakers = fleet.breakers
    sifted, need = sift(request, fleet, policy, breakers, now)
    soft, excluded = sifted.passed.soft, sifted.passed.excluded
    rows, cut = sifted.rows, 0
    weighing = Weighing(request, need, sifted, fleet, policy, breakers, now)
    if len(sifted.paces) <= policy.scored_all or policy.pack_below or need.may_spill:
        weighing.weigh(sifted.paces)
    else:
        cut = weighing.weigh_best()
    if sifted.looser:
        soft += weighing.loosen()
        looser = sifted.looser
        rows = (
            *[row for row in rows if (row.key, row.model) not in looser],
            *[stand_in.row for stand_in in looser.values()],
        )
    if weighing.excluded:
        excluded += tuple(weighing.excluded)
    scored, reserves = weighing.scored, weighing.reserves
    degraded = ["digest_conflict"] if sifted.conflict else []
    if not scored:
        if soft:
            scored, excluded = _forgiven(soft, excluded, weighing.anew(), policy, spare=not reserves)
        if scored:
            degraded += ["pressure"] if scored[0].reserve is None else ["pressure", "stale_view"]
        elif reserves:
            scored, reserves = reserves, []
            degraded.append("stale_view")
        elif breakers is not None:
            scored, excluded = _probed(need, excluded, weighing, fleet.live.ledger, breakers, policy, now)
            if scored:
                degraded.append("probe")
    spill_on = None
    if need.may_spill:
        is_on = request.hints.request_class in fleet.live.spilling
        scored, needless, spill_on = _parted(scored, is_on, policy)
        excluded += needless
        if request.attempt > 1 or need.narrows or all(row.cloud for row in rows):
            spill_on = None
    if scored:
        score(scored, reserves, request, need, policy)
    first = sifted.passed.excluded
    return Survey(
        sifted=sifted,
        resolved=sifted.resolved if sifted.resolved is not None else request.model,
        need=need,
        rows=rows,
        scored=scored,
        reserves=reserves,
        excluded=excluded,
        counts=sifted.counts if excluded is first else Counter([gone.reason for gone in excluded]),
        cut=cut,
        max_age_ms=max(0, now - sifted.taken_ms) if sifted.taken_ms is not None else 0,
        degraded=tuple(degraded),
        spill_on=spill_on,
        offered=len(sifted.rows) > 0,
        invalid=sifted.resolved is None,
    )


def has_other(request: PlacementRequest, fleet: Fleet, policy: PlacementPolicy, now: int) -> bool:
    """Whether some row could take ``request`` now that is no mere stopgap. Nothing is chosen."""
    return any(each.reserve is None for each in survey(request, fleet, policy, now).scored)


def _forgiven(
    soft: tuple[Row, ...],
    excluded: tuple[Exclusion, ...],
    weighing: Weighing,
    policy: PlacementPolicy,
    *,
    spare: bool,
) -> tuple[list[Scored], tuple[Exclusion, ...]]:
    """The least pressed of the soft rows and those within a hair of it, and the exclusions without them; ``spare``: of
    those that would only back up others if there is no better. Soft rows that fail a later filter are now excluded by
    that."""
    weighing.weigh([pace_of(row, weighing.fleet.profiles, policy) for row in soft])
    found = weighing.scored or (weighing.reserves if spare else [])
    least = min([scored.row.pressure for scored in found], default=0.0)
    back = [scored for scored in found if scored.row.pressure <= least + policy.pareto_eps]
    gone = {id(scored.row) for scored in back} | {id(late.row) for late in weighing.excluded}
    return back, (*[each for each in excluded if id(each.row) not in gone], *weighing.excluded)


def _probed(
    need: Need,
    excluded: tuple[Exclusion, ...],
    weighing: Weighing,
    ledger: Ledger,
    breakers: Breaking,
    policy: PlacementPolicy,
    now: int,
) -> tuple[list[Scored], tuple[Exclusion, ...]]:
    """If nothing is left and nobody is merely full, the least recently failed row behind an open breaker, one request at a
    time; and the exclusions without it."""
    opened = [gone for gone in excluded if gone.reason is Reason.BREAKER_OPEN]
    if any(gone.reason in FULL for gone in excluded) or any(
        breakers.is_on_trial(gone.row.key) for gone in opened
    ):
        return [], excluded
    for gone in sorted(opened, key=lambda gone: (breakers.last_fault_ms(gone.row.key) or 0, gone.row.key)):
        row, wanted = gone.row, need if gone.stand_in is None else replace(need, digest=None)
        if closed(row, wanted, None, now) or unfit(row, wanted, now):
            continue
        trial = weighing.anew()
        trial.weigh([pace_of(row, weighing.fleet.profiles, policy)])
        if found := trial.scored or trial.reserves:
            return found, tuple([each for each in excluded if each is not gone])
    return [], excluded


def _parted(
    scored: list[Scored], is_on: bool, policy: PlacementPolicy
) -> tuple[list[Scored], tuple[Exclusion, ...], bool | None]:
    """The rows that take part: those outside the mesh only if they are needed. Then the ones that are not, and whether
    any is, None if there are none."""
    cloud = [each for each in scored if each.row.cloud]
    if not cloud:
        return scored, (), None
    mesh = [each for each in scored if not each.row.cloud]
    if spills(mesh, cloud, is_on, policy):
        return scored, (), True
    needless = [Exclusion(row=each.row, reason=Reason.LOCALITY, detail="not_needed") for each in cloud]
    return mesh, tuple(needless), False


def score(
    main: list[Scored], reserves: list[Scored], request: PlacementRequest, need: Need, policy: PlacementPolicy
) -> None:
    """Set ``speed``, which is 0 for the row that costs least and goes towards 1 for those that cost far more, the bonuses
    and what leaving the mesh costs, and add them to what pressure, memory and switching cost. Differences that nobody
    notices weigh little however large they are in proportion. ``main`` is not empty."""
    w_slo, w_speed, rough = policy.weights.slo, policy.weights.speed, policy.cost_least_s
    least = min([scored.est.cost for scored in main])
    both = [*main, *reserves] if reserves else main
    if request.pin is not None or request.hints.prefer:
        _favour(main, both, need.prompt, policy)
    for scored in both:
        cost = scored.est.cost
        scored.speed = speed = (cost - least) / (cost + least + rough) if cost > least else 0.0
        scored.score += w_slo * scored.slo + w_speed * speed + scored.adj
    if need.may_spill:
        _charge(both, need, policy)


def _favour(main: list[Scored], both: Iterable[Scored], prompt: int, policy: PlacementPolicy) -> None:
    """Take off what speaks for rows that the request prefers or that hold its session's last turn."""
    mean_queued = sum([scored.queued for scored in main]) / len(main)
    for scored in both:
        if scored.hit:
            scored.affinity_bonus = affinity(
                scored.hit, prompt, scored.queued, mean_queued, policy.affinity_bonus
            )
        scored.adj -= scored.hint_bonus + scored.affinity_bonus


def _charge(scored: Iterable[Scored], need: Need, policy: PlacementPolicy) -> None:
    """Add to scored rows what leaving the mesh costs."""
    for each in scored:
        if each.row.cloud:
            each.spill = spill_cost(price_of(each.row, need), policy)
            each.worst = max(each.worst, each.spill)
            each.score += policy.weights.spill * each.spill
