"""The Ollama of these tests against the wire schema: the fake always, a real server where one is named."""

import asyncio
import json
import os
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import ollama
import pytest

from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.fakes.ollama_schema import Failed, check

TINY = FakeModel(name="tiny:latest", num_ctx=2_048)
EMBEDDER = FakeModel(name="embedder:v1", capabilities=("embedding",), family="bert")
OLD = FakeModel(name="old:7b", capabilities=None)


@pytest.fixture
async def fake() -> AsyncIterator[FakeOllama]:
    async with FakeOllama(models=[TINY, EMBEDDER, OLD]).serving() as served:
        yield served


async def call(fake: FakeOllama, path: str, body: object = None, **headers: str) -> tuple[int, bytes, str]:
    async with (
        aiohttp.ClientSession(fake.url) as session,
        session.request("GET" if body is None else "POST", path, json=body, headers=headers) as reply,
    ):
        return reply.status, await reply.read(), reply.content_type


async def real_models(url: str) -> tuple[str, str]:
    """A model of a real server that chats, and one that embeds; skips if it lacks either."""
    found: dict[str, str] = {}
    async with ollama.AsyncClient(url) as client:
        for model in (await client.list()).models:
            name = model.model or ""
            for capability in (await client.show(name)).capabilities or ():
                found.setdefault(capability, name)
    if not {"completion", "embedding"} <= found.keys():
        pytest.skip("the real server needs a model that chats and one that embeds")
    return found["completion"], found["embedding"]


@pytest.mark.parametrize("source", ["fake", "real"])
async def test_every_reply_follows_the_wire_schema(fake: FakeOllama, source: str) -> None:
    url, models = fake.url, (TINY.name, EMBEDDER.name)
    if source == "real":
        told = os.environ.get("PAIRMESH_TEST_OLLAMA_URL")
        if told is None:
            pytest.skip("PAIRMESH_TEST_OLLAMA_URL names no real server")
        url = told
        models = await real_models(url)
    options = {"num_predict": 3}
    asked: list[tuple[str, object]] = [
        ("/api/generate", {"model": models[0]}),
        ("/api/generate", {"model": models[0], "prompt": "hello", "options": options}),
        ("/api/generate", {"model": models[0], "prompt": "hello", "stream": False, "options": options}),
        (
            "/api/chat",
            {"model": models[0], "messages": [{"role": "user", "content": "x"}], "options": options},
        ),
        ("/api/embed", {"model": models[1], "input": ["a", "b"]}),
        ("/api/embeddings", {"model": models[1], "prompt": "a"}),
        ("/api/show", {"model": models[0]}),
        *((path, None) for path in ("/api/version", "/api/tags", "/api/ps")),
        ("/api/generate", {"model": models[0], "keep_alive": 0}),
    ]
    async with aiohttp.ClientSession(url) as session:
        for path, body in asked:
            method = "GET" if body is None else "POST"
            async with session.request(method, path, json=body) as reply:
                raw = await reply.read()
                assert reply.status == 200, (path, raw)
                for line in raw.splitlines():
                    check(path, line)


async def test_the_schema_refuses_a_field_that_ollama_does_not_have() -> None:
    with pytest.raises(msgspec.ValidationError):
        check("/api/version", b'{"version":"1","extra":1}')
    with pytest.raises(AssertionError):
        check("/api/embed", b'{"model":"m","embeddings":[],"load_duration":0}')


async def test_a_stream_is_the_default_of_the_native_routes(fake: FakeOllama) -> None:
    body = {"model": "tiny", "prompt": "hello", "options": {"num_predict": 3}}
    status, raw, kind = await call(fake, "/api/generate", body)
    lines = [json.loads(line) for line in raw.splitlines()]
    assert (status, kind, len(lines)) == (200, "application/x-ndjson", 4)
    assert "".join(line["response"] for line in lines) == "w0 w1 w2 "
    assert (lines[-1]["done"], lines[-1]["eval_count"]) == (True, 3)
    assert "prompt_eval_duration" not in lines[-1], "zero durations are left out"
    _, raw, kind = await call(fake, "/api/generate", body | {"stream": False})
    assert kind == "application/json"
    assert json.loads(raw)["response"] == "w0 w1 w2 "


async def test_models_load_on_demand_and_the_least_recently_used_leaves(fake: FakeOllama) -> None:
    fake.loaded_most = 2
    for name in ("tiny", "embedder:v1", "tiny", "old:7b"):
        await call(fake, "/api/generate", {"model": name})
    assert fake.loads == ["tiny:latest", "embedder:v1", "old:7b"]
    assert set(fake.runners) == {"tiny:latest", "old:7b"}


async def test_a_model_that_still_loads_is_listed(fake: FakeOllama) -> None:
    fake.load_s = 30
    loading = asyncio.create_task(call(fake, "/api/generate", {"model": "tiny"}))
    while not fake.runners:
        await asyncio.sleep(0)
    told = check("/api/ps", (await call(fake, "/api/ps"))[1])
    assert [model.name for model in told.models] == ["tiny:latest"]
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)


async def test_keep_alive_ends_and_another_context_loads_anew(fake: FakeOllama) -> None:
    now = 1_000_000.0
    fake.wall = lambda: now
    await call(fake, "/api/generate", {"model": "tiny", "keep_alive": "1m30s"})
    assert fake.runners["tiny:latest"].expires_at == now + 90
    await call(fake, "/api/generate", {"model": "tiny", "prompt": "x", "options": {"num_ctx": 8_192}})
    assert fake.loads == ["tiny:latest", "tiny:latest"]
    assert fake.runners["tiny:latest"].ctx == 8_192
    now += 301
    assert check("/api/ps", (await call(fake, "/api/ps"))[1]).models == []
    await call(fake, "/api/generate", {"model": "tiny", "keep_alive": -1})
    now += 1e6
    assert len(check("/api/ps", (await call(fake, "/api/ps"))[1]).models) == 1
    _, raw, _ = await call(fake, "/api/chat", {"model": "tiny", "messages": [], "keep_alive": "0s"})
    assert json.loads(raw)["done_reason"] == "unload"
    assert not fake.runners


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/chat", {"model": "none", "messages": []}, 404, "not found"),
        ("/api/generate", {"prompt": "x"}, 400, "model is required"),
        ("/api/show", {"name": "none"}, 404, "not found"),
        ("/api/chat", {"model": "embedder:v1", "messages": [{}]}, 400, "does not support chat"),
    ],
)
async def test_errors_are_one_string(
    fake: FakeOllama, path: str, body: object, status: int, text: str
) -> None:
    told, raw, _ = await call(fake, path, body)
    assert told == status
    assert text in msgspec.json.decode(raw, type=Failed).error


async def test_a_full_queue_a_bad_host_and_a_foreign_origin_are_refused(fake: FakeOllama) -> None:
    fake.queue_most = 0
    status, raw, _ = await call(fake, "/api/generate", {"model": "tiny", "prompt": "x"})
    assert status == 503
    assert b"pending requests" in raw
    assert (await call(fake, "/api/tags", Host="evil.example"))[:2] == (403, b"")
    assert (await call(fake, "/api/tags", Origin="http://evil.example"))[0] == 403
    assert (await call(fake, "/api/nope"))[:2] == (404, b"404 page not found")


async def test_an_error_in_mid_stream_is_a_line_of_its_own(fake: FakeOllama) -> None:
    fake.break_after = 2
    _, raw, _ = await call(fake, "/api/generate", {"model": "tiny", "prompt": "x"})
    assert [list(json.loads(line))[-1] for line in raw.splitlines()] == ["done", "done", "error"]


async def test_the_share_on_a_gpu_is_left_out_when_zero(fake: FakeOllama) -> None:
    await call(fake, "/api/generate", {"model": "tiny"})
    assert b"size_vram" not in (await call(fake, "/api/ps"))[1]
    fake.vram = 0.5
    assert check("/api/ps", (await call(fake, "/api/ps"))[1]).models[0].size_vram == round(TINY.size / 2)


async def test_a_prompt_is_not_interrupted_but_the_next_word_is(fake: FakeOllama) -> None:
    fake.prefill_s, fake.token_s = 0.1, 0.02
    async with aiohttp.ClientSession(fake.url) as session:
        body = {"model": "tiny", "prompt": "x", "options": {"num_predict": 500}}
        async with session.post("/api/generate", json=body) as reply:
            await reply.content.readline()
    async with asyncio.timeout(10):
        while not fake.cancelled:
            await asyncio.sleep(0.01)
    assert not fake.runners["tiny:latest"].in_use
