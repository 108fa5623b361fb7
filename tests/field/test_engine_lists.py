"""Engines that come, change and list: what a daemon beside them knows of their models, how soon and at what cost."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.builds import PORTS_VARIABLE, entry
from tests.support.cluster import Node, wait_for
from tests.support.field import OpenAiEngine, chat, mesh
from tests.support.ports import HeldPort

SEEN_S = 2.0
SLACK_S = 0.5
"""For the machine and the test's own looks."""
MIB = 1 << 20


async def offered(node: Node, engine: int = 0) -> list[str]:
    """The models an engine of its own offers."""
    engines: list[dict[str, Any]] = (await node.members())[node.name]["engines"]
    return list(engines[engine]["models"]) if len(engines) > engine else []


async def seconds_until(node: Node, models: list[str]) -> float:
    """How long it takes from now until exactly these are offered."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def there() -> bool:
        return await offered(node) == models

    await wait_for(there, 20, f"{node.name} offers {models}")
    return loop.time() - began


async def test_a_change_of_an_engines_models_behind_the_same_url_is_seen_within_two_seconds(
    tmp_path: Path,
) -> None:
    engine = OpenAiEngine(models={"old": 4_096})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url]) as cluster:
        node = cluster["alpha"]
        engine.models = {"new": 8_192, "other": None}
        assert await seconds_until(node, ["new", "other"]) <= SEEN_S + SLACK_S
        assert (await chat(node, "new")).status == 200
        engine.models = {"other": None}
        assert await seconds_until(node, ["other"]) <= SEEN_S + SLACK_S
        assert (await chat(node, "new")).status == 404


async def test_an_engine_that_starts_on_a_usual_port_is_found_within_ten_seconds(tmp_path: Path) -> None:
    held = HeldPort("127.0.0.1")
    node = Node(name="alpha", ip="127.0.0.2", base=tmp_path / "alpha", entry=entry("other-ports"))
    node.more_env = {PORTS_VARIABLE: str(held.port)}
    node.write_settings([])
    settings = node.config / "pairmesh.toml"
    settings.write_text(settings.read_text().replace("autodetect = false", "autodetect = true"))
    await node.start()
    try:
        await asyncio.sleep(0.5)
        async with _listening_at(held, OpenAiEngine(models={"qwen": None})):
            assert await seconds_until(node, ["qwen"]) <= 10
    finally:
        await node.term()


@contextlib.asynccontextmanager
async def _listening_at(held: HeldPort, engine: OpenAiEngine) -> AsyncIterator[None]:
    port = held.port
    held.close()
    async with engine.serving(port=port):
        yield


async def test_a_list_of_a_hundred_thousand_models_costs_little_and_is_told(tmp_path: Path) -> None:
    names = [f"m{n}" for n in range(100_000)]
    listed = json.dumps({"data": [{"id": name} for name in names]}).encode()
    small = OpenAiEngine(models={"other": 4_096})
    long = OpenAiEngine(models={"m0": 4_096})

    async def lists(_request: web.Request) -> web.Response:
        return web.Response(body=listed, content_type="application/json")

    long.look = lists
    async with small.serving() as near, long.serving() as far:
        async with mesh(tmp_path / "small", alpha=[near]) as cluster:
            usual = _rss_mib(cluster["alpha"])
        async with mesh(tmp_path / "long", alpha=[near, far]) as cluster:
            node = cluster["alpha"]
            times = [(await chat(node, "other")).seconds for _ in range(100)]
            assert (await chat(node, "m0")).status == 200
            grown = _rss_mib(node) - usual
            _, told, _ = await node.cli("doctor")
    assert grown < 40
    assert sorted(times)[-1] < 0.5
    assert "engine2 lists 95,904 models more than the 4,096 that are looked at" in told


def _rss_mib(node: Node) -> float:
    assert node.process is not None
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024 / MIB
