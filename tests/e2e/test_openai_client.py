"""The ``openai`` package, unchanged, against the local API of a node."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello world"}]


def client(cluster: Cluster, node: str = "alpha") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster[node].api}/v1", api_key="unused", max_retries=0)


async def test_a_chat_is_answered_and_says_where(cluster: Cluster) -> None:
    async with client(cluster) as api:
        raw = await api.chat.completions.with_raw_response.create(
            model="tiny", messages=MESSAGES, max_tokens=8
        )
        chat = raw.parse()
    assert chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8
    assert raw.headers["x-pairmesh-node"] in ("@alpha/llama", "@beta/llama")
    assert raw.headers["x-pairmesh-model"] == "tiny"
    record = await cluster["alpha"].get(f"/v1/decisions/{raw.headers['x-pairmesh-decision-id']}")
    assert record["chosen"]
    assert "hello world" not in json.dumps(record)


@pytest.mark.scenario("OpenAI and Ollama requests without hints are as they were")
async def test_a_streamed_chat_arrives_in_many_events_and_ends(cluster: Cluster) -> None:
    async with client(cluster) as api:
        stream = await api.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 4
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 16


async def test_a_model_that_only_a_peer_owns_is_served_by_the_peer(cluster: Cluster) -> None:
    async with client(cluster) as api:
        raw = await api.chat.completions.with_raw_response.create(
            model="mid", messages=MESSAGES, max_tokens=4
        )
    assert raw.headers["x-pairmesh-node"] == "@beta/llama"
    assert raw.parse().choices[0].message.content


async def test_a_completion_is_answered(cluster: Cluster) -> None:
    async with client(cluster) as api:
        completion = await api.completions.create(model="tiny", prompt="the world", max_tokens=8)
    assert completion.choices[0].text


async def test_an_embedding_is_made_by_the_engine_that_can(cluster: Cluster) -> None:
    async with client(cluster) as api:
        raw = await api.embeddings.with_raw_response.create(model="embedder", input=["hello", "world"])
    assert raw.headers["x-pairmesh-node"] == "@alpha/embedder"
    assert len(raw.parse().data) == 2
    assert len(raw.parse().data[0].embedding) > 16


async def test_the_list_names_every_model_once(cluster: Cluster) -> None:
    for node in ("alpha", "beta"):
        async with client(cluster, node) as api:
            names = [model.id async for model in await api.models.list()]
            assert names == sorted({"tiny", "mid", "embedder"})
            assert (await api.models.retrieve("mid")).id == "mid"


async def test_an_unknown_model_is_not_found_and_the_nearest_names_are_told(cluster: Cluster) -> None:
    async with client(cluster) as api:
        with pytest.raises(openai.NotFoundError) as caught:
            await api.chat.completions.create(model="tinny", messages=MESSAGES)
    assert caught.value.code == "model_absent"
    assert "tiny" in caught.value.message
    assert "tinny" not in caught.value.message


async def test_an_engines_own_refusal_passes_unaltered(cluster: Cluster) -> None:
    async with client(cluster) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "word " * 2_500}], max_tokens=4
            )
    assert caught.value.type == "exceed_context_size_error", "llama.cpp's own word"


async def test_a_prompt_that_no_context_holds_for_certain_is_refused_in_words_that_clients_know(
    cluster: Cluster,
) -> None:
    async with client(cluster) as api:
        with pytest.raises(openai.BadRequestError) as caught:
            await api.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "word " * 20_000}], max_tokens=4
            )
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is" in caught.value.message
