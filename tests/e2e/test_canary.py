"""What a client sends and an engine answers reaches no sink: logs, journal, metrics, state files, other answers."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.cluster import Cluster, Node

pytestmark = pytest.mark.threat("T37")

CANARY = "canaryk7q2m9x4w1z8r3t6y5u0p"
WINDOW = 10


def forms(text: str) -> Iterator[bytes]:
    """Every window of ``text`` in the spellings a careless sink could use."""
    for start in range(len(text) - WINDOW + 1):
        window = text[start : start + WINDOW]
        yield window.encode()
        yield window.encode().hex().encode()
        yield window.encode("utf-16-le")
    for shift in range(3):
        encoded = base64.b64encode(b"x" * shift + text.encode())
        yield encoded[4 : 4 + 2 * WINDOW]


def hits(blob: bytes) -> list[bytes]:
    return [form for form in forms(CANARY) if form in blob]


async def sinks(node: Node) -> dict[str, bytes]:
    """Everything the node keeps or tells."""
    found = {str(path): path.read_bytes() for path in node.base.rglob("*") if is_sink(path)}
    async with aiohttp.ClientSession() as session:
        for path in ("/metrics", "/v1/status", "/v1/view", "/v1/decisions?limit=1000"):
            async with session.get(f"{node.admin}{path}") as reply:
                assert reply.status == 200
                found[path] = await reply.read()
    return found


def is_sink(path: Path) -> bool:
    """Files of the daemon; the engine's own log and the models are not its doing."""
    return path.is_file() and path.suffix != ".gguf" and path.name not in ("engine.log", "embedder.log")


def body(**changes: object) -> dict[str, object]:
    return {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": CANARY}]} | changes


CASES: tuple[tuple[str, dict[str, object], dict[str, str], str], ...] = (
    ("prompt", body(), {}, ""),
    ("streamed prompt", body(stream=True), {}, ""),
    ("system text", body(messages=[{"role": "system", "content": CANARY}, {"role": "user", "content": "x"}]), {}, ""),
    (
        "tool",
        body(tools=[{"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": {}}}]),
        {},
        "",
    ),
    ("picture", body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{CANARY}"}}]}]), {}, ""),
    ("unknown field", body(**{CANARY: CANARY}), {}, ""),
    ("unknown model", body(model=CANARY), {}, ""),
    ("query", body(), {}, f"?{CANARY}={CANARY}"),
    ("headers", body(), {"x-custom": CANARY, "cookie": CANARY, "authorization": f"Bearer {CANARY}"}, ""),
    ("session", body(), {"x-session-id": CANARY}, ""),
    ("hint", body(), {"x-pairmesh-prefer": CANARY, "x-pairmesh-require": CANARY}, ""),
    ("too long", body(messages=[{"role": "user", "content": f"{CANARY} " * 3000}]), {}, ""),
)  # fmt: skip


@pytest.mark.asyncio(loop_scope="module")
async def test_no_sink_holds_a_word_of_a_request_or_an_answer(cluster: Cluster) -> None:
    alpha = cluster["alpha"]
    url = f"{alpha.api}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        for _, sent, headers, query in CASES:
            for required in ({}, {"x-pairmesh-require": "node=@beta"}):
                async with session.post(url + query, json=sent, headers=required | headers) as reply:
                    await reply.read()
        for raw in (
            b'{"model": "tiny", "x": "' + CANARY.encode(),
            CANARY.encode(),
            b"\xff" + CANARY.encode(),
        ):
            headers = {"content-type": "application/json"}
            async with session.post(url, data=raw, headers=headers) as reply:
                assert reply.status == 400
                assert hits(await reply.read()) == []
    for node in cluster.nodes:
        for name, blob in (await sinks(node)).items():
            assert hits(blob) == [], f"{node.name}: {name}"


def test_the_search_finds_what_a_careless_sink_would_write() -> None:
    for leak in (CANARY, CANARY[5:15], json.dumps({"prompt": CANARY}), CANARY.encode().hex()):
        assert hits(f"log line: {leak}".encode())
    assert hits(base64.b64encode(b"ab" + CANARY.encode()))
    assert hits(b"nothing of the kind") == []
