"""A daemon is killed while it serves: what had not begun is served elsewhere, and it comes back by itself."""

import asyncio
import json
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.support.cluster import Cluster, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def stream(
    session: aiohttp.ClientSession, cluster: Cluster, tokens: int, hints: dict[str, str]
) -> dict[str, Any]:
    """One streaming chat: its status, how many events carried content, and how it ended."""
    body = {
        "model": "tiny",
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hello world"}],
    }
    told: dict[str, Any] = {"events": 0, "done": False, "error": None, "node": None, "status": None}
    url = f"{cluster['alpha'].api}/v1/chat/completions"
    try:
        async with session.post(url, json=body, headers=hints) as reply:
            told["status"], told["node"] = reply.status, reply.headers.get("x-pairmesh-node")
            told["reason"] = reply.headers.get("x-pairmesh-reason")
            told["decision"] = reply.headers.get("x-pairmesh-decision-id")
            async for line in reply.content:
                if line.startswith(b"data: [DONE]"):
                    told["done"] = True
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    told["error"] = event.get("error", {}).get("code") or told["error"]
                    told["events"] += "choices" in event
    except aiohttp.ClientPayloadError:
        told["cut"] = True
    return told


async def test_a_load_behind_our_back_is_in_the_other_nodes_view(cluster: Cluster) -> None:
    engine = cluster.engines[1]
    alpha = cluster["alpha"]

    async def resident(state: bool) -> bool:
        found = (await alpha.members())["beta"]["residents"]
        return any(one["model"] == "mid" and one["state"] == "resident" for one in found) is state

    async with aiohttp.ClientSession() as session:
        for verb, state in (("load", True), ("unload", False)):
            async with session.post(f"{engine.url}/models/{verb}", json={"model": "mid"}) as reply:
                assert reply.status == 200
            await wait_for(partial(resident, state), 10, f"alpha sees the {verb}")


async def test_a_node_killed_while_it_serves_loses_nothing_that_had_not_begun(cluster: Cluster) -> None:
    alpha, beta = cluster["alpha"], cluster["beta"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        running = [
            asyncio.create_task(stream(session, cluster, 900, {"x-pairmesh-prefer": "@beta"}))
            for _ in range(10)
        ]

        async def beta_serves() -> bool:
            return bool((await beta.members())["beta"]["in_flight"])

        await wait_for(beta_serves, 10, "beta serves", every_s=0.002)
        await beta.kill()
        answers = await asyncio.gather(*running)
        assert {answer["status"] for answer in answers} == {200}
        for answer in answers:
            if answer["node"] == "@alpha/llama":
                assert answer["done"]
            elif not answer["done"]:
                assert answer["error"] == "upstream_lost", "a broken answer says so in its own dialect"
                assert answer.get("cut"), "and its chunked body ends without the last chunk"

        async def gone() -> bool:
            return not (await alpha.members())["beta"]["routable"]

        await wait_for(gone, 10, "beta left the candidates")
        after = await asyncio.gather(*(stream(session, cluster, 4, {}) for _ in range(4)))
        refused = [
            await alpha.get(f"/v1/decisions/{one['decision']}") for one in after if one["status"] != 200
        ]
        assert refused == []
        assert {(answer["status"], answer["node"]) for answer in after} == {(200, "@alpha/llama")}

        await beta.start()

        async def back() -> bool:
            member = (await alpha.members())["beta"]
            return bool(member["routable"]) and any(engine["models"] for engine in member["engines"])

        await wait_for(back, 10, "beta is a candidate again")
        again = await stream(session, cluster, 4, {"x-pairmesh-require": "node=@beta"})
        record = await alpha.get(f"/v1/decisions/{again['decision']}")
        assert again["status"] == 200, record["excluded"]
        assert again["node"] == "@beta/llama"


async def test_a_removed_node_is_refused_from_then_on(cluster: Cluster) -> None:
    alpha, beta = cluster["alpha"], cluster["beta"]
    status, out, err = await alpha.cli("trust", "remove", "@beta")
    assert status == 0, (out, err)

    async def alone() -> bool:
        return "beta" not in await alpha.members()

    await wait_for(alone, 10, "alpha forgot beta")
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{alpha.api}/v1/chat/completions", json={"model": "mid", "messages": []}) as reply,
    ):
        assert reply.status == 404

    async def cut_off() -> bool:
        return not (await beta.members())["alpha"]["routable"]

    await wait_for(cut_off, 15, "beta lost its link to alpha")
