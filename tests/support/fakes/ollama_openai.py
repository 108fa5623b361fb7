"""The fake Ollama's routes for clients of OpenAI's API."""

import json
from typing import Any

from aiohttp import web

from tests.support.fakes.ollama_engine import OllamaEngine
from tests.support.fakes.ollama_wire import json_reply, read_body, vector, write_event


async def models(engine: OllamaEngine, request: web.Request) -> web.Response:
    listed = [
        {"id": model.name, "object": "model", "created": 0, "owned_by": "library"} for model in engine.models
    ]
    return json_reply({"object": "list", "data": listed})


async def chat(engine: OllamaEngine, request: web.Request) -> web.StreamResponse:
    return await _openai(engine, request, "chat.completion", "messages")


async def completions(engine: OllamaEngine, request: web.Request) -> web.StreamResponse:
    return await _openai(engine, request, "text_completion", "prompt")


async def _openai(engine: OllamaEngine, request: web.Request, kind: str, member: str) -> web.StreamResponse:
    told = await _body(engine, request)
    model = engine.named(told)
    cap = told.get("max_tokens")
    options = {"num_predict": cap} if cap else {}
    prompt = max(1, len(json.dumps(told.get(member))) // 4)
    head = {"id": f"{kind[:4]}-1", "created": 0, "model": told["model"]}
    is_chat = kind == "chat.completion"
    async with engine.loaded(model, told) as (runner, _):
        words = [word async for word in engine.words(runner, options)]
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": len(words),
        "total_tokens": prompt + len(words),
    }
    if not told.get("stream"):
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return json_reply(head | {"object": kind, "choices": [choice], "usage": usage})
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for word in words:
        piece: dict[str, Any] = {"index": 0, "finish_reason": None}
        piece |= {"delta": {"role": "assistant", "content": word}} if is_chat else {"text": word}
        await write_event(reply, head | {"object": f"{kind}.chunk" if is_chat else kind, "choices": [piece]})
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def embeddings(engine: OllamaEngine, request: web.Request) -> web.Response:
    told = await _body(engine, request)
    texts = told["input"] if isinstance(told.get("input"), list) else [told.get("input", "")]
    async with engine.loaded(engine.named(told), told):
        data = [
            {"object": "embedding", "index": index, "embedding": vector(text)}
            for index, text in enumerate(texts)
        ]
    return json_reply(
        {
            "object": "list",
            "data": data,
            "model": told["model"],
            "usage": {"prompt_tokens": 1, "total_tokens": 1},
        }
    )


async def _body(engine: OllamaEngine, request: web.Request) -> dict[str, Any]:
    told = await read_body(request)
    engine.bodies.append(told)
    return told


ROUTES = {
    "GET /v1/models": models,
    "POST /v1/chat/completions": chat,
    "POST /v1/completions": completions,
    "POST /v1/embeddings": embeddings,
}
