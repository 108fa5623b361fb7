"""Scenarios with a known end: crashes, power, leaves, partitions, clones, old disks, suspends."""

from functools import partial

import pytest

from router_core.mesh.protocol.actions import Alarm
from router_core.mesh.protocol.messages import MessageType
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness
from router_core.record.state import Kind
from router_core.sim.mesh.world import World


def running(seed: int, nodes: int, until_ms: int = 12_000, clones: int = 0) -> World:
    world = World(seed, nodes, clones=clones)
    world.start_all()
    world.run_until(until_ms)
    return world


def states(world: World, subject: int) -> set[Liveness]:
    """How everybody else who runs sees one host."""
    target = world.hosts[subject]
    return {
        host.view[target.id16].state
        for host in world.hosts
        if host.is_running and host.id16 != target.id16 and target.id16 in host.view
    }


def when(world: World, limit_ms: int, seen: set[Liveness], subject: int) -> int:
    """Milliseconds until all see ``subject`` as one of ``seen``; fails after ``limit_ms``."""
    start = world.timeline.now
    while not states(world, subject) <= seen:
        assert world.timeline.now - start <= limit_ms, states(world, subject)
        world.run_until(world.timeline.now + 50)
    return world.timeline.now - start


DOWN = {Liveness.SUSPECT, Liveness.GONE}


@pytest.mark.parametrize("seed", range(5))
def test_a_mesh_agrees_within_three_seconds_of_its_start(seed: int) -> None:
    world = running(seed, 8, 3_500)
    world.watch.settled()


@pytest.mark.parametrize("seed", range(5))
def test_a_crashed_process_is_suspect_everywhere_within_two_seconds_and_gone_in_time(seed: int) -> None:
    world = running(seed, 5)
    world.kill(2)
    when(world, 2_000, DOWN, 2)
    when(world, 22_500, {Liveness.GONE}, 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_host_without_power_is_suspect_everywhere_within_six_seconds(seed: int) -> None:
    world = running(seed, 5)
    world.power_off(2)
    when(world, 6_000, DOWN, 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_leave_is_seen_everywhere_within_two_seconds(seed: int) -> None:
    world = running(seed, 6)
    world.leave(3)
    when(world, 2_000, {Liveness.LEFT}, 3)


@pytest.mark.parametrize("seed", range(3))
def test_a_healed_half_half_partition_converges_without_an_operator(seed: int) -> None:
    world = running(seed, 6)
    ways = [(a, b) for a in range(3) for b in range(3, 6)]
    for a, b in ways:
        world.net.cut(a, b)
        world.net.cut(b, a)
    world.run_until(world.timeline.now + 30_000)
    assert states(world, 0) == {Liveness.FRESH, Liveness.GONE}
    for a, b in ways:
        world.net.heal(a, b)
        world.net.heal(b, a)
    world.run_until(world.timeline.now + 35_000)
    world.watch.settled()


@pytest.mark.parametrize("disk", ["lost", "old"])
def test_views_follow_a_restart_with_a_lost_or_older_disk_within_one_exchange(disk: str) -> None:
    world = running(4, 4)
    host = world.hosts[1]
    older = dict(host.disk)
    for _ in range(3):
        world.kill(1)
        world.run_until(world.timeline.now + 300)
        world.start(1)
        world.run_until(world.timeline.now + 4_000)
    world.kill(1)
    world.watch.disk_is_true[1] = False
    host.disk = {} if disk == "lost" else older
    world.start(1)
    world.run_until(world.timeline.now + 3_000)
    world.watch.settled()
    assert host.mesh is not None
    assert host.mesh.parts.publisher.epoch > 4


@pytest.mark.parametrize("seed", range(3))
def test_a_clone_makes_only_its_own_id_unroutable_and_others_still_join(seed: int) -> None:
    world = World(seed, 5, clones=1)
    for index in (0, 1, 2, 3):
        world.start(index)
    world.run_until(10_000)
    world.kill(0)
    world.hosts[5].disk = dict(world.hosts[0].disk)
    for index in (0, 5):
        world.watch.disk_is_true[index] = False
        world.start(index)
    world.run_until(20_000)
    world.start(4)
    world.run_until(45_000)
    assert any(alarm.code is Alarm.DUPLICATE_IDENTITY for host in world.hosts for alarm in host.alarms)
    for host in world.hosts[1:5]:
        twin = host.view.get(world.hosts[0].id16)
        assert twin is None or twin.state in DOWN or twin.quarantined
        others = [host.view[other.id16] for other in world.hosts[1:5] if other is not host]
        assert all(change.state is Liveness.FRESH and not change.quarantined for change in others)


@pytest.mark.parametrize("ends", ["killed", "stopped"])
@pytest.mark.parametrize("seed", range(6))
def test_a_node_is_routed_again_within_a_minute_after_its_clone_stopped(seed: int, ends: str) -> None:
    world = World(seed, 4, policy=MeshPolicy(), clones=1)
    for index in range(4):
        world.start(index)
    world.run_until(10_000)
    for index in (0, 4):
        world.watch.disk_is_true[index] = False
    world.hosts[4].disk = dict(world.hosts[0].disk)
    world.start(4)
    world.run_until(24_000)
    if ends == "killed":
        world.kill(4)
    else:
        world.leave(4)
    original = world.hosts[0].id16
    assert any(alarm.code is Alarm.DUPLICATE_IDENTITY for host in world.hosts for alarm in host.alarms)
    world.run_until(world.timeline.now + 60_000)
    for host in world.hosts[1:4]:
        seen = host.view[original]
        assert (seen.state, seen.quarantined) == (Liveness.FRESH, False)


def test_a_suspend_of_two_minutes_evicts_nobody_and_ends_in_agreement() -> None:
    world = running(6, 3)
    sleeper = world.hosts[1]
    world.suspend(1, 120_000)
    world.run_until(world.timeline.now + 120_001)
    assert {change.state for change in sleeper.view.values()} == {Liveness.FRESH}
    world.run_until(world.timeline.now + 40_000)
    world.watch.settled()


def test_a_v_held_back_for_thirty_seconds_does_not_keep_a_dead_node_fresh() -> None:
    world = running(7, 4)
    world.net.cut(2, 0)
    world.run_until(world.timeline.now + 100)
    world.kill(2)
    world.timeline.after(30_000, partial(world.net.heal, 2, 0))
    world.run_until(world.timeline.now + 30_500)
    assert world.hosts[0].view[world.hosts[2].id16].state in DOWN


def test_a_quiet_mesh_sends_only_due_v_and_pings() -> None:
    world = running(8, 6)
    sent: dict[int, int] = {}

    def count(data: bytes) -> None:
        sent[data[0]] = sent.get(data[0], 0) + 1

    world.tap = count
    world.run_until(world.timeline.now + 20_000)
    assert set(sent) <= {MessageType.RECS, MessageType.PING, MessageType.PONG}
    due = 6 * 5 * 20
    assert sent[MessageType.RECS] <= due * 3 // 2


def test_a_crash_loop_shows_as_a_conflict_of_that_id_alone() -> None:
    world = running(9, 4)
    for _ in range(6):
        world.kill(1)
        world.run_until(world.timeline.now + 100)
        world.start(1)
        world.run_until(world.timeline.now + 1_000)
    shown = world.hosts[0].view
    assert shown[world.hosts[1].id16].quarantined
    assert not any(shown[world.hosts[other].id16].quarantined for other in (2, 3))


def test_a_node_that_is_restarted_by_hand_time_and_again_is_no_conflict() -> None:
    world = running(9, 4)
    for _ in range(8):
        world.leave(1)
        world.run_until(world.timeline.now + 600)
        world.start(1)
        world.run_until(world.timeline.now + 500)
    world.run_until(world.timeline.now + 4_000)
    for host in (world.hosts[0], world.hosts[2], world.hosts[3]):
        change = host.view[world.hosts[1].id16]
        assert change.state is Liveness.FRESH
        assert not change.quarantined
        assert not host.alarms


def test_one_hung_dial_does_not_change_the_pace_of_others() -> None:
    world = running(10, 4)
    world.power_off(3)
    newest: list[int] = []
    for _ in range(20):
        world.run_until(world.timeline.now + 1_000)
        change = world.hosts[0].view[world.hosts[1].id16]
        newest.append(world.hosts[0].now - change.mono_ms - change.base_ms)
    assert max(newest) <= 1_300
    assert world.hosts[1].mesh is not None
    assert world.hosts[1].mesh.parts.publisher.held(Kind.V) is not None
