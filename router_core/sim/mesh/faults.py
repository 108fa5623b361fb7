"""What may go wrong in a seeded run: a random subset of faults, all of them over by a known time.

A fault is a function of the world and its rng that plans itself on the timeline. Which ones a seed switches on, when, and whom
they hit, comes from the seed alone.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final

from msgspec.structs import replace

from router_core.ids import mesh8_of
from router_core.mesh.protocol.messages import Heard, Recs, encode
from router_core.record.codec import encode as encode_record
from router_core.record.envelope import read_header
from router_core.record.state import Kind
from router_core.sim.mesh.world import MESH_ID, World

FIRST_MS: Final = 14_000
LAST_MS: Final = 26_000
OVER_MS: Final = 38_000
"""When the last fault ends; a settled mesh is asked for some time after."""

Fault = Callable[[World, Random, int], None]


def plan(world: World, rng: Random, only: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Plan one to four kinds of faults, or ``only`` the named ones; returns their names."""
    names = only or tuple(rng.sample(sorted(FAULTS), rng.randint(1, 4)))
    for name in names:
        FAULTS[name](world, rng, rng.randint(FIRST_MS, LAST_MS))
    return names


def _victim(world: World, rng: Random) -> int:
    return rng.randrange(len(world.hosts))


def _pair(world: World, rng: Random) -> tuple[int, int]:
    a, b = rng.sample(range(len(world.hosts)), 2)
    return a, b


def _down_for(rng: Random, at: int) -> int:
    return min(OVER_MS, at + rng.choice([200, 1_500, 6_000, 12_000]))


def crash(world: World, rng: Random, at: int) -> None:
    """The process dies and comes back with its disk as it was."""
    victim = _victim(world, rng)
    world.timeline.at(at, partial(world.kill, victim))
    world.timeline.at(_down_for(rng, at), partial(world.start, victim))


def crash_loop(world: World, rng: Random, at: int) -> None:
    """Killed again and again, each time soon after a start."""
    victim = _victim(world, rng)
    for _ in range(4):
        world.timeline.at(at, partial(world.kill, victim))
        world.timeline.at(at + 100, partial(world.start, victim))
        at += 100 + rng.randint(1, 4_500)


def disk_lost(world: World, rng: Random, at: int) -> None:
    _restart_with_disk(world, rng, at, lost=True)


def disk_rolled_back(world: World, rng: Random, at: int) -> None:
    _restart_with_disk(world, rng, at, lost=False)


def _restart_with_disk(world: World, rng: Random, at: int, *, lost: bool) -> None:
    victim = _victim(world, rng)
    host = world.hosts[victim]
    older = dict(host.disk)

    def swap() -> None:
        world.kill(victim)
        world.watch.disk_is_true[victim] = False
        host.disk = {} if lost else dict(older)

    if not lost:
        world.timeline.at(at - 5_000, partial(world.kill, victim))
        world.timeline.at(at - 4_000, partial(world.start, victim))
    world.timeline.at(at, swap)
    world.timeline.at(_down_for(rng, at), partial(world.start, victim))


def disk_refuses(world: World, rng: Random, at: int) -> None:
    """The disk is full for a while, over a restart."""
    victim = _victim(world, rng)
    host = world.hosts[victim]
    world.watch.disk_is_true[victim] = False

    def refuse(ok: bool) -> None:
        host.disk_ok = ok

    world.timeline.at(at, partial(refuse, False))
    world.timeline.at(at + 500, partial(world.kill, victim))
    world.timeline.at(at + 700, partial(world.start, victim))
    world.timeline.at(OVER_MS, partial(refuse, True))


def power(world: World, rng: Random, at: int) -> None:
    victim = _victim(world, rng)
    world.timeline.at(at, partial(world.power_off, victim))
    world.timeline.at(_down_for(rng, at), partial(world.power_on, victim))


def leave(world: World, rng: Random, at: int) -> None:
    victim = _victim(world, rng)
    world.timeline.at(at, partial(world.leave, victim))
    world.timeline.at(max(at + 1_000, _down_for(rng, at)), partial(world.start, victim))


def stall(world: World, rng: Random, at: int) -> None:
    world.timeline.at(at, partial(world.stall, _victim(world, rng), rng.choice([400, 2_000, 4_000, 11_000])))


def suspend(world: World, rng: Random, at: int) -> None:
    world.timeline.at(at, partial(world.suspend, _victim(world, rng), rng.choice([1_000, 5_000, 12_000])))


def cut(world: World, rng: Random, at: int) -> None:
    a, b = _pair(world, rng)
    _cut_between(world, [(a, b), (b, a)], at, _down_for(rng, at))


def cut_one_way(world: World, rng: Random, at: int) -> None:
    _cut_between(world, [_pair(world, rng)], at, _down_for(rng, at))


def partition(world: World, rng: Random, at: int) -> None:
    side = rng.sample(range(len(world.hosts)), len(world.hosts) // 2)
    rest = [index for index in range(len(world.hosts)) if index not in side]
    ways = [(a, b) for a in side for b in rest] + [(b, a) for a in side for b in rest]
    _cut_between(world, ways, at, _down_for(rng, at))


def _cut_between(world: World, ways: list[tuple[int, int]], at: int, until: int) -> None:
    for way in ways:
        world.timeline.at(at, partial(world.net.cut, *way))
        world.timeline.at(until, partial(world.net.heal, *way))


def isolate(world: World, rng: Random, at: int) -> None:
    """One host is cut off for so long that the others let it go."""
    alone = _victim(world, rng)
    others = [index for index in range(len(world.hosts)) if index != alone]
    ways = [(alone, other) for other in others] + [(other, alone) for other in others]
    _cut_between(world, ways, min(at, OVER_MS - 23_000), OVER_MS)


def forge(world: World, rng: Random, at: int) -> None:
    """A member shows another one a record of a third that the third never signed."""
    if len(world.hosts) < 3:
        return
    liar, reader, victim = rng.sample(range(len(world.hosts)), 3)

    def lie() -> None:
        item = world.watch.newest.get((world.hosts[victim].id16, Kind.V))
        if item is None:
            return
        header = read_header(item.signed, mesh8_of(MESH_ID))
        forged = encode_record(replace(header, seq=header.seq + 1_000))
        if world.inject(liar, reader, encode(Recs((Heard(0, forged, item.sig),)))):
            world.watch.estranged[frozenset((liar, reader))] = None

    world.timeline.at(at, lie)


def reset(world: World, rng: Random, at: int) -> None:
    world.timeline.at(at, partial(world.reset, *_pair(world, rng)))


def slow(world: World, rng: Random, at: int) -> None:
    """A link of 1 kB/s for a while."""
    way = _pair(world, rng)
    world.timeline.at(at, partial(world.net.shape, *way, 1_000))
    world.timeline.at(min(OVER_MS, at + 8_000), partial(world.net.shape, *way, None))


def replay_dead(world: World, rng: Random, at: int) -> None:
    """A node dies, another restarts without memory, a third shows it what the dead one said last."""
    if len(world.hosts) < 3:
        return
    dead, reader, teller = rng.sample(range(len(world.hosts)), 3)
    keeps_disk = rng.random() < 0.5
    world.timeline.at(at, partial(world.kill, dead))
    world.timeline.at(at + 1_000, partial(world.leave, reader))

    def wipe() -> None:
        if not keeps_disk:
            world.kill(reader)
            world.hosts[reader].disk = {}
            world.watch.disk_is_true[reader] = False

    def tell() -> None:
        for kind in (Kind.S, Kind.V):
            item = world.watch.newest.get((world.hosts[dead].id16, kind))
            if item is not None:
                world.inject(teller, reader, encode(Recs((item,))))

    world.timeline.at(at + 2_000, wipe)
    world.timeline.at(at + 2_100, partial(world.start, reader))
    world.timeline.at(at + 10_500, tell)
    world.timeline.at(max(OVER_MS, at + 12_000), partial(world.start, dead))


FAULTS: Final[dict[str, Fault]] = {
    fault.__name__: fault
    for fault in (
        crash,
        crash_loop,
        disk_lost,
        disk_rolled_back,
        disk_refuses,
        power,
        leave,
        stall,
        suspend,
        cut,
        cut_one_way,
        partition,
        isolate,
        forge,
        reset,
        slow,
        replay_dead,
    )
}
