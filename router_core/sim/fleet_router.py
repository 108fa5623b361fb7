"""The router of one simulated host: what it heard, folded as the daemon folds it, and what it learned.

Pictures are folded when they are needed, one of each origin at a time, which gives the same fleet as folding each on
arrival. Refuses to choose.
"""

from collections.abc import Mapping
from random import Random
from typing import Protocol

from router_core.ids import Id16, id8_of
from router_core.placement.fleet import Fleet, Live, fold_fleet
from router_core.placement.hold import Hold
from router_core.placement.holding import Holding
from router_core.placement.ledger import Ledger
from router_core.placement.sessions import Sessions
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Member, ViewChange
from router_core.router.breaker import Breakers
from router_core.router.lateness import Lateness
from router_core.sim.fleet_node import SimNode
from router_core.sim.timeline import Timeline
from router_core.view.cluster import NodeView
from router_core.view.fold import empty, fold


class Waiter(Protocol):
    """A request that waits at an endpoint for its first byte."""

    def review(self) -> None:
        """The verdict on a node may have changed."""


class SimRouter:
    """``fleet`` is the newest; ``profiles``, ``ledger``, ``breakers``, ``sessions``, those who wait here
    (``holding``) and at endpoints (``waiting``), and what that tells of these (``lateness``) are this router's alone."""

    def __init__(
        self,
        node: SimNode,
        members: Mapping[Id16, Member],
        policy: PlacementPolicy,
        exchange: ExchangePolicy,
        timeline: Timeline,
        rng: Random,
        inst: int,
    ) -> None:
        self.node = node
        self.policy = policy
        self.rng = rng
        self.profiles = Profiles(ProfilePolicy())
        for key, profile in node.known_profiles():
            self.profiles.restore(key, profile)
        self.breakers = Breakers(exchange)
        self.ledger = Ledger(id8_of(node.member.id16), inst, node.local)
        self.sessions = Sessions()
        self.lateness = Lateness(exchange)
        self.waiting: dict[Waiter, None] = {}
        hold = Hold(policy)
        self.holding = Holding(hold, lambda: timeline.now)
        self._live = Live(
            ledger=self.ledger,
            breakers=self.breakers,
            hold=hold,
            suspects=self.lateness.suspects,
            late=self.lateness.costs,
        )
        self._members = members
        self._heard: list[dict[Id16, ViewChange]] = []
        self._view = empty(node.member.id32, node.member.name)
        self._fleet = fold_fleet(None, self._view, self.profiles, policy, self._live, 0)

    def picture(self, origin: Id16, now: int) -> NodeView | None:
        """What this router knows of a node."""
        self.fleet(now)
        return self._view.nodes.get(origin)

    def heard(self, change: ViewChange) -> None:
        """A picture arrived, perhaps once more."""
        for batch in self._heard:
            known = batch.get(change.origin)
            if known is not None and known.seq >= change.seq:
                return
        if not self._heard or change.origin in self._heard[-1]:
            self._heard.append({})
        self._heard[-1][change.origin] = change
        self.holding.news()

    def fleet(self, now: int) -> Fleet:
        """All that was heard, folded."""
        for batch in self._heard:
            held = self._view.nodes
            newer = [
                change
                for change in batch.values()
                if change.origin not in held or held[change.origin].seq < change.seq
            ]
            if newer:
                self._view = fold(self._view, newer, self._members, now)
                self._fleet = fold_fleet(self._fleet, self._view, self.profiles, self.policy, self._live, now)
        self._heard.clear()
        return self._fleet
