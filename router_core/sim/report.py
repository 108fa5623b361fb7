"""Seeded runs and the figures they give: what a cluster of N does to a wire, and how old its records are."""

from collections.abc import Iterable
from random import Random
from typing import Final

from msgspec import Struct

from router_core.ids import Id16
from router_core.mesh.machine import Mesh
from router_core.sim import faults
from router_core.sim.host import MakeMesh
from router_core.sim.watch import Violation
from router_core.sim.world import World

RUN_MS: Final = 60_000
NODES_LEAST, NODES_MOST = 3, 8


class SeedReport(Struct, frozen=True, kw_only=True):
    """One run. ``violation`` is None if everything held."""

    seed: int
    nodes: int
    faults: tuple[str, ...]
    trace: str
    steps: int
    violation: str | None


class Figures(Struct, frozen=True, kw_only=True):
    """A calm cluster: bytes and records each node sends per second, ages of peers' newest V in milliseconds."""

    nodes: int
    bytes_per_s: int
    formula_bytes_per_s: int
    records_per_s_c: int
    age_p50_ms: int
    age_p99_ms: int
    age_max_ms: int
    crash_suspect_ms: int


def run_seed(seed: int, *, nodes: int | None = None, make_mesh: MakeMesh = Mesh) -> SeedReport:
    """One cluster, one history: start, a random subset of faults, 22 s of peace, agreement."""
    rng = Random(seed)
    count = nodes or rng.randint(NODES_LEAST, NODES_MOST)
    world = World(rng.getrandbits(64), count, make_mesh=make_mesh)
    names = faults.plan(world, rng)
    violation = None
    try:
        world.start_all()
        world.run_until(RUN_MS)
        world.watch.settled()
        check_backoff(world)
    except Violation as broken:
        violation = f"{broken} (at {world.timeline.now} ms)"
    return SeedReport(
        seed=seed,
        nodes=count,
        faults=names,
        trace=world.trace,
        steps=world.watch.checks,
        violation=violation,
    )


def check_backoff(world: World) -> None:
    """No two hosts dial one that is down in step: four equal delays in a row, to 10 ms, are no chance."""
    gaps: dict[tuple[int, Id16], list[int]] = {}
    last: dict[tuple[int, Id16], int] = {}
    for at, host, peer in world.dials:
        key = (host, peer)
        if key in last:
            gaps.setdefault(key, []).append((at - last[key]) // 10)
        last[key] = at
    for (host, peer), mine in gaps.items():
        for (other, its_peer), theirs in gaps.items():
            if other > host and peer == its_peer and _share_run(mine, theirs, 4):
                raise Violation(f"backoff: hosts {host} and {other} dial one peer in step")


def _share_run(mine: list[int], theirs: list[int], length: int) -> bool:
    runs = {tuple(mine[at : at + length]) for at in range(len(mine) - length + 1)}
    return any(tuple(theirs[at : at + length]) in runs for at in range(len(theirs) - length + 1))


def run_seeds(
    seeds: Iterable[int], *, nodes: int | None = None, make_mesh: MakeMesh = Mesh
) -> list[SeedReport]:
    return [run_seed(seed, nodes=nodes, make_mesh=make_mesh) for seed in seeds]
