"""Models move to where they are asked for: two real daemons, one engine in router mode that holds one model at a time.

The node with the engine keeps the shipped rules at a pace for tests. No request may load anything (``jit_load`` is off),
so whatever serves was loaded ahead of the request that it serves.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.support import llama
from tests.support.builds import entry
from tests.support.cluster import Cluster, Node, closing, pair, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

IPS = {"alpha": "127.0.0.8", "beta": "127.0.0.9"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    base = tmp_path_factory.mktemp("moving")
    made = Cluster(base=base, nodes=[], engines=[])
    async with closing(made):
        folder = base / "models"
        folder.mkdir()
        for name in ("tiny", "mid"):
            (folder / f"{name}.gguf").symlink_to(models[name])
        engine = llama.LlamaServer(llama.router(folder, models_max=1), base / "engine.log", host=IPS["beta"])
        made.engines.append(engine)
        await asyncio.to_thread(engine.start)
        made.nodes += [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
        alpha, beta = made.nodes
        alpha.write_settings([f"@beta={beta.ip}:{beta.ports['mesh']}"])
        beta.write_settings([f"@alpha={alpha.ip}:{alpha.ports['mesh']}"])
        beta.write_endpoint(engine, jit_load=False, extra="reserve_vram_mib = 0\n")
        (beta.config / "policy.toml").write_text("[realloc]\nenabled = true\n")
        (beta.config / "policy.toml").chmod(0o600)
        beta.entry = entry("quick-residency")
        await asyncio.gather(alpha.start(), beta.start())
        await pair(made.nodes)
        await wait_for(lambda: _sees_models(alpha), 15, "alpha sees beta's models")
        yield made


async def _sees_models(node: Node) -> bool:
    members = await node.members()
    return any(engine["models"] for seen in members.values() for engine in seen["engines"])


async def ask(node: Node, model: str, tokens: int = 2) -> int:
    body = {"model": model, "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        aiohttp.ClientSession(node.api) as session,
        session.post("/v1/chat/completions", json=body) as answer,
    ):
        await answer.read()
        return answer.status


async def served(node: Node, model: str) -> bool:
    return await ask(node, model) == 200


async def held(cluster: Cluster) -> dict[str, str]:
    """What the engine itself says of each model."""
    async with aiohttp.ClientSession(cluster.engines[0].url) as session, session.get("/models") as answer:
        return {item["id"]: item["status"]["value"] for item in (await answer.json())["data"]}


async def test_a_model_comes_into_memory_where_it_is_asked_for_and_makes_way_when_demand_moves(
    cluster: Cluster,
) -> None:
    alpha = cluster["alpha"]
    assert not await served(alpha, "tiny"), "no request loads anything here"
    await wait_for(lambda: served(alpha, "tiny"), 30, "tiny serves")
    assert await held(cluster) == {"tiny": "loaded", "mid": "unloaded"}
    answers = [asyncio.create_task(ask(alpha, "tiny", tokens=600)) for _ in range(4)]
    await wait_for(lambda: served(alpha, "mid"), 60, "mid serves")
    assert await held(cluster) == {"tiny": "unloaded", "mid": "loaded"}
    assert set(await asyncio.gather(*answers)) == {200}, "what ran was not cut"


async def test_where_models_stand_is_told_where_they_move_and_nowhere_else(cluster: Cluster) -> None:
    alpha, beta = cluster["alpha"], cluster["beta"]
    said = (await beta.cli("status"))[1]
    assert "models move by demand: " in said
    assert "/mid: resident" in said
    told = (await beta.get("/v1/status"))["own"]["residency"]
    assert [(held["model"], held["state"]) for held in told["models"]] == [("mid", "resident")]
    assert (await alpha.get("/v1/status"))["own"]["residency"] is None
    assert "models move" not in (await alpha.cli("status"))[1]


async def test_what_was_loaded_is_counted(cluster: Cluster) -> None:
    beta = cluster["beta"]
    async with aiohttp.ClientSession(beta.admin) as session, session.get("/metrics") as answer:
        text = await answer.text()
    assert 'pairmesh_model_loads_total{trigger="preload",result="ok"} 2' in text
    assert "pairmesh_model_load_seconds_count 2" in text
