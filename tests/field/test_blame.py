"""Whose fault a failure is: what one caller, one model or one policy is refused takes nothing from others.

Black box: whole daemons, real sockets, scripted engines.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.cluster import wait_for
from tests.support.field import Endpoint, OpenAiEngine, Reply, chat, mesh, refusal, served_by

BAD = "a message that the template cannot render"


def wide(url: str, name: str = "engine", extra: str = "") -> Endpoint:
    """An endpoint that takes eight requests at a time."""
    return Endpoint(url=url, name=name, extra=f"slots = 8\n{extra}")


@contextlib.asynccontextmanager
async def serving(*engines: OpenAiEngine) -> AsyncIterator[list[str]]:
    """All of these; their URLs."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(engine.serving()) for engine in engines]


def says(body: dict[str, Any], text: str) -> bool:
    return any(text in str(message.get("content")) for message in body.get("messages", []))


async def template_fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
    """llama.cpp's answer to messages that its template cannot render."""
    if not says(body, BAD):
        return None
    return refusal(500, "Conversation roles must alternate user/assistant", kind="server_error")


async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that is broken, whoever asks."""
    return refusal(500, "CUDA error", kind="server_error")


async def test_one_callers_failing_messages_change_nothing_for_others_and_a_broken_engine_is_left(
    tmp_path: Path,
) -> None:
    """janhq/jan#6123: 500 for one caller's messages, again and again, while others' answers take a while, at a model with one
    endpoint and at one with two; and an engine whose errors are its own, as another one serves the very same requests."""
    single, *twins = [OpenAiEngine(models={name: None}, answer=template_fails, whole_s=0.3) for name in "stt"]
    broken, sound = OpenAiEngine(models={"x": None}, answer=fails), OpenAiEngine(models={"x": None})
    async with (
        serving(single, *twins, broken, sound) as (s, t1, t2, b, x),
        mesh(
            tmp_path,
            alpha=[wide(s, "single"), wide(t1, "twin"), wide(b, "other")],
            beta=[wide(t2, "twin"), wide(x, "other")],
        ) as cluster,
    ):
        alpha = cluster["alpha"]

        async def in_turn(model: str, texts: list[str]) -> list[Reply]:
            return [await chat(alpha, model, text=text) for text in texts]

        bad, good = [BAD + "." * number for number in range(12)], ["hello"] * 8
        replies = await asyncio.gather(
            *[in_turn(model, texts) for model in "st" for texts in (good, bad, good, bad)]
        )
        for number, heard in enumerate(replies):
            assert {reply.status for reply in heard} == {500 if number % 2 else 200}
            if number % 2:
                told = {reply.body["error"]["message"] for reply in heard}
                assert told == {"Conversation roles must alternate user/assistant"}
        at_alpha = {"x-pairmesh-prefer": "@alpha"}
        others = [await chat(alpha, "x", headers=at_alpha) for _ in range(16)]
        assert {(reply.status, served_by(reply)) for reply in others} == {(200, "beta")}
        assert broken.count() <= 7, "it is tried no more"


SHAPES: list[tuple[int, str | dict[str, Any], str]] = [
    (
        404,
        {"object": "error", "message": "The model `lora_1` does not exist.", "code": 404},
        "application/json",
    ),
    (404, {"error": {"message": "gone", "type": "NotFoundError", "code": 404}}, "application/json"),
    (404, {"detail": "Not Found"}, "application/json"),
    (404, "404 page not found", "text/plain"),
    (404, "<html><body>nothing here</body></html>", "text/html"),
    (404, "", "text/plain"),
    (405, {"detail": "Method Not Allowed"}, "application/json"),
    (403, {"error": {"message": "your organisation may not use lora_1"}}, "application/json"),
    (401, {"error": {"message": "no access to lora_1"}}, "application/json"),
    (501, "not implemented", "text/plain"),
    (422, {"error": "lora_1 wants other fields"}, "application/json"),
]


async def test_what_one_model_is_refused_takes_nothing_from_another_whatever_it_looks_like(
    tmp_path: Path,
) -> None:
    """vllm-project/production-stack#331: an adapter leaves its engine; status and body of the refusal differ by product."""
    engine = OpenAiEngine(models={"m": None, "lora_1": None, "lora_2": None})
    said: list[tuple[int, str | dict[str, Any], str]] = []

    async def refuses(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
        if body.get("model") == "m":
            return None
        status, text, kind = said[-1]
        raw = text if isinstance(text, str) else json.dumps(text)
        return web.Response(status=status, text=raw, content_type=kind)

    engine.answer = refuses
    async with engine.serving() as url, mesh(tmp_path, alpha=[wide(url)], beta=[]) as cluster:
        alpha, beta = cluster["alpha"], cluster["beta"]
        for shape in SHAPES:
            said.append(shape)
            for node in (alpha, beta):
                refused = await chat(node, "lora_1")
                assert refused.status == shape[0], shape
                assert [(await chat(each)).status for each in (alpha, beta)] == [200, 200], shape
        said.append(SHAPES[0])
        del engine.models["lora_1"]
        assert (await chat(beta, "lora_1")).status == 404

        async def gone() -> bool:
            listed = await _listed(beta)
            return "lora_1" not in listed and "m" in listed

        await wait_for(gone, 3, "the model that left is listed no more")
        before = engine.count()
        absent = await chat(beta, "lora_1")
        assert (absent.status, absent.code, engine.count()) == (404, "model_absent", before)
        assert (await chat(beta)).status == 200


async def _listed(node: Any) -> set[str]:
    async with aiohttp.ClientSession() as session, session.get(f"{node.api}/v1/models") as reply:
        return {model["id"] for model in (await reply.json())["data"]}
