"""Two daemons, one of which may hand requests to a server outside the mesh, over verified TLS, whose API lies below a path
of its own."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support.cluster import Cluster, Node, closing, pair
from tests.support.scripted_engine import ScriptedEngine, Wire, whole
from tests.support.vouched import Vouched

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
BODY = {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
BASE = b"/openai/v1"
AWAY = {"x-pairmesh-locality": "any"}


class Stage:
    def __init__(self, cluster: Cluster, outside: ScriptedEngine) -> None:
        self.cluster = cluster
        self.outside = outside

    async def ask(
        self, model: str, headers: dict[str, str], node: str = "alpha"
    ) -> tuple[int, dict[str, str], dict[str, Any]]:
        url = f"{self.cluster[node].api}/v1/chat/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"model": model} | BODY, headers=headers) as reply,
        ):
            return reply.status, dict(reply.headers), await reply.json()


async def answer(wire: Wire, body: bytes) -> None:
    wire.write(whole(200, json.dumps({"object": "chat.completion", "choices": []}).encode()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    base = tmp_path_factory.mktemp("spill")
    vouched = Vouched(base, "127.0.0.1")
    home, outside = ScriptedEngine({"home": answer}), ScriptedEngine({"big-1": answer, "home": answer}, BASE)
    nodes = [
        Node(name=name, ip=ip, base=base / name, more_env={"SSL_CERT_FILE": str(vouched.file)})
        for name, ip in IPS.items()
    ]
    async with contextlib.AsyncExitStack() as stack:
        at_home = await stack.enter_async_context(home.serving(IPS["alpha"]))
        away = await stack.enter_async_context(outside.serving("127.0.0.1", vouched.server()))
        alpha, beta = nodes
        (alpha.config / "endpoints" / "home.toml").write_text(f'engine = "openai"\nurl = "{at_home}"\n')
        (beta.config / "endpoints" / "out.toml").write_text(
            f'engine = "openai"\nurl = "{away}{BASE.decode()}"\ncloud = true\nslots = 8\nprice_in = 0.5\nprice_out = 2.0\n'
            f'[[models]]\nname = "big"\nupstream_name = "big-1"\n[[models]]\nname = "home"\n'
        )
        (alpha.config / "policy.toml").write_text('[spill]\ncap = "any"\n')
        for node in nodes:
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
        cluster = await stack.enter_async_context(closing(Cluster(base=base, nodes=nodes, engines=[])))
        for node in nodes:
            await node.start()
        await pair(nodes)
        await cluster.full_view()
        yield Stage(cluster, outside)


async def test_a_request_that_may_leaves_the_mesh_through_the_owner_at_a_told_price(stage: Stage) -> None:
    status, headers, _ = await stage.ask("big", AWAY)
    assert (status, headers["x-pairmesh-node"], headers["x-pairmesh-model"]) == (200, "@beta/out", "big")
    assert stage.outside.asked[-1] == "big-1"
    record = await stage.cluster["alpha"].get(f"/v1/decisions/{headers['x-pairmesh-decision-id']}")
    assert record["action"] == "spill"
    (candidate,) = record["candidates"]
    req = record["req"]
    assert candidate["price"] == pytest.approx(
        (0.5 * req["prompt_tokens"] + 2.0 * req["output_tokens"]) / 1e6
    )
    _, told, _ = await stage.cluster["alpha"].cli("explain", record["id"])
    assert "outside the mesh, at a price of about" in told


@pytest.mark.parametrize("headers", [{}, {"x-pairmesh-locality": "mesh"}, {"x-pairmesh-locality": "host"}])
async def test_a_request_that_may_not_stays_and_is_refused(stage: Stage, headers: dict[str, str]) -> None:
    before = list(stage.outside.asked)
    status, _, body = await stage.ask("big", headers)
    assert (status, body["error"]["code"]) == (400, "locality")
    assert stage.outside.asked == before


async def test_where_the_operator_does_not_permit_it_asking_is_in_vain(stage: Stage) -> None:
    status, headers, body = await stage.ask("big", AWAY, node="beta")
    assert (status, body["error"]["code"]) == (400, "locality")
    assert headers["x-pairmesh-hints"] == "locality=clamped"


async def test_what_the_mesh_serves_well_never_leaves_it(stage: Stage) -> None:
    before = list(stage.outside.asked)
    status, headers, _ = await stage.ask("home", AWAY | {"x-pairmesh-class": "batch"})
    assert (status, headers["x-pairmesh-node"]) == (200, "@alpha/home")
    assert stage.outside.asked == before


async def test_no_record_tells_where_the_outside_is(stage: Stage) -> None:
    view = json.dumps(await stage.cluster["alpha"].get("/v1/view"))
    assert "@beta" in view or "beta" in view
    assert "https" not in view


async def test_a_model_outside_is_in_no_list_of_the_mesh(stage: Stage) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{stage.cluster['alpha'].api}/v1/models") as reply,
    ):
        listed = [model["id"] for model in (await reply.json())["data"]]
    assert listed == ["home"]
