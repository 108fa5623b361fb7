"""The router of one simulated host: what it heard, folded as the daemon folds it, and what it learned.

Pictures are folded when they are needed, one of each origin at a time, which gives the same fleet as folding each on
arrival. Refuses to choose.
"""

from collections.abc import Mapping
from random import Random
from typing import Protocol

from router_core.ids import Id16
from router_core.placement.candidates.fleet import Fleet
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.profiles import Profiles
from router_core.record.membership import Member, ViewChange
from router_core.router.router import Router
from router_core.sim.placement.fleet_node import SimNode
from router_core.sim.timeline import Timeline
from router_core.view.cluster import NodeView
from router_core.view.fold import empty, fold


class Waiter(Protocol):
    """A request that waits at an endpoint for its first byte."""

    def review(self) -> None:
        """The verdict on a node may have changed."""


class SimRouter:
    """``core`` is the router that ships; ``waiting`` are those who wait at endpoints."""

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
        profiles = Profiles(ProfilePolicy())
        for key, profile in node.known_profiles():
            profiles.restore(key, profile)
        self.waiting: dict[Waiter, None] = {}
        self._timeline = timeline
        self._members = members
        self._heard: list[dict[Id16, ViewChange]] = []
        self._view = empty(node.member.id32, node.member.name)
        self.core = Router(
            self._view,
            rng=rng,
            now=0,
            inst=inst,
            policy=policy,
            exchange=exchange,
            profiles=profiles,
            local=node.local,
        )

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
        self.core.queue.news(self._timeline.now)

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
                self.core.see(self._view, now)
        self._heard.clear()
        return self.core.fleet
