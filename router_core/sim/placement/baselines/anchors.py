"""Two anchors of placement: what a scheduler that knows everything makes of the same price, and what no scheduler beats.

``Clairvoyant`` sees every engine's true state and every answer's true length without delay, and weighs them as we weigh
estimates: first token first, waiting dearer for larger requests. ``Floor`` lets nobody queue: only in the mean over all
requests no host does more than it can, a bound that no real fleet reaches. Nobody could build either.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import exp

from router_core.sim.placement.engine import EngineSpec, Forecast, Job
from router_core.sim.placement.fleet_world import Ask, FleetWorld

_WAIT_BY_SIZE = 2.0
_DECODE_SHARE = 0.2
_FLOOR_DECODE_SHARE = 0.1
_ROUNDS = 400
_STEP = 2.0
_SAMPLE = 500
_CHEAPEST = 1e-6


class Clairvoyant:
    """A dispatch that sends each request where it costs least by what is true. What it has sent counts at once: the way
    there is put on the way back."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self._usual: list[float] | None = None

    def start(self, ask: Ask) -> None:
        """A request has arrived."""
        arrival, nodes = ask.arrival, self._world.nodes
        if self._usual is None:
            self._usual = [_mean_s(node.engine.spec, self._world.asks) for node in nodes]
        costs = []
        for node, usual_s in zip(nodes, self._usual, strict=True):
            if arrival.model not in node.engine.models:
                costs.append(float("inf"))
                continue
            told = node.engine.forecast(arrival.model, arrival.prompt, arrival.output)
            size = _busy_s(node.engine.spec, arrival.model, arrival.prompt, arrival.output) / usual_s
            costs.append(_cost(told, self._world.now, size))
        ask.node = costs.index(min(costs))
        job = Job(
            model=arrival.model,
            prompt=arrival.prompt,
            output=arrival.output,
            on_first=partial(self._first, ask),
            on_end=partial(self._ended, ask),
            blocks=arrival.blocks,
        )
        nodes[ask.node].engine.submit(job)
        ask.cold = job.cold

    def _first(self, ask: Ask) -> None:
        ask.first_ms = self._world.now + _ways_ms(self._world, ask)

    def _ended(self, ask: Ask) -> None:
        self._world.timeline.after(_ways_ms(self._world, ask), partial(self._world.settle, ask, 200))


def _cost(told: Forecast, now: int, size: float) -> float:
    wait, prefill, decode = told.start_ms - now, told.first_ms - told.start_ms, told.end_ms - told.first_ms
    return prefill + wait * (1.0 + _WAIT_BY_SIZE * size) + _DECODE_SHARE * decode


class Floor:
    """A dispatch without engines: each request takes what it takes alone on the host that a price per host, the same for
    all requests, makes cheapest for it; the prices are such that no host is asked for more than it can do in all."""

    def __init__(self, world: FleetWorld) -> None:
        self._world = world
        self._places: Mapping[int, int] | None = None

    def start(self, ask: Ask) -> None:
        """A request has arrived; at the first one all are placed."""
        world = self._world
        if self._places is None:
            self._places = _fluid([node.engine.spec for node in world.nodes], world.asks)
        arrival = ask.arrival
        ask.node = self._places[ask.number]
        model = world.nodes[ask.node].engine.models[arrival.model]
        first_s = arrival.prompt / model.pp
        end_s = first_s + max(0.0, arrival.output - 1.0) / model.tg
        ways_ms = _ways_ms(world, ask)
        ask.first_ms = world.now + round(1000.0 * first_s) + ways_ms
        world.timeline.after(round(1000.0 * end_s) + ways_ms, partial(world.settle, ask, 200))


def _fluid(specs: Sequence[EngineSpec], asks: Sequence[Ask]) -> Mapping[int, int]:
    """Where each request goes. Prices rise where more is asked than can be done and fall where less is, in smaller and
    smaller steps."""
    span_s = max(1e-3, (asks[-1].arrival.at_ms - asks[0].arrival.at_ms) / 1000.0)
    options = []
    for ask in asks:
        arrival, found = ask.arrival, []
        for place, spec in enumerate(specs):
            model = next((each for each in spec.models if each.name == arrival.model), None)
            if model is not None:
                cost = arrival.prompt / model.pp + _FLOOR_DECODE_SHARE * arrival.output / model.tg
                share = _busy_s(spec, model.name, arrival.prompt, arrival.output) / spec.slots / span_s
                found.append((place, cost, share))
        options.append(found)
    prices = [span_s * _CHEAPEST] * len(specs)
    sample = options[:: max(1, len(options) // _SAMPLE)]
    for turn in range(_ROUNDS):
        used = [0.0] * len(specs)
        for found in sample:
            place, _, share = min(found, key=lambda each: each[1] + prices[each[0]] * each[2])
            used[place] += share * len(options) / len(sample)
        step = _STEP / (1.0 + turn / 4.0)
        prices = [price * exp(step * (min(2.0, use) - 1.0)) for price, use in zip(prices, used, strict=True)]
    return {
        ask.number: min(found, key=lambda each: each[1] + prices[each[0]] * each[2])[0]
        for ask, found in zip(asks, options, strict=True)
    }


def _busy_s(spec: EngineSpec, name: str, prompt: int, output: float) -> float:
    """Seconds that a request keeps one of the places of a full engine."""
    model = next(each for each in spec.models if each.name == name)
    return prompt / model.pp + output * (1.0 + spec.beta * (spec.slots - 1)) / model.tg


def _mean_s(spec: EngineSpec, asks: Sequence[Ask]) -> float:
    """The mean of ``_busy_s`` over those of ``asks`` that the engine could serve."""
    owned = {model.name for model in spec.models}
    found = [
        _busy_s(spec, ask.arrival.model, ask.arrival.prompt, ask.arrival.output)
        for ask in asks
        if ask.arrival.model in owned
    ]
    return sum(found) / len(found) if found else 1.0


def _ways_ms(world: FleetWorld, ask: Ask) -> int:
    """Question, leave and body on their way, and the answer on its way back."""
    return 3 * world.wire.link_ms if ask.away else 0
