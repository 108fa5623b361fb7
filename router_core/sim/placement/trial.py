"""One run of a scenario under one policy and one seed, and what it came to.

Rules: for one seed all policies see the same requests; what is counted leaves the warm-up out; a request without an
answer counts as late as its patience lasts. Refuses to compare runs.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from random import Random
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.request.request import PlacementRequest
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement import arrivals as come
from router_core.sim.placement.arrivals import Arrival, Client, Length
from router_core.sim.placement.baselines.anchors import Clairvoyant, Floor
from router_core.sim.placement.baselines.oracle import Oracle
from router_core.sim.placement.baselines.pair_choice import PairChoice
from router_core.sim.placement.baselines.pair_dispatch import PairDispatch
from router_core.sim.placement.baselines.rules import RoundRobin, Rule, least_count, p2c, p2c_by_capacity
from router_core.sim.placement.engine import GIB, capacity_rps
from router_core.sim.placement.fleet_node import NodeSpec
from router_core.sim.placement.fleet_world import Ask, FleetWorld
from router_core.sim.placement.routed import Routed
from router_core.sim.placement.scenario import Measured, Scenario

_SAMPLE = 400
_TURNS = 8
"""How many requests each slot has at least while an engine's capacity is measured."""


class Supply(Struct, frozen=True, kw_only=True):
    """What requests are made of: sizes by the name of a trace or built-in, clients of a mix; and what was measured."""

    lengths: dict[str, Sequence[Length]]
    clients: Sequence[Client]
    measured: Measured = Measured()


class Dispatch(Protocol):
    """How requests get to engines."""

    def start(self, ask: Ask) -> None: ...


class Result(Struct, frozen=True, kw_only=True):
    """One run in figures: times in seconds, shares in 0..1, ``makespan_s`` from the first arrival to the last end,
    ``offered_rps`` how many requests came a second, ``capacity_rps`` how many of them all engines sustain together."""

    scenario: str
    policy: str
    rho: float
    seed: int
    requests: int
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    total_p50: float
    total_p95: float
    total_p99: float
    slo_misses: float
    failed: int
    cold_loads: int
    loaded_gib: float
    memory: float
    utilisation: float
    away: float
    refusals: int
    retries: int
    makespan_s: float
    offered_rps: float
    capacity_rps: float
    leaks: int


FIGURES: tuple[tuple[str, str], ...] = (
    ("ttft_p50", "s"),
    ("ttft_p95", "s"),
    ("ttft_p99", "s"),
    ("total_p50", "s"),
    ("total_p95", "s"),
    ("total_p99", "s"),
    ("slo_misses", "share"),
    ("failed", "requests"),
    ("cold_loads", "loads"),
    ("loaded_gib", "GiB"),
    ("memory", "share"),
    ("utilisation", "share"),
    ("away", "share"),
    ("refusals", "refusals"),
    ("retries", "retries"),
    ("makespan_s", "s"),
    ("offered_rps", "requests/s"),
    ("capacity_rps", "requests/s"),
)


def _rule(make: Callable[[], Rule]) -> Callable[[FleetWorld, Random], Dispatch]:
    return lambda world, _rng: Routed(world, [make() for _ in world.nodes])


def _without_affinity(
    request: PlacementRequest,
    fleet: Fleet,
    policy: PlacementPolicy,
    now: int,
    rng: Random,
    *,
    called: str | None = None,
) -> Decision:
    return decide(replace(request, pin=None), fleet, policy, now, rng, called=called)


POLICIES: dict[str, Callable[[FleetWorld, Random], Dispatch]] = {
    "balanced": lambda world, _rng: Routed(world, [decide for _ in world.nodes]),
    "no-affinity": lambda world, _rng: Routed(world, [_without_affinity for _ in world.nodes]),
    "pair-1.0": lambda world, rng: PairDispatch(world, rng),
    "pair-1.0-choice": lambda world, rng: PairChoice(world, rng),
    "least-count": _rule(lambda: Rule(least_count)),
    "round-robin": _rule(lambda: Rule(RoundRobin())),
    "p2c": _rule(lambda: Rule(p2c)),
    "p2c-capacity": _rule(lambda: Rule(p2c_by_capacity)),
    "oracle": lambda world, _rng: Oracle(world),
    "clairvoyant": lambda world, _rng: Clairvoyant(world),
    "floor": lambda world, _rng: Floor(world),
}


def play(
    scenario: Scenario,
    policy: str,
    rho: float,
    seed: int,
    supply: Supply,
    placement: PlacementPolicy | None = None,
) -> Result:
    """Run ``scenario`` once; ``placement`` replaces the shipped numbers. Raises LocalMisuse on an unknown policy."""
    if policy not in POLICIES:
        raise LocalMisuse(f"policy {policy!r} is unknown, there are {', '.join(POLICIES)}")
    specs = scenario.specs(supply.measured)
    requests = requests_of(scenario, specs, rho, seed, supply)
    if not requests:
        raise LocalMisuse(f"scenario {scenario.name} came to no request at all, let it have more")
    world = FleetWorld(specs, scenario.wire, seed, policy=placement)
    dispatch = POLICIES[policy](world, Random(seed ^ 0x5EED))
    skipped = _skipped(scenario, len(requests))

    def start(ask: Ask) -> None:
        if ask.number == skipped:
            for index, node in enumerate(world.nodes):
                if node.spec.name in scenario.frozen:
                    world.freeze(index)
        dispatch.start(ask)

    asks = world.run(requests, start)
    capacity_rps = capacity_of(scenario, specs, seed, supply)
    return _result(scenario, policy, rho, seed, world, asks[skipped:], capacity_rps)


def requests_of(
    scenario: Scenario, specs: Sequence[NodeSpec], rho: float, seed: int, supply: Supply
) -> list[Arrival]:
    """The requests of one seed at ``rho`` of the capacity of the fleet."""
    load, rng = scenario.load, Random(seed)
    if load.arrivals == "at_once":
        size = Length(prompt=load.prompt, output=load.output)
        return come.at_once(load.requests, size, scenario.model[0].name, load.before, load.every_s)
    routers = load.routers or (1.0,) * len(specs)
    rate_rps = rho * capacity_of(scenario, specs, seed, supply)
    if not rate_rps:
        return []
    if load.arrivals == "mixed":
        return come.mixed(supply.clients, rate_rps, load.requests, routers, scenario.shares, rng)
    stream = come.poisson if load.arrivals == "poisson" else come.replay
    return list(stream(supply.lengths[load.lengths], rate_rps, load.requests, routers, scenario.shares, rng))


def capacity_of(scenario: Scenario, specs: Sequence[NodeSpec], seed: int, supply: Supply) -> float:
    """Requests/s of the scenario's sizes that all engines sustain together. Raises LocalMisuse on unknown lengths."""
    load = scenario.load
    if load.arrivals == "at_once":
        sizes: Sequence[Length] = [Length(prompt=load.prompt, output=load.output)]
    elif load.arrivals == "mixed":
        routers = load.routers or (1.0,) * len(specs)
        trial = come.mixed(supply.clients, 1.0, load.requests, routers, scenario.shares, Random(seed))
        sizes = [Length(prompt=one.prompt, output=one.output) for one in trial]
    elif load.lengths in supply.lengths:
        sizes = supply.lengths[load.lengths]
    else:
        raise LocalMisuse(f"lengths {load.lengths!r} are unknown, there are {', '.join(supply.lengths)}")
    sample = sizes[:: max(1, len(sizes) // _SAMPLE)]
    return fleet_capacity_rps(scenario, specs, sample) if sample else 0.0


def fleet_capacity_rps(scenario: Scenario, specs: Sequence[NodeSpec], lengths: Sequence[Length]) -> float:
    """Requests per second that all engines sustain together with every model in memory, each model in its share.
    ``lengths`` are not empty."""
    total = 0.0
    for spec in specs:
        owned = {model.name for model in spec.engine.models}
        shares = {name: share for name, share in scenario.shares.items() if name in owned}
        rng, count = Random(len(lengths)), max(len(lengths), _TURNS * spec.engine.slots)
        models = rng.choices(list(shares), weights=list(shares.values()), k=count)
        work = [(model, one.prompt, one.output) for model, one in zip(models, cycle(lengths), strict=False)]
        total += capacity_rps(spec.engine, work)
    return total


def _skipped(scenario: Scenario, count: int) -> int:
    """How many requests are warm-up."""
    if scenario.load.arrivals == "at_once":
        return scenario.load.before
    return min(count - 1, round(scenario.warmup * count))


def _result(
    scenario: Scenario,
    policy: str,
    rho: float,
    seed: int,
    world: FleetWorld,
    measured: Sequence[Ask],
    capacity_rps: float,
) -> Result:
    patience_s = world.policy.interactive.deadline_ms / 1000.0
    ttft = sorted(patience_s if ask.ttft_s is None else ask.ttft_s for ask in measured)
    total = sorted(patience_s if ask.total_s is None else ask.total_s for ask in measured)
    last_s = max(ask.arrival.at_ms / 1000.0 + (ask.total_s or patience_s) for ask in measured)
    makespan_s = last_s - measured[0].arrival.at_ms / 1000.0
    engines = [node.engine for node in world.nodes]
    return Result(
        scenario=scenario.name,
        policy=policy,
        rho=rho,
        seed=seed,
        requests=len(measured),
        ttft_p50=quantile(ttft, 0.50),
        ttft_p95=quantile(ttft, 0.95),
        ttft_p99=quantile(ttft, 0.99),
        total_p50=quantile(total, 0.50),
        total_p95=quantile(total, 0.95),
        total_p99=quantile(total, 0.99),
        slo_misses=sum(missed(ask, world.policy) for ask in measured) / len(measured),
        failed=sum(ask.status != 200 for ask in measured),
        cold_loads=sum(engine.loads for engine in engines),
        loaded_gib=sum(engine.loaded_bytes for engine in engines) / GIB,
        memory=sum(engine.used_bytes for engine in engines)
        / sum(engine.spec.memory_bytes for engine in engines),
        utilisation=sum(engine.busy_ms for engine in engines) / max(1, world.now) / len(engines),
        away=sum(ask.away for ask in measured) / len(measured),
        refusals=sum(ask.refusals for ask in measured),
        retries=sum(ask.retries for ask in measured),
        makespan_s=makespan_s,
        offered_rps=len(measured)
        / max(1e-3, (measured[-1].arrival.at_ms - measured[0].arrival.at_ms) / 1000.0),
        capacity_rps=capacity_rps,
        leaks=world.leaks(),
    )


def missed(ask: Ask, policy: PlacementPolicy) -> bool:
    """True if the answer came late, came too slowly, or not at all, by the targets of the interactive class."""
    targets = policy.interactive
    if ask.ttft_s is None or ask.total_s is None or ask.ttft_s > targets.ttft_s:
        return True
    pace_s = (ask.total_s - ask.ttft_s) / max(1, ask.arrival.output - 1)
    return targets.tpot_s is not None and pace_s > targets.tpot_s


def quantile(ranked: Sequence[float], q: float) -> float:
    """The ``q``-quantile of sorted values (nearest rank)."""
    return ranked[min(len(ranked) - 1, int(q * len(ranked)))]
