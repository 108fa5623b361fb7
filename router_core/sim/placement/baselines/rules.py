"""Simple rules behind the same filters, admission and exchange as ours: round robin, least count, two random choices.

Each has the face of ``decide``: it surveys as ours does, picks by its own rule among the rows that survived, and lets
``decide`` book that one row. Two random choices are those of Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing" (2001). Refuses to know the scores.
"""

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.request.request import NodeRef, PlacementRequest
from router_core.placement.scoring.estimates import capacity
from router_core.placement.scoring.survey import Survey, survey
from router_core.placement.scoring.weighing import Scored
from router_core.policy.placement import PlacementPolicy

Pick = Callable[[list[Scored], Survey, Fleet, Random], Scored]


class Rule:
    """A decider that picks by ``pick`` among the rows that passed all filters, sorted by key."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick

    def __call__(
        self,
        request: PlacementRequest,
        fleet: Fleet,
        policy: PlacementPolicy,
        now: int,
        rng: Random,
        *,
        called: str | None = None,
    ) -> Decision:
        seen = survey(request, fleet, policy, now)
        rows = sorted(seen.scored, key=lambda scored: scored.row.key)
        if not rows:
            return decide(request, fleet, policy, now, rng, called=called)
        row = self._pick(rows, seen, fleet, rng).row
        only = NodeRef(text=row.label, node_id=row.node_id, endpoint=row.endpoint)
        hints = replace(request.hints, requires_node=(only,))
        return decide(replace(request, hints=hints), fleet, policy, now, rng, called=called)


class RoundRobin:
    """The next one, per model."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}

    def __call__(self, rows: list[Scored], seen: Survey, fleet: Fleet, rng: Random) -> Scored:
        turn = self._turns.get(seen.resolved, rng.randrange(len(rows)))
        self._turns[seen.resolved] = turn + 1
        return rows[turn % len(rows)]


def least_count(rows: list[Scored], _seen: Survey, fleet: Fleet, rng: Random) -> Scored:
    """The fewest requests: those the picture shows and own ones since; ties at random."""

    def count(scored: Scored) -> int:
        row, ledger = scored.row, fleet.live.ledger
        if row.is_self:
            return ledger.local.in_flight(row.endpoint)
        owed = ledger.owed.get(row.key)
        return row.in_flight + row.queued + (owed.requests if owed is not None else 0)

    least = min(count(scored) for scored in rows)
    return rng.choice([scored for scored in rows if count(scored) == least])


def p2c(rows: list[Scored], _seen: Survey, _fleet: Fleet, rng: Random) -> Scored:
    """Of two at random the one that should be done sooner."""
    return min(rng.sample(rows, k=min(2, len(rows))), key=lambda scored: scored.est.ect)


def p2c_by_capacity(rows: list[Scored], seen: Survey, _fleet: Fleet, rng: Random) -> Scored:
    """As ``p2c``, with chances in proportion to what each row sustains."""
    weights = [capacity(scored.row, seen.need) for scored in rows]
    first, second = rng.choices(rows, weights=weights, k=2)
    return first if first.est.ect <= second.est.ect else second
