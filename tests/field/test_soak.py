"""Hours in minutes: requests all the time, while nodes restart, engines die and clients leave.

The short form holds the same claims for a few seconds; ``scripts/test field --long -s`` prints the figures of 20 minutes.
"""

import asyncio
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from tests.support.chaos.engine import Engine
from tests.support.chaos.load import Load, Plan
from tests.support.cluster import Cluster, Node, wait_for
from tests.support.field import Endpoint, chat, mesh
from tests.support.ports import HeldPort

NODES = ("alpha", "beta", "gamma")
SLOTS = 16
REST_S = 3.0
"""Between two disturbances; a node that crashes more than three times in ten seconds is shunned for it."""
LIMITS = f"slots = {SLOTS}\nmax_queue = 64\n"


def figures_of(node: Node) -> tuple[int, float]:
    """Open descriptors and resident MiB of its process."""
    assert node.process is not None
    proc = Path(f"/proc/{node.process.pid}")
    told = re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())
    assert told is not None
    return len(list((proc / "fd").iterdir())), int(told[1]) / 1024


@contextlib.asynccontextmanager
async def engines(base: Path) -> AsyncIterator[list[Engine]]:
    made: list[Engine] = []
    held = [HeldPort() for _ in NODES]
    try:
        for name, port in zip(NODES, held, strict=True):
            made.append(Engine(folder=base / f"engine-{name}", port=port.port, slots=SLOTS))
            await made[-1].start()
        yield made
    finally:
        for engine in made:
            await engine.stop()


async def leave_early(node: Node, rng: Random, left: Counter[str]) -> None:
    """Clients that ask for a long answer and go, before its first byte or after some."""
    body = {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": "hello"}]}
    while True:
        stream = rng.random() < 0.5
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with (
                asyncio.timeout(rng.uniform(0.01, 0.6)),
                aiohttp.ClientSession() as session,
                session.post(f"{node.api}/v1/chat/completions", json=body | {"stream": stream}) as reply,
            ):
                await reply.read()
        left["clients"] += 1


async def disturb(cluster: Cluster, machines: list[Engine], rng: Random, done: Counter[str]) -> None:
    """One thing at a time breaks and is whole again before the next one does; requests enter at alpha, which stays."""
    alpha = cluster["alpha"]

    async def all_ready() -> bool:
        members = await alpha.members()
        return all(
            members[name]["routable"] and members[name]["engines"][0]["state"] == "ready" for name in NODES
        )

    while True:
        what = rng.choice(["term", "kill", "engine"])
        if what == "engine":
            engine = rng.choice(machines)
            await engine.stop()
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            await engine.start()
        else:
            node = cluster[rng.choice(NODES[1:])]
            await (node.term() if what == "term" else node.kill())
            await node.start()
        done[what] += 1
        await asyncio.sleep(REST_S)
        await wait_for(all_ready, 30, f"all nodes and engines are ready again after {what}")


async def in_flight(node: Node) -> bool:
    """True if its metrics tell of no request."""
    async with aiohttp.ClientSession() as session, session.get(f"{node.admin}/metrics") as reply:
        told = re.findall(r"^pairmesh_in_flight(?:\{[^}]*\})? (\S+)$", await reply.text(), re.MULTILINE)
    return all(float(value) == 0 for value in told)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(15, id="short"),
        pytest.param(1_200, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1_500)]),
    ],
)
async def test_no_request_is_lost_and_nothing_leaks_whatever_restarts_dies_or_leaves(
    tmp_path: Path, seconds: int
) -> None:
    rng, left, done = Random(1), Counter[str](), Counter[str]()
    async with engines(tmp_path) as machines:
        endpoints: dict[str, Any] = {
            name: [Endpoint(url=engine.url, extra=LIMITS)]
            for name, engine in zip(NODES, machines, strict=True)
        }
        async with mesh(tmp_path, **endpoints) as cluster:
            alpha = cluster["alpha"]
            assert (await chat(alpha, "tiny")).status == 200
            plan = Plan(out=str(tmp_path / "load.jsonl"), url=alpha.api, rps=10, stream_share=0.5)
            load = Load(plan=plan, prefix=())
            await load.start()
            others = [
                asyncio.create_task(leave_early(alpha, rng, left)),
                asyncio.create_task(disturb(cluster, machines, rng, done)),
            ]
            try:
                await asyncio.wait(others, timeout=seconds * 0.3, return_when=asyncio.FIRST_EXCEPTION)
                warm = figures_of(alpha)
                await asyncio.wait(others, timeout=seconds * 0.7, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for task in others:
                    task.cancel()
                ended = await asyncio.gather(*others, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended
            await load.stop()
            for node in cluster.nodes:
                if node.process is not None and node.process.returncode is None:
                    await wait_for(partial(in_flight, node), 20, f"nothing is in flight at {node.name}")
            fds, rss = figures_of(alpha)
    lines = [json.loads(line) for line in Path(plan.out).read_text().splitlines()]
    outcomes = Counter(line["outcome"] for line in lines)
    sys.stdout.write(
        f"\n{len(lines)} requests in {seconds} s: {dict(outcomes)}; {left['clients']} clients left early; {dict(done)}; "
        f"RSS {warm[1]:.1f} -> {rss:.1f} MiB, descriptors {warm[0]} -> {fds}\n"
    )
    assert outcomes["whole"] > seconds
    lost = [line for line in lines if line["first_byte"] is None or line["status"] != 200]
    assert not Counter((line["status"], line["outcome"], line["code"]) for line in lost)
    assert outcomes["cut"] == 0
    assert fds <= warm[0] + 16
    assert rss <= max(warm[1] * 1.1, warm[1] + 8)
