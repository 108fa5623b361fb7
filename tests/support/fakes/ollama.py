"""An Ollama that follows the wire schema of the real server, with random-free answers and settable times.

Every call is recorded. Answers are words ``w0 w1 ...``: as many as ``num_predict`` says.
"""

import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.fakes import ollama_openai
from tests.support.fakes.ollama_engine import FakeModel, OllamaEngine, Refused, Runner, keep_alive_s
from tests.support.fakes.ollama_wire import (
    error_reply,
    json_reply,
    read_body,
    stamp,
    told_durations,
    vector,
    write_line,
)

NDJSON = "application/x-ndjson"


@dataclass(slots=True, kw_only=True)
class FakeOllama(OllamaEngine):
    """``calls`` are method and path of every request, ``cancelled`` counts streams whose client left."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    cancelled: int = 0
    port: int = 0
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator["FakeOllama"]:
        """Listen for the length of the block."""
        app = web.Application(middlewares=[self._guard])
        for path, answer in _ROUTES.items():
            method, _, path = path.partition(" ")
            app.router.add_route(method, path, _bound(answer, self))
        runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, handler_cancellation=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            self.host, self.port = runner.addresses[0][:2]
            yield self
        finally:
            await runner.cleanup()

    # --- every call ------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append((request.method, request.path_qs))
        host = request.headers.get("Host", "").rpartition(":")[0]
        if host not in ("localhost", "0.0.0.0") and not re.fullmatch(r"[0-9.]+|\[[0-9a-f:]+\]", host):
            return web.Response(status=403)
        origin = request.headers.get("Origin")
        if origin is not None and not re.match(r"https?://(localhost|127\.0\.0\.1)(:|$)", origin):
            return web.Response(status=403)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except web.HTTPNotFound:
            return web.Response(status=404, text="404 page not found")
        except web.HTTPMethodNotAllowed:
            return web.Response(status=405, text="405 method not allowed")
        except Refused as refused:
            return error_reply(refused, openai=request.path.startswith("/v1/"))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        told = await read_body(request)
        self.bodies.append(told)
        return told

    # --- what is there ---------------------------------------------------------------------------------------

    async def root(self, request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def told_version(self, request: web.Request) -> web.Response:
        return json_reply({"version": self.version})

    async def tags(self, request: web.Request) -> web.Response:
        return json_reply({"models": [self._listed(model) for model in self.models]})

    async def ps(self, request: web.Request) -> web.Response:
        self.expire()
        running = sorted(self.runners.values(), key=lambda runner: -runner.expires_at)
        return json_reply({"models": [self._running(runner) for runner in running]})

    async def show(self, request: web.Request) -> web.Response:
        model = self.named(await self._body(request))
        arch = model.family
        shown: dict[str, Any] = {
            "license": "none",
            "modelfile": f"FROM {model.name}\n",
            "template": "{{ .Prompt }}",
            "details": model.details,
            "model_info": {
                "general.architecture": arch,
                "general.basename": model.name.partition(":")[0],
                "general.finetune": "Instruct",
                "general.parameter_count": model.params,
                "general.size_label": model.shown_params,
                f"{arch}.context_length": model.ctx,
                "tokenizer.ggml.tokens": None,
            },
            "modified_at": stamp(0),
        }
        if model.num_ctx is not None:
            shown["parameters"] = (
                f'num_ctx                        {model.num_ctx}\nstop                           "<|end|>"'
            )
        if model.capabilities is not None:
            shown["capabilities"] = list(model.capabilities)
        return json_reply(shown)

    def _listed(self, model: FakeModel) -> dict[str, Any]:
        listed: dict[str, Any] = {"name": model.name, "model": model.name}
        if model.cloud is not None:
            listed |= {"remote_model": model.name.removesuffix("-cloud"), "remote_host": model.cloud}
        return listed | {
            "modified_at": stamp(0),
            "size": model.size,
            "digest": model.digest,
            "details": model.details,
        }

    def _running(self, runner: Runner) -> dict[str, Any]:
        model = runner.model
        told: dict[str, Any] = {
            "name": model.name,
            "model": model.name,
            "size": model.size,
            "digest": model.digest,
            "details": model.details,
            "expires_at": stamp(runner.expires_at),
            "context_length": runner.ctx,
        }
        vram = round(self.vram * model.size)
        return told | ({"size_vram": vram} if vram else {})

    # --- work ------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        told = await self._body(request)
        model = self.named(told)
        return await self._native(request, told, model, "response", bool(told.get("prompt")))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        told = await self._body(request)
        model = self.named(told)
        if model.capabilities is not None and "completion" not in model.capabilities:
            raise Refused(400, f'"{model.name}" does not support chat')
        return await self._native(request, told, model, "message", bool(told.get("messages")))

    async def _native(
        self, request: web.Request, told: dict[str, Any], model: FakeModel, member: str, asks: bool
    ) -> web.StreamResponse:
        empty = {member: "" if member == "response" else {"role": "assistant", "content": ""}}
        head = {"model": told.get("model") or told.get("name"), "created_at": stamp(self.wall())}
        keep_s = keep_alive_s(told.get("keep_alive"))
        if not asks and keep_s is not None and int(keep_s) == 0:
            self.runners.pop(model.name, None)
            return json_reply(head | empty | {"done": True, "done_reason": "unload"})
        if not asks:
            async with self.loaded(model, told):
                return json_reply(head | empty | {"done": True, "done_reason": "load"})
        stream = told.get("stream") is not False
        prompt = told.get("prompt") or json.dumps(told.get("messages"))
        reply: web.StreamResponse | None = None
        began = time.perf_counter_ns()
        words: list[str] = []
        async with self.loaded(model, told) as (runner, load_ns):
            async for word in self.words(runner, told.get("options") or {}):
                if reply is None and stream:
                    reply = web.StreamResponse(headers={"Content-Type": NDJSON})
                    await reply.prepare(request)
                if self.cut_after is not None and len(words) >= self.cut_after:
                    assert request.transport is not None
                    request.transport.abort()
                    return reply or web.Response()
                if self.break_after is not None and len(words) >= self.break_after:
                    if reply is None:
                        raise Refused(500, "an error was encountered while running the model")
                    await write_line(reply, {"error": "an error was encountered while running the model"})
                    return reply
                words.append(word)
                if reply is not None:
                    piece = word if member == "response" else {"role": "assistant", "content": word}
                    try:
                        await write_line(reply, head | {member: piece, "done": False})
                    except ConnectionError:
                        self.cancelled += 1
                        return reply
        text = "" if stream else "".join(words)
        last = head | {member: text if member == "response" else {"role": "assistant", "content": text}}
        last |= {"done": True, "done_reason": "length" if self.cap(told) is not None else "stop"}
        if member == "response":
            last["context"] = list(range(len(words)))
        last |= told_durations(
            total_duration=time.perf_counter_ns() - began,
            load_duration=load_ns,
            prompt_eval_count=max(1, len(prompt) // 4),
            prompt_eval_duration=round(self.prefill_s * 1e9),
            eval_count=len(words),
            eval_duration=max(1, round(self.token_s * len(words) * 1e9)),
        )
        if reply is None:
            return json_reply(last)
        await write_line(reply, last)
        return reply

    async def embed(self, request: web.Request) -> web.Response:
        told = await self._body(request)
        model = self.named(told)
        texts = told["input"] if isinstance(told.get("input"), list) else [told.get("input", "")]
        began = time.perf_counter_ns()
        async with self.loaded(model, told) as (_, load_ns):
            reply = {"model": told["model"], "embeddings": [vector(text) for text in texts]}
        return json_reply(
            reply
            | told_durations(
                total_duration=time.perf_counter_ns() - began,
                load_duration=load_ns,
                prompt_eval_count=sum(len(str(text)) // 4 + 1 for text in texts),
            )
        )

    async def embeddings(self, request: web.Request) -> web.Response:
        told = await self._body(request)
        async with self.loaded(self.named(told), told):
            return json_reply({"embedding": vector(told.get("prompt", ""))})


def _bound(answer: Any, fake: FakeOllama) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        reply: web.StreamResponse = await answer(fake, request)
        return reply

    return handler


_ROUTES: dict[str, Any] = {
    **ollama_openai.ROUTES,
    "GET /": FakeOllama.root,
    "GET /api/version": FakeOllama.told_version,
    "GET /api/tags": FakeOllama.tags,
    "GET /api/ps": FakeOllama.ps,
    "POST /api/show": FakeOllama.show,
    "POST /api/generate": FakeOllama.generate,
    "POST /api/chat": FakeOllama.chat,
    "POST /api/embed": FakeOllama.embed,
    "POST /api/embeddings": FakeOllama.embeddings,
}
