"""Two daemons, two quantisations of the same weights: who serves a request that names one of them."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support.cluster import Cluster, Node, closing, pair
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
QUANTS = {"alpha": "Q4_K_M", "beta": "Q8_0"}
BASE = 'base = "Toy-2B"\nparams_b = 2.0\n'
BODY = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}], "seed": 12345678901234567890}
AT_BETA = {"x-pairmesh-require": "node=@beta"}


class Stage:
    def __init__(self, cluster: Cluster, engines: dict[str, ScriptedEngine], bodies: list[bytes]) -> None:
        self.cluster = cluster
        self.engines = engines
        self.bodies = bodies

    async def ask(self, model: str, headers: dict[str, str]) -> tuple[int, dict[str, str], dict[str, Any]]:
        url = f"{self.cluster['alpha'].api}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"model": model} | BODY, headers=headers) as reply,
        ):
            return reply.status, dict(reply.headers), await reply.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    base = tmp_path_factory.mktemp("looseness")
    bodies: list[bytes] = []

    async def answer(wire: Wire, body: bytes) -> None:
        bodies.append(body)
        wire.write(whole(200, json.dumps({"object": "chat.completion", "choices": []}).encode()))

    engines = {name: ScriptedEngine({f"/srv/{name}.bin": answer}) for name in IPS}
    nodes = [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            url = await stack.enter_async_context(engines[node.name].serving(node.ip))
            write(node, url)
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
        cluster = await stack.enter_async_context(closing(Cluster(base=base, nodes=nodes, engines=[])))
        for node in nodes:
            await node.start()
        await pair(nodes)
        await cluster.full_view()
        yield Stage(cluster, engines, bodies)


def write(node: Node, url: str) -> None:
    quant = QUANTS[node.name]
    (node.config / "endpoints" / "toy.toml").write_text(
        f'engine = "openai"\nurl = "{url}"\n'
        f'[[models]]\nname = "toy:{quant}"\nupstream_name = "/srv/{node.name}.bin"\nquant = "{quant}"\n{BASE}'
    )


async def test_a_quant_twin_serves_where_it_is_allowed_and_every_name_is_told(stage: Stage) -> None:
    status, headers, _ = await stage.ask("toy:Q4_K_M", AT_BETA | {"x-pairmesh-match": "quant"})
    assert status == 200
    assert headers["x-pairmesh-node"] == "@beta/toy"
    assert headers["x-pairmesh-model"] == "toy:Q8_0"
    assert headers["x-pairmesh-match"] == "quant"
    assert stage.engines["beta"].asked[-1] == "/srv/beta.bin"
    record = await stage.cluster["alpha"].get(f"/v1/decisions/{headers['x-pairmesh-decision-id']}")
    assert (record["req"]["model_asked"], record["req"]["match"]) == ("toy:Q4_K_M", "quant")
    (candidate,) = record["candidates"]
    assert (candidate["model"], candidate["level"]) == ("toy:Q8_0", 1)
    _, told, _ = await stage.cluster["alpha"].cli("explain", record["id"])
    assert "as toy:Q8_0: the same weights in another quantisation" in told


async def test_of_the_body_nothing_but_the_name_changes_on_the_way(stage: Stage) -> None:
    await stage.ask("toy:Q4_K_M", AT_BETA | {"x-pairmesh-match": "quant"})
    sent = json.dumps({"model": "toy:Q4_K_M"} | BODY)
    assert stage.bodies[-1].decode() == sent.replace("toy:Q4_K_M", "/srv/beta.bin")


@pytest.mark.parametrize("headers", [{}, {"x-pairmesh-match": "exact"}, {"x-pairmesh-match": "q"}])
async def test_it_does_not_where_nobody_asked_for_it(stage: Stage, headers: dict[str, str]) -> None:
    before = list(stage.engines["beta"].asked)
    status, told, body = await stage.ask("toy:Q4_K_M", AT_BETA | headers)
    assert (status, body["error"]["code"]) == (400, "not_in_subset")
    assert "x-pairmesh-match" not in told
    assert stage.engines["beta"].asked == before


async def test_the_model_itself_serves_as_long_as_it_can(stage: Stage) -> None:
    for model, node in (("toy:Q4_K_M", "@alpha/toy"), ("toy:Q8_0", "@beta/toy")):
        status, headers, _ = await stage.ask(model, {"x-pairmesh-match": "quant"})
        assert (status, headers["x-pairmesh-node"], headers["x-pairmesh-model"]) == (200, node, model)
        assert "x-pairmesh-match" not in headers


async def test_a_required_precision_holds_for_a_twin_too(stage: Stage) -> None:
    loose = {"x-pairmesh-match": "quant"}
    status, _, body = await stage.ask("toy:Q8_0", loose | {"x-pairmesh-require": "node=@alpha, bits>=8"})
    assert (status, body["error"]["code"]) == (400, "capability")
