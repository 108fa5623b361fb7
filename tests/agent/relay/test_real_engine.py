"""The relay before a real llama.cpp server: equal answers, cancelled generations, sockets that the engine closes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agent.relay.client import Client, ask, post
from tests.agent.relay.rig import running
from tests.support import llama, tiny_gguf
from tests.support.until import until

PROMPT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llama.LlamaServer]:
    try:
        llama.find_binary()
    except llama.LlamaUnavailable as why:
        pytest.skip(str(why))
    folder = tmp_path_factory.mktemp("engine")
    tiny_gguf.write_model(folder / "tiny.gguf", name="tiny")
    with llama.running(llama.single(folder / "tiny.gguf", alias="tiny"), folder / "log") as server:
        yield server


def body(**told: Any) -> bytes:
    return json.dumps(PROMPT | {"max_tokens": 12} | told).encode()


def told_by(chat: dict[str, Any]) -> tuple[str, int]:
    return chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]


def events(stream: bytes) -> list[Any]:
    lines = [line[6:] for line in stream.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def slots_busy(port: int) -> int:
    heard = await ask(port, b"GET /slots HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return sum(slot["is_processing"] for slot in json.loads(heard.body))


async def test_answers_through_the_relay_equal_direct_ones(engine: llama.LlamaServer) -> None:
    async with running(engine.port) as relay:
        through = await ask(relay.port, post(relay.port, body()))
        direct = await ask(engine.port, post(engine.port, body()))
        assert told_by(json.loads(through.body)) == told_by(json.loads(direct.body))
        assert through.headers["content-type"] == direct.headers["content-type"]


async def test_a_stream_through_the_relay_equals_a_direct_one_and_its_tokens_are_counted(
    engine: llama.LlamaServer,
) -> None:
    raw = body(stream=True, stream_options={"include_usage": True}, max_tokens=20)
    async with running(engine.port) as relay:
        through = events((await ask(relay.port, post(relay.port, raw))).body)
        direct = events((await ask(engine.port, post(engine.port, raw))).body)
        assert [each["choices"] for each in through] == [each["choices"] for each in direct]
        assert through[-1]["usage"]["completion_tokens"] == 20
        marks = relay.watch.attempts[0].marks
        assert marks is not None
        assert marks.content_events == 20


@pytest.mark.parametrize("stream", [True, False])
async def test_a_generation_ends_when_its_client_leaves(engine: llama.LlamaServer, stream: bool) -> None:
    async with running(engine.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, body(stream=stream, max_tokens=1_800)))
        if stream:
            await client.head()
            await client.chunk()
        else:
            await until(lambda: relay.wiring.in_hand)
            while not await slots_busy(engine.port):
                await asyncio.sleep(0)
        client.close()
        await until(lambda: relay.watch.lines)
        assert relay.watch.results() == ["cancelled"]
        deadline = asyncio.get_running_loop().time() + 10
        while await slots_busy(engine.port):
            assert asyncio.get_running_loop().time() < deadline
        relay.assert_idle()


async def test_more_requests_than_the_engine_takes_on_one_socket_cause_no_error(
    engine: llama.LlamaServer,
) -> None:
    async with running(engine.port) as relay:
        client = await Client.to(relay.port)
        for _ in range(105):
            await client.send(post(relay.port, body(max_tokens=1)))
            heard = await client.heard()
            assert heard.status == 200
            assert "x-pairmesh-attempts" not in heard.headers
        client.close()
        assert relay.watch.results() == ["done"] * 105


async def test_an_unknown_model_and_a_prompt_too_long_are_told_by_the_engine(
    engine: llama.LlamaServer,
) -> None:
    async with running(engine.port) as relay:
        heard = await ask(
            relay.port, post(relay.port, body(messages=[{"role": "user", "content": "word " * 9_000}]))
        )
        assert heard.status == 400
        assert b"exceed_context_size" in heard.body
        assert relay.watch.results() == ["answered"]
