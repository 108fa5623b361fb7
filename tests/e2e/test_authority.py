"""Two daemons and an authority beside them: it is heeded while it answers, and missed by nobody when it is gone."""

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.agent.authority.scripted import Scripted, answers, listening
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
CANARY = "canary-7f3a"
TOKEN = "not-for-everybody"


class Stage:
    def __init__(self, cluster: Cluster, authority: Scripted, gone: contextlib.AsyncExitStack) -> None:
        self.cluster = cluster
        self.authority = authority
        self.gone = gone

    async def ask(self, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        """One chat through alpha: status, headers, and the record of its decision."""
        alpha = self.cluster["alpha"]
        body = {"model": "toy", "messages": [{"role": "user", "content": CANARY}]}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{alpha.api}/v1/chat/completions", json=body, headers=sent) as reply,
        ):
            await reply.read()
        told = dict(reply.headers)
        return reply.status, told, await alpha.get(f"/v1/decisions/{told['x-pairmesh-decision-id']}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    base = tmp_path_factory.mktemp("authority")

    async def answer(wire: Wire, _: bytes) -> None:
        wire.write(whole(200, json.dumps({"object": "chat.completion", "choices": []}).encode()))

    nodes = [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
    async with contextlib.AsyncExitStack() as stack:
        gone = await stack.enter_async_context(contextlib.AsyncExitStack())
        authority = await gone.enter_async_context(listening(answers(order=[])))
        for node in nodes:
            url = await stack.enter_async_context(ScriptedEngine({"toy": answer}).serving(node.ip))
            (node.config / "endpoints" / "toy.toml").write_text(f'engine = "openai"\nurl = "{url}"\n')
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
        alpha = nodes[0]
        (alpha.config / "policy.toml").write_text(
            f'[authority]\nmode = "authoritative"\nurl = "{authority.url}"\ncredential = "authority"\n'
        )
        (alpha.state / "credentials").mkdir(mode=0o700)
        (alpha.state / "credentials" / "authority").write_text(f"{TOKEN}\n")
        cluster = await stack.enter_async_context(closing(Cluster(base=base, nodes=nodes, engines=[])))
        for node in nodes:
            await node.start()
        await pair(nodes)
        await cluster.full_view()
        yield Stage(cluster, authority, gone)


async def test_it_is_heeded_and_told_nothing_of_what_is_written(stage: Stage) -> None:
    beta = stage.cluster["beta"].node_id

    async def heeded() -> dict[str, Any] | None:
        order = [f"{stage.cluster['alpha'].node_id}/none", f"{beta}/toy"]
        stage.authority.script = answers(order=order, ttl_ms=0, reason="beta today")
        status, told, record = await stage.ask()
        assert status == 200
        if record["authority"]["outcome"] != "used":
            return None
        assert (told["x-pairmesh-node"], told["x-pairmesh-reason"]) == ("@beta/toy", "authority")
        return record

    record = await wait_for(heeded, 20, "an answer in time")
    assert record["authority"]["reason"] == "beta today"
    assert stage.authority.questions[-1]["decision_id"] == record["id"]
    assert not [raw for raw in stage.authority.raw if CANARY.encode() in raw]
    assert all(f"bearer {TOKEN}".encode() in head.lower() for head in stage.authority.heads)


async def test_a_requirement_is_not_its_to_waive(stage: Stage) -> None:
    _, told, record = await stage.ask(x_pairmesh_require="node=@alpha")
    assert told["x-pairmesh-node"] == "@alpha/toy"
    assert record["excluded_counts"] == {"not_in_subset": 1}


async def test_a_dry_run_asks_nobody(stage: Stage) -> None:
    asked = len(stage.authority.heads)
    status, out, err = await stage.cluster["alpha"].cli("explain", "--model", "toy")
    assert status == 0, (out, err)
    assert len(stage.authority.heads) == asked


async def test_a_key_that_was_renewed_is_shown_from_then_on(stage: Stage) -> None:
    alpha = stage.cluster["alpha"]
    (alpha.state / "credentials" / "authority").write_text("renewed\n")

    async def renewed() -> bool:
        asked = len(stage.authority.heads)
        await stage.ask()
        return any(b"bearer renewed" in head.lower() for head in stage.authority.heads[asked:])

    await wait_for(renewed, 20, "the new key")
    (alpha.state / "credentials" / "authority").write_text("")
    assert alpha.process is not None
    alpha.process.send_signal(signal.SIGHUP)

    async def told() -> bool:
        faults = (await alpha.get("/v1/status"))["own"]["faults"]
        return len(faults) == 1 and "authority.credential: the file that it names" in faults[0]

    await wait_for(told, 20, "the fault")
    assert await renewed(), "the key before it stays in use"


@pytest.mark.scenario("the fall-back is the same every time when it, or the authority, is away")
async def test_when_it_is_away_the_choice_is_the_native_one_and_nothing_is_lost(stage: Stage) -> None:
    await stage.gone.aclose()
    records = []
    alpha = stage.cluster["alpha"]
    for _ in range(8):
        status, told, record = await stage.ask()
        assert (status, told["x-pairmesh-reason"]) == (200, "native")
        records.append(record)
    outcomes = [record["authority"]["outcome"] for record in records]
    assert outcomes[-1] == "breaker_open"
    assert set(outcomes) <= {"error", "timeout", "breaker_open"}
    status, out, err = await alpha.cli("explain", records[-1]["id"], "--replay", "--json")
    assert status == 0, err
    again = json.loads(out)
    assert (again["same"], again["record"]["reason"]) == (True, "native"), "no matter of chance"
    async with aiohttp.ClientSession() as session, session.get(f"{alpha.admin}/metrics") as reply:
        text = await reply.text()
    assert 'pairmesh_authority_total{outcome="breaker_open"}' in text
