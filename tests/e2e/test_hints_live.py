"""Routing hints on live nodes with real engines."""

import asyncio
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.support.cluster import Cluster, wait_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.threat("T41")]

BODY = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


async def ask(
    session: aiohttp.ClientSession, cluster: Cluster, headers: dict[str, str] | None = None, **changes: Any
) -> tuple[int, dict[str, str], dict[str, Any]]:
    async with session.post(
        f"{cluster['alpha'].api}/v1/chat/completions", json=BODY | changes, headers=headers or {}
    ) as reply:
        return reply.status, dict(reply.headers), await reply.json()


async def idle(session: aiohttp.ClientSession, cluster: Cluster, name: str) -> bool:
    """Whether a node tells of no request at any of its endpoints."""
    async with session.get(f"{cluster[name].admin}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    told = [line.rpartition(" ")[2] for line in lines if line.startswith("pairmesh_in_flight{")]
    return bool(told) and set(told) == {"0"}


@pytest.mark.scenario("hints of requests at the same time do not interfere")
async def test_two_concurrent_requests_with_opposite_hints_never_mix(cluster: Cluster) -> None:
    async def one(session: aiohttp.ClientSession, number: int) -> None:
        wanted = ("alpha", "beta")[number % 2]
        ref = f"@{wanted}"
        status, headers, _ = await ask(session, cluster, {"x-pairmesh-prefer": ref})
        assert status == 200
        record = await cluster["alpha"].get(f"/v1/decisions/{headers['x-pairmesh-decision-id']}")
        noted = [(note["hint"], note["ref"], note["outcome"]) for note in record["hints"]]
        assert [(hint, told) for hint, told, _ in noted] == [("prefer", ref)]
        went_there = headers["x-pairmesh-node"] == f"@{wanted}/llama"
        assert went_there is (noted[0][2] == "honoured")

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, number) for number in range(64)))
        for name in ("alpha", "beta"):
            await wait_for(partial(idle, session, cluster, name), 10, f"nothing is left at {name}")


async def test_a_required_node_is_the_only_one_that_serves(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        for wanted in ("alpha", "beta"):
            for _ in range(3):
                _, headers, _ = await ask(session, cluster, {"x-pairmesh-require": f"node=@{wanted}"})
                assert headers["x-pairmesh-node"] == f"@{wanted}/llama"


async def test_a_preferred_node_that_does_not_own_the_model_is_passed_over(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        status, headers, _ = await ask(session, cluster, {"x-pairmesh-prefer": "@alpha"}, model="mid")
    assert status == 200
    assert headers["x-pairmesh-node"] == "@beta/llama"
    assert "prefer=excluded(model_absent)" in headers["x-pairmesh-hints"]


async def test_an_unknown_preferred_node_is_ignored_and_told(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        status, headers, _ = await ask(session, cluster, {"x-pairmesh-prefer": "@nowhere"})
    assert status == 200
    assert headers["x-pairmesh-hints"] == "prefer=ignored_unknown"


@pytest.mark.scenario("malformed hints fail safely, and telemetry is for those with a role")
async def test_a_malformed_narrowing_hint_refuses_and_a_malformed_advisory_one_does_not(
    cluster: Cluster,
) -> None:
    async with aiohttp.ClientSession() as session:
        status, headers, body = await ask(session, cluster, {"x-pairmesh-require": "colour=blue"})
        assert (status, body["error"]["code"]) == (400, "hint_malformed")
        assert headers["x-pairmesh-hints"] == "require=excluded(hint_malformed)"
        status, headers, _ = await ask(session, cluster, {"x-pairmesh-slo-ttft-ms": "soon"})
        assert status == 200
        assert headers["x-pairmesh-hints"] == "slo_ttft_ms=ignored_malformed"
        async with session.get(f"{cluster['alpha'].admin}/metrics") as reply:
            metrics = await reply.text()
    assert 'pairmesh_hints_total{hint="slo_ttft_ms",outcome="ignored_malformed"}' in metrics
    assert 'pairmesh_hints_total{hint="require",outcome="excluded"}' in metrics


@pytest.mark.scenario("OpenAI and Ollama requests without hints are as they were")
async def test_a_request_without_hints_behaves_as_if_the_feature_were_not_there(cluster: Cluster) -> None:
    same: dict[str, Any] = {"temperature": 0, "seed": 1}
    async with aiohttp.ClientSession() as session:
        status, headers, told = await ask(session, cluster, **same)
        engine = cluster.engines[0].url
        async with session.post(f"{engine}/v1/chat/completions", json=BODY | same) as reply:
            direct = await reply.json()
    assert status == 200
    assert told.keys() == direct.keys()
    assert told["choices"] == direct["choices"], "an answer is the engine's own"
    assert "x-pairmesh-hints" not in headers
    record = await cluster["alpha"].get(f"/v1/decisions/{headers['x-pairmesh-decision-id']}")
    assert record["hints"] == []
    assert record["reason"] in ("native", "explore")


async def test_nothing_that_was_required_can_be_met_is_400_with_the_counts(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        status, headers, body = await ask(session, cluster, {"x-pairmesh-require": "node=@nowhere"})
    assert (status, body["error"]["code"]) == (400, "not_in_subset")
    assert "Retry-After" not in headers, "a retry is no help"
    assert "2" in body["error"]["message"]


async def test_own_concurrent_requests_are_not_refused_for_each_other(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(
            *(ask(session, cluster, {"x-pairmesh-locality": "host"}) for _ in range(6))
        )
    assert [status for status, *_ in answers] == [200] * 6
    assert {headers["x-pairmesh-node"] for _, headers, _ in answers} == {"@alpha/llama"}
    assert all("x-pairmesh-attempts" not in headers for _, headers, _ in answers)
