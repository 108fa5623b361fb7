"""Forming, cuts and healing: three daemons in namespaces on one bridge."""

import time

import pytest

from tests.support.chaos.mesh import Mesh, lines_of, meshed
from tests.support.chaos.node import NodeProc, pair_by_file
from tests.support.chaos.run import Run
from tests.support.chaos.waiting import hold, until
from tests.support.chaos.watching import watching

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

D_CUT_S = 6.0
D_ONE_WAY_S = 8.0
"""The end that still hears the other waits longest: 3.5 s until its link ends, 3 s without a newer record, a tick, and
the view."""
D_HEAL_S = 6.0
D_LONELY_S = 8.0
"""Links are dead 3.5 s after the cut; a node is isolated 3.5 s after its last link."""
D_JOIN_S = 3.0
WAIT_MOST_S = 6.0
CUT_S = 12.0
RPS = 5.0


def waits(lines: list[dict[str, float]]) -> float:
    """The longest time from sending to the end of an answer."""
    return max(line["ended"] - line["begun"] for line in lines)


async def test_nodes_that_only_share_a_bridge_find_each_other_by_multicast(whole: Mesh) -> None:
    for node in whole.nodes.values():
        assert "peers = []" in (node.config / "pairmesh.toml").read_text()
        assert set(await node.members()) == {"a", "b", "c"}
    lines = await whole.burst("a", 24)
    assert {line["outcome"] for line in lines} == {"whole"}
    assert len({line["node"] for line in lines}) > 1, "work is spread"


async def test_each_side_of_a_partition_serves_what_it_can_and_both_find_back(whole: Mesh) -> None:
    a, b, c = whole["a"], whole["b"], whole["c"]
    async with whole.loaded("a", rps=RPS) as at_a, whole.loaded("b", rps=RPS, seed=2) as at_b:
        whole.lan.part(["a"])
        cut_at = time.monotonic()

        async def parted() -> bool:
            seen = [(await node.sees())["a"] for node in (b, c)]
            return set(seen) == {"suspect"} and await a.routes_to() == {"a"}

        await until(parted, D_CUT_S, "a is suspect to the others, and they to it")
        cut_off = len(lines_of(at_a)), len(lines_of(at_b))
        await until(a.isolated, cut_at + D_LONELY_S - time.monotonic(), "a says that it is isolated")
        await hold(cut_at + CUT_S - time.monotonic())
        during = lines_of(at_a)[cut_off[0] :], lines_of(at_b)[cut_off[1] :]
        whole.lan.heal()
        await whole.full_view(within_s=D_HEAL_S)

        assert not await a.isolated()
    assert during[0]
    assert during[1]
    assert {line["node"] for line in during[0]} <= {"@a/fake"}
    assert {line["node"] for line in during[1]} <= {"@b/fake", "@c/fake"}
    for load in (at_a, at_b):
        assert {line["outcome"] for line in lines_of(load)} == {"whole"}


async def test_a_one_way_cut_parts_its_two_ends_and_nobody_else(whole: Mesh) -> None:
    a, b, c = whole["a"], whole["b"], whole["c"]
    async with whole.loaded("a", rps=RPS) as at_a, whole.loaded("b", rps=RPS, seed=2) as at_b:
        async with watching(a, b, c) as watched:
            whole.lan.cut("a", "b", oneway=True)

            async def parted() -> bool:
                return "b" not in await a.routes_to() and "a" not in await b.routes_to()

            await until(parted, D_ONE_WAY_S, "a and b do not place on each other")
            await hold(CUT_S - D_ONE_WAY_S)
        whole.lan.heal()
        await whole.full_view(within_s=D_HEAL_S)
    for pair in (("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")):
        assert watched.states[pair] == ["fresh"], watched.states
    for load in (at_a, at_b):
        lines = lines_of(load)
        assert {line["outcome"] for line in lines} == {"whole"}
        assert waits(lines) <= WAIT_MOST_S


@pytest.mark.threat("T3")
async def test_multicast_that_ends_later_changes_nothing_and_a_fourth_joins_by_address(whole: Mesh) -> None:
    whole.lan.add("d")
    d = NodeProc.on(whole.lan, "d", whole.base)
    try:
        d.mount()
        d.write_chaos_settings()
        await d.give_engine()
        await d.start()
        await pair_by_file([*whole.nodes.values(), d])
        await whole.full_view()
        await d.term()
        whole.lan.no_multicast()
        async with watching(*whole.nodes.values()) as watched:
            await hold(3.0)
            d.write_chaos_settings(tuple(f"@{name}={whole.lan.ip(name)}" for name in whole.nodes))
            await d.start()

            async def joined() -> bool:
                return {"a", "b", "c", "d"} <= await d.routes_to() and "d" in await whole["c"].routes_to()

            await until(joined, D_JOIN_S, "d and the others see each other")
        for node in whole.nodes.values():
            assert (await node.do("trust-remove", ref="@d"))["code"] == "removed"
    finally:
        await d.end()
    for (_, seen), states in watched.states.items():
        if seen != "d":
            assert set(states) <= {"fresh", "late"}, watched.states


@pytest.mark.threat("T3")
async def test_without_multicast_nodes_form_a_mesh_by_their_settings(run: Run) -> None:
    async with meshed(run.base, "static", ("a", "b", "c"), static=True, multicast=False) as mesh:
        lines = await mesh.burst("b", 12)
        assert {line["outcome"] for line in lines} == {"whole"}
        await mesh.quiet()
        assert await mesh.violations() == []
