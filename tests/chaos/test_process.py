"""Daemons that are killed at any moment, and daemons that stop without dying."""

import asyncio
import sys
from collections import deque
from functools import partial
from itertools import pairwise
from random import Random

import pytest

from tests.support.chaos import invariants
from tests.support.chaos.frozen import CHATS, freeze_one
from tests.support.chaos.mesh import Mesh, lines_of, meshed
from tests.support.chaos.node import NodeProc
from tests.support.chaos.run import Run
from tests.support.chaos.waiting import hold, until

HOSTS = ("a", "b", "c", "d", "e", "f")
pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(150)]

D_CRASH_S = 1.0
D_JOIN_S = 3.0
D_HEAL_S = 6.0
D_FAILOVER_S = 12.0
KILLS = 50
IN_START = 0.3
"""Share of the kills that come while the daemon starts."""
LIVES, LIVES_S = 3, 15.0
"""More lives than this in 10 s count as one identity in two places; the others hear of a life up to 3 s late."""
STARTING_S = 1.2
DAMAGE = ("corrupt", "quarantined", "unreadable", "start.refused", ".failed", "loop.ended")
"""Words of log lines that a file or a task in ruins would leave."""
SERVING_S = 1.5
AT_ONCE, AT_ONCE_S = 2, 1.2
"""A request is dispatched three times at most, so that who loses three nodes in a row before a first byte is lost by
contract: no more than these are killed within a moment in which a request may lose them all."""


async def test_a_killed_node_is_out_at_once_and_back_soon_after_it_is_ready(whole: Mesh) -> None:
    a, b = whole["a"], whole["b"]
    before = await b.epoch()
    await b.kill()

    async def out() -> bool:
        return "b" not in await a.routes_to()

    await until(out, D_CRASH_S, "b is no candidate")
    await b.start()
    await until(partial(_routes, a, "b"), D_JOIN_S, "b is a candidate again")
    assert await _routes(a, "b")
    assert await b.epoch() > before


async def _routes(node: NodeProc, other: str) -> bool:
    return other in await node.routes_to()


class Spaced:
    """Kills of several nodes, never more than ``AT_ONCE`` within ``AT_ONCE_S``."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last: deque[float] = deque([0.0] * AT_ONCE, maxlen=AT_ONCE)

    async def kill(self, node: NodeProc) -> None:
        loop = asyncio.get_running_loop()
        async with self._turn:
            await hold(max(0.0, self._last[0] + AT_ONCE_S - loop.time()))
            await node.kill()
            self._last.append(loop.time())


async def killed_again_and_again(node: NodeProc, kills: int, rng: Random, spaced: Spaced) -> list[int]:
    """Kill ``node`` at moments that ``rng`` draws, while it serves or starts; its epochs in order."""
    epochs = [await node.epoch()]
    loop = asyncio.get_running_loop()
    starts: deque[float] = deque([loop.time()], maxlen=LIVES)

    async def rested() -> None:
        if len(starts) == LIVES:
            await hold(max(0.0, starts[0] + LIVES_S - loop.time()))
        starts.append(loop.time())

    while kills > 0:
        await hold(rng.uniform(0.0, SERVING_S))
        await spaced.kill(node)
        kills -= 1
        await rested()
        if kills and rng.random() < IN_START:
            starting = asyncio.create_task(node.start())
            await hold(rng.uniform(0.05, STARTING_S))
            await spaced.kill(node)
            kills -= 1
            await asyncio.gather(starting, return_exceptions=True)
            await rested()
        await node.start()
        epochs.append(await node.epoch())
        assert await node.faults() == []
    return epochs


async def test_fifty_kills_at_random_moments_lose_no_request_and_no_file(whole: Mesh, run: Run) -> None:
    victims = [node for name, node in whole.nodes.items() if name != "a"]
    shares = [len(range(at, KILLS, len(victims))) for at in range(len(victims))]
    ids, spaced = {node.name: node.node_id for node in victims}, Spaced()
    async with whole.loaded("a", rps=10.0, stream_share=0.3, tokens=24, seed=run.seed) as load:
        epochs = await asyncio.gather(
            *(
                killed_again_and_again(node, share, Random(f"{run.seed}/{node.name}"), spaced)
                for node, share in zip(victims, shares, strict=True)
            )
        )
    for risen in epochs:
        assert all(earlier < later for earlier, later in pairwise(risen)), risen
    lines = lines_of(load)
    assert len(lines) > KILLS
    lost = [
        (one["outcome"], one.get("code"), one["begun"])
        for one in lines
        if one["outcome"] not in ("whole", "told")
    ]
    told = (await whole["a"].get("/v1/decisions?limit=1000"))["decisions"]
    given_up = [
        {key: record[key] for key in ("reason", "chosen", "excluded", "degraded", "attempts", "outcome")}
        for record in told
        if record["outcome"] is not None and record["outcome"]["status"] >= 500
    ]
    assert lost == [], given_up
    for line in lines:
        if line["outcome"] == "told":
            assert line["stream"], "an answer without a stream is whole or is served elsewhere"
            assert line["events"] > 0, "a stream that had not begun is served elsewhere"
    for node in victims:
        assert (await node.get("/v1/status"))["own"]["id"] == ids[node.name]
        assert [
            line for line in node.log.read_text().splitlines() if any(word in line for word in DAMAGE)
        ] == []


async def test_chats_on_a_node_that_freezes_are_served_by_the_other(run: Run) -> None:
    async with meshed(run.base, "frozen", ("a", "b"), slots=4) as mesh:
        seen = await freeze_one(mesh, at="a", victim="b", tokens=320)
        sys.stdout.write(
            f"\n{CHATS} chats: healthy {seen.healthy_s:.1f} s, one frozen {seen.frozen_s:.1f} s, "
            f"ratio {seen.ratio:.2f}; out of the candidates after {seen.out_s:.1f} s\n"
        )
        for lines in (seen.healthy, seen.frozen):
            assert len(lines) == CHATS
            assert {line["outcome"] for line in lines} == {"whole"}
        moved = [line for line in seen.frozen if len(executed(mesh, line["request"])) > 1]
        assert moved, "some chats were in hand of the frozen node"
        assert {line["node"] for line in moved} == {"@a/fake"}
        marks = len(invariants.parse(mesh["b"].trace.read_text()))
        mesh["b"].resume()
        await mesh.full_view(within_s=D_HEAL_S)
        await mesh.quiet()
        assert await mesh.violations() == []
        woken = invariants.parse(mesh["b"].trace.read_text())[marks:]
        states = {line["state"] for line in woken if line["e"] == "record"}
        assert states <= {"fresh", "late", "unconfirmed"}, "the sleeper demotes nobody for its own sleep"


def executed(mesh: Mesh, request: str) -> list[float]:
    """When engines began a request."""
    return [line["at"] for line in mesh.executions() if line["e"] == "begun" and line["request"] == request]
