"""A decision of live nodes is explained, replayed and asked about before it is made."""

import json
from typing import Any

import aiohttp
import pytest

from tests.support.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
ASKED = 16
ALWAYS = (
    *(
        "decisions_total",
        "decision_seconds",
        "prediction_error_ln",
        "attempts_total",
        "in_flight",
        "queue_depth",
    ),
    *(
        "journal_dropped_total",
        "relay_seconds",
        "relay_bytes_total",
        "relay_connections",
        "relay_buffered_bytes",
    ),
)
"""Metrics of every router that has served a request."""


async def explained(cluster: Cluster, *words: str) -> Any:
    code, out, err = await cluster["alpha"].cli("explain", "--json", *words)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.scenario("telemetry explains and holds nothing of what was said")
async def test_what_was_routed_replays_to_the_same_choice(cluster: Cluster) -> None:
    alpha = cluster["alpha"]
    async with aiohttp.ClientSession() as session:
        for number in range(ASKED):
            headers = {"x-pairmesh-prefer": ("@alpha", "@beta")[number % 2]}
            async with session.post(f"{alpha.api}/v1/chat/completions", json=BODY, headers=headers) as reply:
                assert reply.status == 200
                told = reply.headers
            decision_id, node = told["x-pairmesh-decision-id"], told["x-pairmesh-node"]
            again = await explained(cluster, decision_id, "--replay")
            assert (again["same"], again["record"]["chosen"]) == (True, again["was"])
            stored = await alpha.get(f"/v1/decisions/{decision_id}")
            assert stored["names"][again["was"]] == node
            assert stored["candidates"] == again["record"]["candidates"]
            question = {"id": decision_id, "policy": 'preset = "latency"\n'}
            async with session.post(f"{alpha.admin}/v1/replay", json=question) as reply:
                assert (reply.status, (await reply.json())["record"]["policy"]) == (200, "latency")


async def test_a_request_is_asked_about_before_it_is_sent(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session:
        before = len((await cluster["alpha"].get("/v1/decisions?limit=1000"))["decisions"])
        supposed = await explained(cluster, "--model", "mid", "--prompt-tokens", "300", "--no-stream")
        assert (supposed["action"], supposed["req"]["prompt_tokens"]) in (("route", 300), ("route_cold", 300))
        assert supposed["names"][supposed["chosen"]] == "@beta/llama"
        required = ("--header", "x-pairmesh-require: node=@alpha")
        refused = await explained(cluster, "--model", "mid", *required)
        assert (refused["action"], refused["chosen"]) == ("reject", None)
        assert len((await cluster["alpha"].get("/v1/decisions?limit=1000"))["decisions"]) == before
        async with session.post(
            f"{cluster['alpha'].api}/v1/chat/completions", json=BODY | {"model": "mid"}
        ) as reply:
            assert (reply.status, reply.headers["x-pairmesh-node"]) == (200, "@beta/llama")


async def test_what_is_decided_is_counted_under_its_name(cluster: Cluster) -> None:
    alpha = cluster["alpha"]
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{alpha.api}/v1/chat/completions", json=BODY) as reply:
            assert reply.status == 200
            decision_id = reply.headers["x-pairmesh-decision-id"]
        assert (await alpha.get(f"/v1/decisions/{decision_id}"))["outcome"]["err_ect"] is not None
        async with session.get(f"{alpha.admin}/metrics") as reply:
            text = await reply.text()
    told = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    assert {f"pairmesh_{name}" for name in ALWAYS} - told == set()
    assert 'pairmesh_prediction_error_ln_count{kind="ect"}' in text
