"""How long things may take: guesses rank, and end nothing.

Black box: whole daemons, real sockets, scripted engines. What takes long here runs side by side.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.support import llama, tiny_gguf
from tests.support.cluster import wait_for
from tests.support.field import Endpoint, OpenAiEngine, Reply, chat, mesh, served_by

LATE_S = 11.0
"""Beyond what anything was ever given by a prediction."""


def wide(url: str, name: str = "engine", extra: str = "") -> Endpoint:
    """An endpoint that takes eight requests at a time."""
    return Endpoint(url=url, name=name, extra=f"slots = 8\n{extra}")


async def taught(*nodes: Any, model: str = "m", count: int = 5) -> None:
    """Let every router learn that answers here are short and quick."""
    for node in nodes:
        for _ in range(count):
            assert (await chat(node, model, max_tokens=3)).status == 200


@contextlib.asynccontextmanager
async def serving(*engines: OpenAiEngine) -> AsyncIterator[list[str]]:
    """All of these; their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(engine.serving()) for engine in engines]


async def test_answers_that_are_far_later_than_any_before_are_served_and_limits_are_the_owners(
    tmp_path: Path,
) -> None:
    """Late whole answers and streams here and through a peer; a server that loads on demand and says nothing meanwhile
    (mostlygeek/llama-swap#225, #92); a third model where there is room for two; a prompt of 0.9 MB to an idle
    engine; a healthy engine that answers no question while it works (ggml-org/llama.cpp#20684, vllm-project/vllm#38157); and
    an owner's own limit, which holds for a peer's requests, too."""
    late, strict = OpenAiEngine(models={"m": 1_000_000}), OpenAiEngine(models={"strict": None})
    loaders = OpenAiEngine(models={"load": None}), OpenAiEngine(models={"load": None})
    full = OpenAiEngine(models={"a": None, "b": None, "c": None})
    deaf = OpenAiEngine(models={"deaf": None}, slots=2)
    room = asyncio.Semaphore(2)

    async def two_models(request: web.Request, body: dict[str, Any]) -> None:
        if body.get("stream"):
            await room.acquire()
            asyncio.get_running_loop().call_later(LATE_S, room.release)
        else:
            async with room:
                pass

    full.answer = two_models
    async with (
        serving(late, strict, *loaders, full, deaf) as (m, s, l1, l2, f, d),
        mesh(
            tmp_path,
            alpha=[
                wide(m),
                wide(s, "strict", "first_byte_ms = 1500\n"),
                wide(l1, "loader"),
                wide(f, "full"),
                wide(d, "deaf"),
            ],
            beta=[wide(l2, "loader")],
        ) as cluster,
    ):
        alpha, beta = cluster["alpha"], cluster["beta"]
        await taught(alpha, beta)
        await taught(alpha, beta, model="strict")
        await taught(alpha, beta, model="deaf")
        late.first_s = strict.first_s = LATE_S
        deaf.deaf, deaf.whole_s = True, LATE_S / 4
        for loader in loaders:
            loader.first_s = LATE_S
        full.first_s, full.token_s, full.length = 0.0, LATE_S / 8, 8
        before = late.count()
        big = "word " * 180_000

        async def third() -> Reply:
            first = [asyncio.create_task(chat(beta, name, stream=True)) for name in ("a", "b")]
            await wait_for(lambda: _is(full.most == 2), 5, "two models are in use")
            reply = await chat(beta, "c")
            await asyncio.gather(*first)
            return reply

        replies = await asyncio.gather(
            *[chat(node, stream=stream) for node in (alpha, beta) for stream in (False, True)],
            chat(alpha, text=big),
            chat(alpha, "load"),
            chat(beta, "strict"),
            third(),
            *[chat(node, "deaf") for node in (alpha, beta) for _ in range(4)],
        )
        assert [reply.status for reply in replies] == [200] * 6 + [504] + [200] * 9
        assert [b"[DONE]" in reply.raw for reply in replies[:4]] == [False, True, False, True]
        assert late.count() - before == 5, "each was asked once"
        assert (late.hung_up, deaf.hung_up) == (0, 0)
        assert sum(loader.count() for loader in loaders) == 1, "one load"
        limited = replies[6]
        assert (limited.code, limited.seconds < 6.0, strict.hung_up) == ("upstream_timeout", True, 1)
        late.first_s = 0.0
        assert [(await chat(node)).status for node in (alpha, beta)] == [200, 200], (
            "nobody holds it against it"
        )


async def _is(value: bool) -> bool:
    return value


async def test_an_engine_that_hangs_whole_is_left_within_ten_seconds_where_another_can_serve(
    tmp_path: Path,
) -> None:
    """ollama/ollama#17408 and its kin: it accepts, and neither answers nor says anything when it is asked."""
    hung, other = OpenAiEngine(), OpenAiEngine()
    async with serving(hung, other) as (h, o), mesh(tmp_path, alpha=[wide(h)], beta=[wide(o)]) as cluster:
        alpha, beta = cluster["alpha"], cluster["beta"]
        at_alpha = {"x-pairmesh-prefer": "@alpha"}
        for node in (alpha, beta):
            for _ in range(5):
                assert served_by(await chat(node, headers=at_alpha)) == "alpha"
        hung.deaf, hung.first_s = True, 600.0
        replies = await asyncio.gather(*[chat(node, headers=at_alpha) for node in (alpha, beta)])
        assert [(reply.status, served_by(reply)) for reply in replies] == [(200, "beta")] * 2
        assert max(reply.seconds for reply in replies) < 10.0
        members = await alpha.members()
        assert members["alpha"]["engines"][0]["state"] == "failing"
        again = await chat(alpha, headers=at_alpha)
        assert (served_by(again), again.seconds < 2.0) == ("beta", True), "it ranks last meanwhile"


TEN_MINUTES_S = 600.0


@pytest.mark.long
@pytest.mark.timeout(1_200)
async def test_ten_minutes_without_a_byte_are_served_and_a_hang_with_living_health_is_not_waited_for(
    tmp_path: Path,
) -> None:
    """vllm-project/vllm#36451, #39863, #40926: a hang with living health gets a second attempt elsewhere within a minute. An
    answer without a byte for ten minutes from a healthy engine that is alone is served, here and through a peer."""
    alone, hung, other = OpenAiEngine(models={"m": None}), *[OpenAiEngine(models={"h": None}) for _ in "ab"]
    async with (
        serving(alone, hung, other) as (a, h, o),
        mesh(tmp_path, alpha=[wide(a), wide(h, "twin")], beta=[wide(o, "twin")]) as cluster,
    ):
        alpha, beta = cluster["alpha"], cluster["beta"]
        await taught(alpha, beta, count=100)
        at_alpha = {"x-pairmesh-prefer": "@alpha"}
        await taught(alpha, model="h")
        alone.first_s, hung.first_s = TEN_MINUTES_S, 3_600.0
        asked = hung.count()

        async def hedged(node: Any) -> Reply:
            return await chat(node, "h", headers=at_alpha, within_s=700.0)

        waits = [
            chat(node, stream=stream, within_s=700.0) for node in (alpha, beta) for stream in (False, True)
        ]
        replies = await asyncio.gather(*waits, hedged(alpha))
        assert [reply.status for reply in replies] == [200] * 5
        assert alone.hung_up == 0
        saved = replies[-1]
        assert hung.count() == asked + 1
        assert (served_by(saved), saved.headers["x-pairmesh-attempts"]) == ("beta", "2")
        assert saved.seconds < 62.0


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_twelve_whole_answers_at_two_slots_of_a_real_engine_lose_nothing_however_deaf_it_is(
    tmp_path: Path,
) -> None:
    """ggml-org/llama.cpp#20684: llama-server answers no question while all that serves HTTP in it holds requests."""
    try:
        llama.find_binary()
    except llama.LlamaUnavailable as why:
        pytest.skip(str(why))
    model = tmp_path / "mid.gguf"
    tiny_gguf.write_model(model, size_mb=40, name="mid")
    with llama.running(llama.single(model, alias="mid"), tmp_path / "llama.log") as engine:
        async with mesh(
            tmp_path, alpha=[Endpoint(url=engine.url, engine="llamacpp", extra="max_queue = 16\n")], beta=[]
        ) as cluster:
            alpha, beta = cluster["alpha"], cluster["beta"]
            await taught(alpha, beta, model="mid")
            asked = [
                chat(node, "mid", max_tokens=600, within_s=250) for node in (alpha, beta) for _ in range(6)
            ]
            replies = await asyncio.gather(*asked)
            assert [reply.status for reply in replies] == [200] * 12
            assert {reply.body["usage"]["completion_tokens"] for reply in replies} == {600}
            assert max(reply.seconds for reply in replies) > 10.0
