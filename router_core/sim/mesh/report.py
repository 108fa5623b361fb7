"""Seeded runs and the figures they give: what a cluster of N does to a wire, and how old its records are."""

from random import Random
from typing import Final

from msgspec import Struct

from router_core.mesh.machine import Mesh
from router_core.mesh.protocol.messages import MessageType
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness
from router_core.sim.mesh import faults
from router_core.sim.mesh.host import MakeMesh
from router_core.sim.mesh.net import FRAME_OVERHEAD
from router_core.sim.mesh.watch import Violation
from router_core.sim.mesh.world import World

RUN_MS: Final = 60_000
WARM_MS: Final = 12_000
SAMPLE_MS: Final = 190
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


def run_seed(
    seed: int, *, nodes: int | None = None, make_mesh: MakeMesh = Mesh, only: tuple[str, ...] = ()
) -> SeedReport:
    """One cluster, one history: start, a random subset of faults (or ``only`` these), 22 s of peace, agreement."""
    rng = Random(seed)
    count = nodes or rng.randint(NODES_LEAST, NODES_MOST)
    world = World(rng.getrandbits(64), count, make_mesh=make_mesh)
    names = faults.plan(world, rng, only)
    violation = None
    try:
        world.start_all()
        world.run_until(RUN_MS)
        world.watch.settled()
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


def measure(nodes: int, seed: int = 1, calm_ms: int = 20_000) -> Figures:
    """Figures of a calm full mesh of ``nodes``, then of one crash in it."""
    world = World(seed, nodes, policy=MeshPolicy())
    world.start_all()
    world.run_until(WARM_MS)
    traffic = _Traffic()
    world.tap = traffic.count
    ages: list[int] = []
    while world.timeline.now < WARM_MS + calm_ms:
        world.run_until(world.timeline.now + SAMPLE_MS)
        ages += _ages(world)
    world.tap = None
    ages.sort()
    seconds = calm_ms // 1_000
    size = traffic.record_bytes // max(1, traffic.records)
    return Figures(
        nodes=nodes,
        bytes_per_s=traffic.wire_bytes // nodes // seconds,
        formula_bytes_per_s=(nodes - 1) * (size + FRAME_OVERHEAD),
        records_per_s_c=100 * traffic.records // nodes // seconds,
        age_p50_ms=ages[len(ages) // 2],
        age_p99_ms=ages[len(ages) * 99 // 100],
        age_max_ms=ages[-1],
        crash_suspect_ms=_crash(world),
    )


class _Traffic:
    """What all hosts write."""

    def __init__(self) -> None:
        self.wire_bytes = self.records = self.record_bytes = 0

    def count(self, data: bytes) -> None:
        self.wire_bytes += len(data) + FRAME_OVERHEAD
        if data[0] == MessageType.RECS:
            self.records += 1
            self.record_bytes += len(data)


def _ages(world: World) -> list[int]:
    return [
        host.now - change.mono_ms - change.base_ms for host in world.hosts for change in host.view.values()
    ]


def _crash(world: World) -> int:
    """Milliseconds from the death of a process to SUSPECT at everybody."""
    dead, began = world.hosts[0], world.timeline.now
    world.kill(0)
    while any(
        host.view[dead.id16].state not in (Liveness.SUSPECT, Liveness.GONE) for host in world.hosts[1:]
    ):
        world.run_until(world.timeline.now + 10)
        if world.timeline.now - began > RUN_MS:
            raise Violation(f"14: a crash is not noticed in {RUN_MS} ms")
    return world.timeline.now - began
