"""What a host may lose or get wrong without anybody noticing: its newest files, and the time of day."""

import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from tests.support.builds import WALL_VARIABLE, entry
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
HOUR_MS = 3_600_000
YEAR_1971_MS, YEAR_2100_MS = 31_536_000_000, 4_102_444_800_000


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two nodes, not started yet, each with an engine of its own."""

    async def answer(wire: Wire, _: bytes) -> None:
        wire.write(whole(200, b'{"object": "chat.completion", "choices": []}'))

    nodes = [Node(name=name, ip=ip, base=tmp_path / name) for name, ip in IPS.items()]
    made = Cluster(base=tmp_path, nodes=nodes, engines=[])
    engine = ScriptedEngine({"toy": answer})
    async with engine.serving() as url, closing(made):
        for node in nodes:
            (node.config / "endpoints" / "toy.toml").write_text(f'engine = "openai"\nurl = "{url}"\n')
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
        yield made


async def seen(at: Node, other: str) -> dict[str, object]:
    found: dict[str, object] = (await at.members())[other]
    return found


@pytest.mark.threat("T10")
async def test_a_node_whose_state_was_restored_from_a_backup_is_routed_again_without_help(
    cluster: Cluster,
) -> None:
    alpha, beta = cluster.nodes
    for node in cluster.nodes:
        await node.start()
    await pair(cluster.nodes)
    await cluster.full_view()
    await alpha.term()
    backup = alpha.base / "backup"
    shutil.copytree(alpha.state, backup)
    epochs = []
    for _ in range(3):
        await alpha.start()
        await cluster.full_view()
        epochs.append((await seen(beta, "alpha"))["epoch"])
        await alpha.term()
    newest = epochs[-1]
    shutil.rmtree(alpha.state)
    shutil.copytree(backup, alpha.state)
    await alpha.start()
    await cluster.full_view()
    back = await seen(beta, "alpha")
    assert isinstance(newest, int)
    assert isinstance(back["epoch"], int)
    assert back["epoch"] > newest
    assert (await alpha.get("/v1/status"))["own"]["epoch"] == back["epoch"]


@pytest.mark.threat("T24")
async def test_a_wall_clock_that_jumps_moves_nobody_and_loses_nothing(cluster: Cluster) -> None:
    alpha, beta = cluster.nodes
    wall = alpha.base / "wall"

    def set_to(ms: int) -> None:
        written = wall.with_suffix(".new")
        written.write_text(str(ms))
        written.replace(wall)

    set_to(1_800_000_000_000)
    alpha.entry, alpha.more_env = entry("jumping-wall"), {WALL_VARIABLE: str(wall)}
    for node in cluster.nodes:
        await node.start()
    await pair(cluster.nodes)
    await cluster.full_view()

    async def moves(at: Node, other: str, since: int) -> bool:
        """Whether three more records have come, however fresh each found the other."""
        member = await seen(at, other)
        assert member["liveness"] in ("fresh", "late"), member
        age = member["age_ms"]
        assert isinstance(age, int)
        assert 0 <= age < 5_000
        (node,) = [n for n in (await at.get("/v1/view"))["nodes"] if n["name"] == other]
        return bool(node["seq"] >= since + 3)

    for ms in (1_800_000_000_000 - HOUR_MS, YEAR_1971_MS, YEAR_2100_MS):
        set_to(ms)
        for at, other in ((alpha, "beta"), (beta, "alpha")):
            (node,) = [n for n in (await at.get("/v1/view"))["nodes"] if n["name"] == other]
            await wait_for(partial(moves, at, other, node["seq"]), 10, "records")
        async with aiohttp.ClientSession() as session:
            for target in IPS:
                told = {"x-pairmesh-require": f"node=@{target}"}
                body = {"model": "toy", "messages": []}
                async with session.post(f"{alpha.api}/v1/chat/completions", json=body, headers=told) as reply:
                    assert reply.status == 200
        await alpha.term()
        await alpha.start()
        await cluster.full_view()
    lines = [json.loads(line) for line in beta.log.read_text().splitlines()]
    assert not [line for line in lines if line.get("event") in ("mesh.duplicate_identity", "mesh.restarts")]
