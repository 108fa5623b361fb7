"""A scheduler that knows everything: every engine's true state and every answer's true length, without delay.

It is greedy on completion: it takes what ends first, so it waits for fast answers, and another policy may well beat its
time to first token. Nobody could build it.
"""

from functools import partial

from router_core.sim.placement.engine import Job
from router_core.sim.placement.fleet_world import Ask, FleetWorld


class Oracle:
    """A dispatch that sends each request where it will be done first. What it has sent counts at once: the way there is
    put on the way back."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world

    def start(self, ask: Ask) -> None:
        """A request has arrived."""
        arrival = ask.arrival
        ends = [
            node.engine.forecast(arrival.model, arrival.prompt, arrival.output).end_ms
            if arrival.model in node.engine.models
            else float("inf")
            for node in self._world.nodes
        ]
        ask.node = ends.index(min(ends))
        job = Job(
            model=arrival.model,
            prompt=arrival.prompt,
            output=arrival.output,
            on_first=partial(self._first, ask),
            on_end=partial(self._ended, ask),
            blocks=arrival.blocks,
        )
        self._world.nodes[ask.node].engine.submit(job)
        ask.cold = job.cold

    def _first(self, ask: Ask) -> None:
        ask.first_ms = self._world.now + self._ways_ms(ask)

    def _ended(self, ask: Ask) -> None:
        self._world.timeline.after(self._ways_ms(ask), partial(self._world.settle, ask, 200))

    def _ways_ms(self, ask: Ask) -> int:
        """Question, leave and body on their way, and the answer on its way back."""
        return 3 * self._world.wire.link_ms if ask.away else 0
