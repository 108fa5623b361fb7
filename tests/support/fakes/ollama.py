"""An Ollama that follows the wire schema of the real server, with random-free answers and settable times.

Models load on demand, the least recently used idle one makes room, ``keep_alive`` is honoured, another ``num_ctx``
loads anew. Every call is recorded. Answers are words ``w0 w1 ...``: as many as ``num_predict`` says.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

FOREVER_S = 2**63 / 1e9
KEEP_S = 300.0
WORDS = 8
NDJSON = "application/x-ndjson"
_PARTS = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """One model of the fake. ``cloud`` is the host that would really serve it; ``num_ctx`` a line of its parameters."""

    name: str
    size: int = 2_019_393_189
    params: int = 3_212_749_888
    shown_params: str = "3.2B"
    quant: str = "Q4_K_M"
    family: str = "llama"
    ctx: int = 131_072
    num_ctx: int | None = None
    capabilities: tuple[str, ...] | None = ("completion", "tools")
    cloud: str | None = None
    salt: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256((self.name + self.salt).encode()).hexdigest()

    @property
    def details(self) -> dict[str, Any]:
        return {
            "parent_model": "",
            "format": "gguf",
            "family": self.family,
            "families": [self.family],
            "parameter_size": self.shown_params,
            "quantization_level": self.quant,
        }


@dataclass(slots=True, kw_only=True)
class Runner:
    """One model in memory. ``expires_at`` is wall time; ``loaded`` is set once it can serve."""

    model: FakeModel
    ctx: int
    keep_s: float
    expires_at: float
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    places: asyncio.Semaphore
    in_use: int = 0
    used: int = 0


@dataclass(slots=True, kw_only=True)
class FakeOllama:
    """``load_s``, ``prefill_s`` and ``token_s`` are what work takes; change any of it while it runs.

    ``break_after`` tells an error in mid-stream after so many words, ``cut_after`` drops the connection there.
    ``gate``, if there is one, holds every load until it is set. ``vram`` is the share of a model on a GPU; 0 is left out of replies, as the real server does.
    """

    models: list[FakeModel]
    version: str = "0.13.3"
    default_ctx: int = 4_096
    vram: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    token_s: float = 0.0
    parallel: int = 1
    loaded_most: int = 3
    queue_most: int = 512
    broken: frozenset[str] = frozenset()
    break_after: int | None = None
    cut_after: int | None = None
    gate: asyncio.Event | None = None
    wall: Callable[[], float] = time.time
    calls: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    runners: dict[str, Runner] = field(default_factory=dict)
    cancelled: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    _waiting: int = 0
    _turn: int = 0

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

    def unload_all(self) -> None:
        """Forget what is in memory, as a restart would."""
        self.runners.clear()

    def find(self, name: str) -> FakeModel | None:
        """The model that goes by ``name``, tag optional, letter case ignored."""
        wanted = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
        return next((model for model in self.models if model.name.lower() == wanted.lower()), None)

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
            return await handler(request)
        except web.HTTPNotFound:
            return web.Response(status=404, text="404 page not found")
        except web.HTTPMethodNotAllowed:
            return web.Response(status=405, text="405 method not allowed")
        except Refused as refused:
            return refused.reply(openai=request.path.startswith("/v1/"))

    async def _body(self, request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        if not raw:
            raise Refused(400, "missing request body")
        try:
            told = json.loads(raw)
        except ValueError:
            raise Refused(400, "invalid character in request body") from None
        self.bodies.append(told)
        return told

    def _model(self, told: dict[str, Any]) -> FakeModel:
        name = told.get("model") or told.get("name")
        if not name:
            raise Refused(400, "model is required")
        model = self.find(name)
        if model is None:
            raise Refused(404, f"model '{name}' not found")
        return model

    # --- what is there ---------------------------------------------------------------------------------------

    async def root(self, request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def told_version(self, request: web.Request) -> web.Response:
        return _json({"version": self.version})

    async def tags(self, request: web.Request) -> web.Response:
        return _json({"models": [self._listed(model) for model in self.models]})

    async def ps(self, request: web.Request) -> web.Response:
        self._expire()
        running = sorted(self.runners.values(), key=lambda runner: -runner.expires_at)
        return _json({"models": [self._running(runner) for runner in running]})

    async def show(self, request: web.Request) -> web.Response:
        model = self._model(await self._body(request))
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
            "modified_at": _stamp(0),
        }
        if model.num_ctx is not None:
            shown["parameters"] = (
                f'num_ctx                        {model.num_ctx}\nstop                           "<|end|>"'
            )
        if model.capabilities is not None:
            shown["capabilities"] = list(model.capabilities)
        return _json(shown)

    def _listed(self, model: FakeModel) -> dict[str, Any]:
        listed: dict[str, Any] = {"name": model.name, "model": model.name}
        if model.cloud is not None:
            listed |= {"remote_model": model.name.removesuffix("-cloud"), "remote_host": model.cloud}
        return listed | {
            "modified_at": _stamp(0),
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
            "expires_at": _stamp(runner.expires_at),
            "context_length": runner.ctx,
        }
        vram = round(self.vram * model.size)
        return told | ({"size_vram": vram} if vram else {})

    # --- loading ---------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        now = self.wall()
        for name, runner in list(self.runners.items()):
            if runner.expires_at <= now and not runner.in_use and runner.loaded.is_set():
                del self.runners[name]

    @contextlib.asynccontextmanager
    async def _loaded(self, model: FakeModel, told: dict[str, Any]) -> AsyncIterator[tuple[Runner, int]]:
        """The runner of ``model``, loaded if need be, and the nanoseconds that took."""
        began = time.perf_counter_ns()
        if self._waiting >= self.queue_most:
            raise Refused(503, "server busy, please try again.  maximum pending requests exceeded")
        self._waiting += 1
        try:
            runner = await self._runner(model, told)
        finally:
            self._waiting -= 1
        took = time.perf_counter_ns() - began
        runner.in_use += 1
        try:
            yield runner, took
        finally:
            runner.in_use -= 1
            runner.expires_at = self.wall() + runner.keep_s

    async def _runner(self, model: FakeModel, told: dict[str, Any]) -> Runner:
        self._expire()
        options = told.get("options") or {}
        ctx = options.get("num_ctx") or model.num_ctx or self.default_ctx
        keep_s = keep_alive_s(told.get("keep_alive"))
        runner = self.runners.get(model.name)
        if runner is not None and runner.ctx != ctx and "num_ctx" in options:
            del self.runners[model.name]
            runner = None
        self._turn += 1
        if runner is None:
            while len(self.runners) >= self.loaded_most:
                idle = [r for r in self.runners.values() if not r.in_use]
                if not idle:
                    await asyncio.sleep(0.01)
                    continue
                del self.runners[min(idle, key=lambda r: r.used).model.name]
            runner = self.runners[model.name] = Runner(
                model=model,
                ctx=ctx,
                keep_s=KEEP_S if keep_s is None else keep_s,
                expires_at=self.wall() + KEEP_S,
                places=asyncio.Semaphore(self.parallel),
            )
            runner.used = self._turn
            self.loads.append(model.name)
            await asyncio.sleep(self.load_s)
            if self.gate is not None:
                await self.gate.wait()
            if model.name in self.broken:
                self.runners.pop(model.name, None)
                runner.loaded.set()
                raise Refused(500, "llama runner process has terminated: exit status 2")
            runner.loaded.set()
        runner.used = self._turn
        await runner.loaded.wait()
        if keep_s is not None:
            runner.keep_s = keep_s
        return runner

    # --- work ------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        told = await self._body(request)
        model = self._model(told)
        return await self._native(request, told, model, "response", bool(told.get("prompt")))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        told = await self._body(request)
        model = self._model(told)
        if model.capabilities is not None and "completion" not in model.capabilities:
            raise Refused(400, f'"{model.name}" does not support chat')
        return await self._native(request, told, model, "message", bool(told.get("messages")))

    async def _native(
        self, request: web.Request, told: dict[str, Any], model: FakeModel, member: str, asks: bool
    ) -> web.StreamResponse:
        empty = {member: "" if member == "response" else {"role": "assistant", "content": ""}}
        head = {"model": told.get("model") or told.get("name"), "created_at": _stamp(self.wall())}
        keep_s = keep_alive_s(told.get("keep_alive"))
        if not asks and keep_s is not None and int(keep_s) == 0:
            self.runners.pop(model.name, None)
            return _json(head | empty | {"done": True, "done_reason": "unload"})
        if not asks:
            async with self._loaded(model, told):
                return _json(head | empty | {"done": True, "done_reason": "load"})
        stream = told.get("stream") is not False
        prompt = told.get("prompt") or json.dumps(told.get("messages"))
        reply: web.StreamResponse | None = None
        began = time.perf_counter_ns()
        words: list[str] = []
        async with self._loaded(model, told) as (runner, load_ns):
            async for word in self._words(runner, told.get("options") or {}):
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
                    await _line(reply, {"error": "an error was encountered while running the model"})
                    return reply
                words.append(word)
                if reply is not None:
                    piece = word if member == "response" else {"role": "assistant", "content": word}
                    try:
                        await _line(reply, head | {member: piece, "done": False})
                    except ConnectionError:
                        self.cancelled += 1
                        return reply
        text = "" if stream else "".join(words)
        last = head | {member: text if member == "response" else {"role": "assistant", "content": text}}
        last |= {"done": True, "done_reason": "length" if self._cap(told) is not None else "stop"}
        if member == "response":
            last["context"] = list(range(len(words)))
        last |= _told_durations(
            total_duration=time.perf_counter_ns() - began,
            load_duration=load_ns,
            prompt_eval_count=max(1, len(prompt) // 4),
            prompt_eval_duration=round(self.prefill_s * 1e9),
            eval_count=len(words),
            eval_duration=max(1, round(self.token_s * len(words) * 1e9)),
        )
        if reply is None:
            return _json(last)
        await _line(reply, last)
        return reply

    async def _words(self, runner: Runner, options: dict[str, Any]) -> AsyncIterator[str]:
        """Words as they come: the prompt first, which nothing interrupts."""
        async with runner.places:
            await asyncio.sleep(self.prefill_s)
            for number in range(self._cap({"options": options}) or WORDS):
                await asyncio.sleep(self.token_s)
                yield f"w{number} "

    @staticmethod
    def _cap(told: dict[str, Any]) -> int | None:
        cap = (told.get("options") or {}).get("num_predict")
        return cap if cap is not None and cap > 0 else None

    async def embed(self, request: web.Request) -> web.Response:
        told = await self._body(request)
        model = self._model(told)
        texts = told["input"] if isinstance(told.get("input"), list) else [told.get("input", "")]
        began = time.perf_counter_ns()
        async with self._loaded(model, told) as (_, load_ns):
            reply = {"model": told["model"], "embeddings": [_vector(text) for text in texts]}
        return _json(
            reply
            | _told_durations(
                total_duration=time.perf_counter_ns() - began,
                load_duration=load_ns,
                prompt_eval_count=sum(len(str(text)) // 4 + 1 for text in texts),
            )
        )

    async def embeddings(self, request: web.Request) -> web.Response:
        told = await self._body(request)
        async with self._loaded(self._model(told), told):
            return _json({"embedding": _vector(told.get("prompt", ""))})

    # --- the OpenAI routes -----------------------------------------------------------------------------------

    async def v1_models(self, request: web.Request) -> web.Response:
        listed = [
            {"id": model.name, "object": "model", "created": 0, "owned_by": "library"}
            for model in self.models
        ]
        return _json({"object": "list", "data": listed})

    async def v1_chat(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, "chat.completion", "messages")

    async def v1_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._openai(request, "text_completion", "prompt")

    async def _openai(self, request: web.Request, kind: str, member: str) -> web.StreamResponse:
        told = await self._body(request)
        model = self._model(told)
        cap = told.get("max_tokens")
        options = {"num_predict": cap} if cap else {}
        prompt = max(1, len(json.dumps(told.get(member))) // 4)
        head = {"id": f"{kind[:4]}-1", "created": 0, "model": told["model"]}
        chat = kind == "chat.completion"
        async with self._loaded(model, told) as (runner, _):
            words = [word async for word in self._words(runner, options)]
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": len(words),
            "total_tokens": prompt + len(words),
        }
        if not told.get("stream"):
            text = "".join(words)
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
            choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            return _json(head | {"object": kind, "choices": [choice], "usage": usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for word in words:
            piece: dict[str, Any] = {"index": 0, "finish_reason": None}
            piece |= {"delta": {"role": "assistant", "content": word}} if chat else {"text": word}
            await _event(reply, head | {"object": f"{kind}.chunk" if chat else kind, "choices": [piece]})
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def v1_embeddings(self, request: web.Request) -> web.Response:
        told = await self._body(request)
        texts = told["input"] if isinstance(told.get("input"), list) else [told.get("input", "")]
        async with self._loaded(self._model(told), told):
            data = [
                {"object": "embedding", "index": index, "embedding": _vector(text)}
                for index, text in enumerate(texts)
            ]
        return _json(
            {
                "object": "list",
                "data": data,
                "model": told["model"],
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            }
        )


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self._status = status
        self._text = text

    def reply(self, *, openai: bool) -> web.Response:
        if openai:
            told: Any = {"message": self._text, "type": "api_error", "param": None, "code": None}
            return _json({"error": told}, self._status)
        return _json({"error": self._text}, self._status)


def keep_alive_s(told: Any) -> float | None:
    """Seconds of a ``keep_alive``: a number, or a Go duration; below 0 is for ever, None if not told."""
    if told is None:
        return None
    if isinstance(told, str):
        sign = -1 if told.startswith("-") else 1
        parts = _PARTS.findall(told)
        if not parts and told.strip("+-") != "0":
            raise Refused(400, "time: invalid duration")
        told = sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return FOREVER_S if told < 0 else float(told)


def _told_durations(**durations: int) -> dict[str, int]:
    return {name: value for name, value in durations.items() if value}


def _vector(text: Any) -> list[float]:
    return [byte / 255 for byte in hashlib.sha256(str(text).encode()).digest()]


def _stamp(at: float) -> str:
    """RFC 3339 with nanoseconds, as Go writes it. Times beyond what ``datetime`` reaches are cut to year 2318."""
    told = datetime.fromtimestamp(min(at, 11_000_000_000), UTC)
    return told.strftime("%Y-%m-%dT%H:%M:%S.") + f"{told.microsecond * 1000:09d}Z"


def _json(told: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(told, separators=(",", ":")).encode(),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )


async def _line(reply: web.StreamResponse, told: Any) -> None:
    await reply.write(json.dumps(told, separators=(",", ":")).encode() + b"\n")


async def _event(reply: web.StreamResponse, told: Any) -> None:
    await reply.write(b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n")


def _bound(answer: Any, fake: FakeOllama) -> Any:
    async def handler(request: web.Request) -> web.StreamResponse:
        reply: web.StreamResponse = await answer(fake, request)
        return reply

    return handler


_ROUTES: dict[str, Any] = {
    "GET /": FakeOllama.root,
    "GET /api/version": FakeOllama.told_version,
    "GET /api/tags": FakeOllama.tags,
    "GET /api/ps": FakeOllama.ps,
    "POST /api/show": FakeOllama.show,
    "POST /api/generate": FakeOllama.generate,
    "POST /api/chat": FakeOllama.chat,
    "POST /api/embed": FakeOllama.embed,
    "POST /api/embeddings": FakeOllama.embeddings,
    "GET /v1/models": FakeOllama.v1_models,
    "POST /v1/chat/completions": FakeOllama.v1_chat,
    "POST /v1/completions": FakeOllama.v1_completions,
    "POST /v1/embeddings": FakeOllama.v1_embeddings,
}
