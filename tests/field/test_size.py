"""How large a request may be: an estimate ranks, the engine's own word or a certain count refuses.

Black box: whole daemons, real sockets, scripted engines.
"""

from pathlib import Path
from typing import Any

import ollama
import openai
import pytest
from aiohttp import web

from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.field import Endpoint, OpenAiEngine, chat, mesh, post, refusal

ENGLISH = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 200
OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 4711 tokens."
EMBEDDINGS = "/v1/embeddings"


async def test_every_item_of_an_embedding_has_the_whole_context(tmp_path: Path) -> None:
    """vllm-project/aibrix#2664: a batch of 64 texts was refused, as if all of them were one."""
    engine = OpenAiEngine(models={"m": 512})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        for node in (cluster["alpha"], cluster["beta"]):
            for given in (["x" * 200] * 64, [list(range(300))] * 8, list(range(512)), "word " * 400):
                reply = await post(node, EMBEDDINGS, {"model": "m", "input": given})
                assert reply.status == 200, reply.raw
            came = len(engine.asked)
            for given in (list(range(513)), [[1, 2], list(range(600))]):
                reply = await post(node, EMBEDDINGS, {"model": "m", "input": given})
                assert (reply.status, reply.code) == (400, "context_length_exceeded")
                assert "maximum context length is 512 tokens" in reply.body["error"]["message"]
                assert reply.headers["x-pairmesh-reason"] == "context_too_small"
            assert len(engine.asked) == came, "what is certain costs the engine nothing"


async def test_ollama_gets_every_prompt_as_it_cuts_them_itself(tmp_path: Path) -> None:
    """ollama/ollama#14259: 20 turns of 1,500 characters to a context of 4,096, which Ollama serves by dropping turns."""
    engine = FakeOllama(
        models=[
            FakeModel(name="m:latest", ctx=32_768),
            FakeModel(name="e:latest", ctx=512, capabilities=("embedding",)),
        ]
    )
    turns = [
        {"role": role, "content": ENGLISH[:1_500]} for _ in range(10) for role in ("user", "assistant")
    ] + [{"role": "user", "content": "x" * 100_000}]
    async with (
        engine.serving(),
        mesh(tmp_path, alpha=[Endpoint(url=engine.url, engine="ollama")]) as cluster,
    ):
        node = cluster["alpha"]
        async with ollama.AsyncClient(node.api) as client:
            await client.generate("m", "hello", options={"num_ctx": 4_096, "num_predict": 2})
            told = await client.chat("m", turns, options={"num_predict": 2})
            assert told.done
            assert (await client.generate("m", "x" * 200_000, options={"num_predict": 2})).done
            assert (await client.embed("e", "x" * 6_000)).embeddings
            assert (await client.embed("e", ["x" * 6_000] * 16)).embeddings
        reply = await post(node, "/v1/chat/completions", {"model": "m", "messages": turns, "max_tokens": 2})
        assert reply.status == 200, reply.raw


async def test_a_prompt_that_may_or_may_not_fit_is_the_engines_to_judge(tmp_path: Path) -> None:
    """warpllm/warpllm#44: 15,500 bytes of English, about 3,500 tokens, were refused for a context of 4,096."""
    engine = OpenAiEngine(models={"m": 4_096})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        for node in (cluster["alpha"], cluster["beta"]):
            assert (await chat(node, text=ENGLISH[:15_500], max_tokens=64)).status == 200
            assert (await chat(node, text=ENGLISH[:2_000], max_tokens=4_096)).status == 200
            assert (await chat(node, text=" " * 100_000, max_tokens=8)).status == 200, (
                "few tokens, many bytes"
            )


async def test_the_engines_own_overflow_passes_byte_for_byte_and_is_nobodys_fault(tmp_path: Path) -> None:
    engine = OpenAiEngine(models={"m": 4_096})

    async def judge(_request: web.Request, body: dict[str, Any]) -> web.Response | None:
        return refusal(400, OVERFLOW) if len(str(body["messages"])) > 15_000 else None

    engine.answer = judge
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        for node in (cluster["alpha"], cluster["beta"]):
            came = len(engine.asked)
            for number in range(8):
                reply = await chat(node, text=ENGLISH[: 15_500 + number], stream=number % 2 == 0)
                assert (reply.status, reply.body["error"]["message"]) == (400, OVERFLOW)
                assert "x-pairmesh-attempts" not in reply.headers
            assert len(engine.asked) == came + 8, "one try each"
            assert (await chat(node)).status == 200, "and others are served as before"


async def test_an_openai_client_knows_an_overflow_of_either_kind(tmp_path: Path) -> None:
    engine = OpenAiEngine(models={"m": 4_096})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url]) as cluster:
        base = f"{cluster['alpha'].api}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="unused") as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x" * 200_000}]
                )
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length is 4096 tokens" in caught.value.message
        assert len(engine.asked) == 0


async def test_of_two_contexts_the_one_that_probably_holds_the_prompt_gets_it(tmp_path: Path) -> None:
    small, large = OpenAiEngine(models={"m": 2_048}), OpenAiEngine(models={"m": 32_768})
    async with small.serving() as one, large.serving() as two, mesh(tmp_path, alpha=[one, two]) as cluster:
        node = cluster["alpha"]
        for _ in range(8):
            assert (await chat(node, text=ENGLISH[:15_500])).status == 200
        assert (len(small.asked), len(large.asked)) == (0, 8)
