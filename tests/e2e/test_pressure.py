"""Somebody else's work on one node's GPU: the node leaves placement, says why, and comes back. Real daemons and
engines; only the driver library of one node is a fake."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support import llama
from tests.support.builds import PROC_VARIABLE, entry
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.fake_nvml import FakeDriver
from tests.support.trees import PSI, plant

pytestmark = pytest.mark.asyncio(loop_scope="module")

IPS = {"alpha": "127.0.0.4", "beta": "127.0.0.5"}
IDLE = "gpu 0 name=Fake_Card util=0 total=24576 used=2048"
GAME = "gpu 0 name=Fake_Card util=95 total=24576 used=2048"
LOST = IDLE + "\nfail nvmlDeviceGetUtilizationRates rc=15\nfail nvmlDeviceGetMemoryInfo_v2 rc=15"
WISH: dict[str, Any] = {"x-pairmesh-prefer": "@beta"}
STALLS = PSI.format(some=0, full="{:012d}")
SHORT_HOLDS = """
[sampling.pressure.memory.full.critical]
hold_out_s = 0
[sampling.pressure.gpu_time.ext.elevated]
enter = 30
hold_in_s = 0
exit = 20
hold_out_s = 0
[sampling.pressure.gpu_time.ext.high]
enter = 60
hold_in_s = 0
exit = 40
hold_out_s = 0
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"), script=IDLE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    models: dict[str, Path], fake: FakeDriver, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    base = tmp_path_factory.mktemp("pressed")
    made = Cluster(base=base, nodes=[], engines=[])
    async with closing(made):
        for name, ip in IPS.items():
            node = Node(name=name, ip=ip, base=base / name)
            engine = llama.LlamaServer(
                llama.single(models["tiny"], alias="tiny"), base / name / "engine.log", host=ip
            )
            made.nodes.append(node)
            made.engines.append(engine)
            await asyncio.to_thread(engine.start)
        beta = made["beta"]
        plant(beta.base / "proc", {"pressure/memory": STALLS.format(0)})
        beta.entry = entry("foreign-proc")
        beta.more_env = fake.environ | {PROC_VARIABLE: str(beta.base / "proc")}
        for node, engine in zip(made.nodes, made.engines, strict=True):
            others = [f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in made.nodes if o is not node]
            node.write_settings(others, SHORT_HOLDS)
            told = (node.config / "pairmesh.toml").read_text()
            (node.config / "pairmesh.toml").write_text(
                told.replace('"memory.full" = "off"\n', "").replace('nvml = "off"', 'nvml = "auto"')
            )
            node.write_endpoint(engine, jit_load=False)
        await asyncio.gather(*(node.start() for node in made.nodes))
        await pair(made.nodes)
        await made.full_view()
        yield made


async def chat(cluster: Cluster, tokens: int = 2, **headers: str) -> tuple[int, str | None, Any]:
    """One chat through alpha: its status, the node that served it, and the decision as alpha explains it."""
    body = {"model": "tiny", "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
        session.post(f"{cluster['alpha'].api}/v1/chat/completions", json=body, headers=headers) as reply,
    ):
        await reply.read()
        decision = reply.headers.get("x-pairmesh-decision-id")
        node = reply.headers.get("x-pairmesh-node")
    return reply.status, node, await cluster["alpha"].get(f"/v1/decisions/{decision}") if decision else None


def excluded(decision: Any, node: str) -> tuple[str, str | None] | None:
    """Why the endpoint of ``node`` was left out, if it was."""
    rows = {decision["names"][row["row"]]: (row["code"], row["detail"]) for row in decision["excluded"]}
    return rows.get(f"@{node}/llama")


async def until_served_by(cluster: Cluster, node: str, beta_out: tuple[str, str] | None) -> None:
    """Chat with a wish for beta until ``node`` serves and beta is left out for that reason."""

    async def tried() -> bool:
        status, name, decision = await chat(cluster, **WISH)
        assert status == 200
        return name == f"@{node}/llama" and excluded(decision, "beta") == beta_out

    await wait_for(tried, 40, f"{node} serves, beta out for {beta_out}", every_s=0.2)


@pytest.mark.scenario("pressure takes a node out and its end brings it back")
async def test_a_node_whose_gpu_others_use_leaves_placement_with_the_reason_and_returns(
    cluster: Cluster, fake: FakeDriver
) -> None:
    await wait_for(lambda: gpu_time(cluster, 0), 30, "beta knows that nobody uses its GPU", every_s=0.2)
    await until_served_by(cluster, "beta", None)
    fake.write(GAME)
    await wait_for(lambda: gpu_time(cluster, 2), 30, "beta sees the game", every_s=0.2)
    await until_served_by(cluster, "alpha", ("pressure", "gpu_time"))
    _, name, decision = await chat(cluster, 2, **{"x-pairmesh-require": "node=@beta"})
    assert (name, decision["degraded"]) == ("@beta/llama", ["pressure"]), (
        "where nothing else is left it serves"
    )
    fake.write(IDLE)
    await until_served_by(cluster, "beta", None)


async def test_a_node_that_stalls_for_memory_takes_nothing_until_it_is_over(cluster: Cluster) -> None:
    await until_served_by(cluster, "beta", None)
    stalling = asyncio.create_task(stall(cluster["beta"]))
    await until_served_by(cluster, "alpha", ("pressure", "memory"))
    status, _, _ = await chat(cluster, 2, **{"x-pairmesh-require": "node=@beta"})
    assert status == 429, "in danger it takes nothing new, whatever is asked"
    stalling.cancel()
    await until_served_by(cluster, "beta", None)


async def test_own_work_alone_never_takes_a_node_out(cluster: Cluster, fake: FakeDriver) -> None:
    fake.write(IDLE)
    await wait_for(lambda: gpu_time(cluster, 0), 30, "nobody uses beta's GPU", every_s=0.2)
    pressed_at = None
    while pressed_at is None or reads_of(fake) < pressed_at + 4:
        _, name, decision = await chat(cluster, tokens=40, **WISH)
        assert (name, excluded(decision, "beta")) == ("@beta/llama", None)
        if pressed_at is None:
            fake.write(GAME)
            pressed_at = reads_of(fake)
    fake.write(IDLE)


async def test_whoever_looks_at_the_metrics_asks_no_driver(cluster: Cluster, fake: FakeDriver) -> None:
    before = reads_of(fake)
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            async with session.get(f"{cluster['beta'].admin}/metrics") as reply:
                assert reply.status == 200
                await reply.read()
    calls = fake.calls()
    assert reads_of(fake) - before < 50, "one read a second, whoever looks"
    assert calls["nvmlInitWithFlags"] == 1


async def test_a_lost_gpu_takes_the_endpoint_out(cluster: Cluster, fake: FakeDriver) -> None:
    fake.write(LOST)
    await until_served_by(cluster, "alpha", ("pressure", "gpu"))
    assert "sampling.gpu_lost" in cluster["beta"].log.read_text()
    status, _, _ = await chat(cluster, 2, **{"x-pairmesh-require": "node=@beta"})
    assert status == 429


async def stall(node: Node) -> None:
    """Let beta stall for memory half of the time, until cancelled."""
    since = asyncio.get_running_loop().time()
    with (node.base / "proc/pressure/memory").open("r+b", buffering=0) as file:
        while True:
            stalled_us = round((asyncio.get_running_loop().time() - since) * 5e5)
            os.pwrite(file.fileno(), STALLS.format(stalled_us).encode(), 0)
            await asyncio.sleep(0.1)


def reads_of(fake: FakeDriver) -> int:
    """How often beta asked how much its GPU is used."""
    return fake.calls().get("nvmlDeviceGetUtilizationRates", 0)


async def gpu_time(cluster: Cluster, level: int) -> bool:
    """Whether beta has its GPU time at ``level``."""
    line = f'pairmesh_pressure_level{{resource="gpu_time",gpu=""}} {level}'
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{cluster['beta'].admin}/metrics") as reply,
    ):
        return line in (await reply.text()).splitlines()
