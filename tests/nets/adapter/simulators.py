"""Small runs of both simulators, and what they come to."""

from hashlib import sha256
from random import Random
from typing import Any

from router_core.sim.mesh.faults import FAULTS, plan
from router_core.sim.mesh.report import RUN_MS, measure
from router_core.sim.mesh.watch import Violation
from router_core.sim.mesh.world import World
from router_core.sim.placement.trial import POLICIES as TRIED
from router_core.sim.placement.trial import play
from scripts.shared_data import built_in
from scripts.simulate_placement import read_scenario, shipped, sized
from tests.nets.adapter.router import POLICIES
from tests.nets.canonical import plain


def placement_cases() -> list[tuple[str, str]]:
    """Every shipped scenario with our own placement, and one of them with each policy that there is."""
    cases = [(name, "balanced") for name in shipped()]
    cases += [("multi-model", policy) for policy in TRIED if policy != "balanced"]
    return [*cases, ("frozen", "pair-1.0"), ("sessions", "no-affinity")]


def placement_figures(name: str, policy: str, *, seed: int, requests: int) -> dict[str, Any]:
    """One run at the scenario's first load, with the numbers of the vectors."""
    scenario = read_scenario(name)
    if scenario.load.arrivals != "at_once":
        scenario = sized(scenario, requests)
    numbers = POLICIES["balanced"]
    return dict(plain(play(scenario, policy, scenario.load.rhos[0], seed, built_in(), numbers)))


def mesh_faults() -> list[str]:
    return sorted(FAULTS)


def mesh_history(fault: str, *, seed: int, nodes: int) -> dict[str, Any]:
    """One mesh under one kind of fault: the hash over every frame and its time, how all see each other at the end, and
    which rule was broken, if any."""
    dice = Random(f"{fault}/{seed}")
    world = World(dice.getrandbits(64), nodes)
    plan(world, dice, (fault,))
    sent, frames = sha256(), 0

    def tapped(data: bytes) -> None:
        nonlocal frames
        frames += 1
        sent.update(b"%d %d " % (world.timeline.now, len(data)) + data)

    world.tap = tapped
    broken = None
    try:
        world.start_all()
        world.run_until(RUN_MS)
        world.watch.settled()
    except Violation as violation:
        broken = str(violation)
    names = {host.id16: str(host.index) for host in world.hosts}
    seen = {
        str(host.index): {
            names[id16]: {
                "state": plain(change.state),
                "epoch": change.epoch,
                "seq": change.seq,
                "quarantined": change.quarantined,
            }
            for id16, change in host.view.items()
        }
        for host in world.hosts
    }
    return {"frames": frames, "sent": sent.hexdigest(), "seen": seen, "broken": broken}


def mesh_calm(nodes: int) -> dict[str, Any]:
    return dict(plain(measure(nodes, calm_ms=4_000)))
