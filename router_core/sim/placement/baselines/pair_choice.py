"""``pair-1.0`` in choice mode: its ranking and its pick, behind our filters, admission, exchange and failover.

Shows how much of the difference is the choice alone. Job events and GPU polls travel as in the faithful mode.
"""

from functools import partial
from random import Random

from router_core.placement.candidates.fleet import Fleet
from router_core.placement.scoring.survey import Survey
from router_core.placement.scoring.weighing import Scored
from router_core.sim.placement.baselines.pair import Chosen
from router_core.sim.placement.baselines.pair_dispatch import PairDispatch
from router_core.sim.placement.baselines.rules import Rule
from router_core.sim.placement.fleet_world import Ask, FleetWorld
from router_core.sim.placement.routed import Routed


class PairChoice:
    """A dispatch: our shell, its choice."""

    def __init__(self, world: FleetWorld, rng: Random) -> None:
        self._pair = PairDispatch(world, rng)
        self._world = world
        self._asked: Ask | None = None
        self._held: dict[int, tuple[str, Chosen]] = {}
        rules = [Rule(partial(self._pick, index)) for index in range(len(world.nodes))]
        self._routed = Routed(world, list(rules), on_settled=self._settled, on_choice=self._choosing)

    def start(self, ask: Ask) -> None:
        """A request has arrived."""
        self._routed.start(ask)

    def _choosing(self, ask: Ask) -> None:
        self._asked = ask
        self._release(ask, "queued", None)

    def _pick(self, index: int, rows: list[Scored], _seen: Survey, _fleet: Fleet, _rng: Random) -> Scored:
        hosts = self._pair.hosts
        by_uuid = {hosts[self._world.place[scored.row.key]].uuid: scored for scored in rows}
        chosen = hosts[index].proxy.choose(by_uuid)
        uuid = chosen.order[0]
        assert self._asked is not None
        self._held[self._asked.number] = (uuid, chosen)
        self._pair.tell(index, self._asked.number, "queued", uuid)
        return by_uuid[uuid]

    def _settled(self, ask: Ask) -> None:
        self._release(ask, "completed" if ask.status == 200 else "errored", None)

    def _release(self, ask: Ask, state: str, node: str | None) -> None:
        held = self._held.pop(ask.number, None)
        if held is None:
            return
        self._pair.hosts[ask.arrival.router].proxy.release(held[1])
        self._pair.tell(ask.arrival.router, ask.number, state, node)
