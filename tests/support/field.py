"""What a field case needs in a few lines: an engine to script, real daemons around it, and a client.

    engine = OpenAiEngine(models={"m": 4096}, whole_s=2.0)
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        reply = await chat(cluster["beta"], "m")
    assert reply.status == 200 and engine.asked[0].body["model"] == "m"

Every daemon is a process of its own with its own folders, ports and loopback address. Nothing here looks inside one.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.cluster import Cluster, Node, closing, pair, wait_for

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse | None]]
"""Answers a POST in place of the engine; None lets the engine answer as usual."""
WORK = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request that reached an engine. ``raw`` are the body's bytes, ``body`` is empty where they are no JSON object."""

    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]


@dataclass(kw_only=True)
class OpenAiEngine:
    """An OpenAI-compatible server in the manner of vLLM 0.32 (lists ``max_model_len``, reports ``usage``), without its metrics.

    Written from recorded exchanges of vLLM. ``models`` are names with their context, None where none is told. The
    first token comes ``first_s`` after a slot took the request, each further one after ``token_s``; a whole answer
    takes ``whole_s`` where that is set. Without a cap an answer has ``length`` tokens. ``slots`` requests are
    worked on at once, the rest waits. All fields may be changed while it serves.
    """

    models: dict[str, int | None] = field(default_factory=lambda: {"m": 8192})
    first_s: float = 0.0
    token_s: float = 0.0
    whole_s: float | None = None
    length: int = 8
    slots: int = 256
    deaf: bool = False
    """True: lists and health are not answered at all, work is."""
    answer: Answer | None = None
    look: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """Answers ``/v1/models`` in place of the engine."""
    asked: list[Asked] = field(default_factory=list)
    most: int = 0
    """The largest number of requests that were in it at once, waiting ones included."""
    hung_up: int = 0
    """Requests whose client left before their end."""

    @contextlib.asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Listen for the length of the block; the base URL."""
        self._free = asyncio.Semaphore(self.slots)
        self._inside = 0
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/{path:.*}", self._look)
        app.router.add_post("/{path:.*}", self._work)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handle_signals=False, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            at = runner.addresses[0]
            yield f"http://{at[0]}:{at[1]}"
        finally:
            await runner.cleanup()

    def count(self, path: str = WORK[0]) -> int:
        """How many requests came for that route."""
        return sum(asked.path == path for asked in self.asked)

    async def _look(self, request: web.Request) -> web.StreamResponse:
        if self.deaf:
            await asyncio.Event().wait()
        if request.path == "/v1/models":
            if self.look is not None:
                return await self.look(request)
            return web.json_response({"object": "list", "data": [self._listed(name) for name in self.models]})
        if request.path == "/health":
            return web.Response()
        return web.json_response({"detail": "Not Found"}, status=404)

    def _listed(self, name: str) -> dict[str, Any]:
        told = {
            "id": name,
            "object": "model",
            "created": 1,
            "owned_by": "field",
            "root": name,
            "parent": None,
        }
        limit = self.models[name]
        return told if limit is None else told | {"max_model_len": limit}

    async def _work(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
        except ValueError:
            body = {}
        body = body if isinstance(body, dict) else {}
        self.asked.append(Asked(path=request.path, headers=request.headers.copy(), raw=raw, body=body))
        self._inside += 1
        self.most = max(self.most, self._inside)
        try:
            if self.answer is not None and (said := await self.answer(request, body)) is not None:
                return said
            if body.get("model") not in self.models:
                return refusal(404, f"The model `{body.get('model')}` does not exist.", kind="NotFoundError")
            if request.path not in WORK:
                return web.json_response({"detail": "Not Found"}, status=404)
            async with self._free:
                return await self._said(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.hung_up += 1
            raise
        finally:
            self._inside -= 1

    async def _said(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/v1/embeddings":
            given = body.get("input")
            items = (
                given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
            )
            data = [{"object": "embedding", "index": n, "embedding": [0.0, 1.0]} for n, _ in enumerate(items)]
            used = {"prompt_tokens": len(items), "total_tokens": len(items)}
            return web.json_response({"object": "list", "data": data, "model": body["model"], "usage": used})
        cap = body.get("max_completion_tokens") or body.get("max_tokens")
        count = cap if isinstance(cap, int) else self.length
        if body.get("stream") is True:
            return await self._streamed(request, body, count)
        took = self.first_s + (count - 1) * self.token_s if self.whole_s is None else self.whole_s
        await asyncio.sleep(took)
        return web.json_response(completion(body["model"], count, prompt_tokens=_tokens(body)))

    async def _streamed(self, request: web.Request, body: dict[str, Any], count: int) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await asyncio.sleep(self.first_s)
        await reply.prepare(request)
        for n in range(count):
            if n:
                await asyncio.sleep(self.token_s)
            await reply.write(event(body["model"], f"w{n} ", last=n == count - 1))
        if (body.get("stream_options") or {}).get("include_usage"):
            used = {"prompt_tokens": _tokens(body), "completion_tokens": count}
            told = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            await reply.write(_event(told | {"choices": [], "usage": used}))
        await reply.write(b"data: [DONE]\n\n")
        return reply


def completion(model: str, count: int, *, prompt_tokens: int = 8) -> dict[str, Any]:
    """A whole chat completion of ``count`` tokens."""
    message = {"role": "assistant", "content": " ".join(f"w{n}" for n in range(count))}
    return {
        "id": "chatcmpl-x",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
        },
    }


def event(model: str, text: str, *, last: bool = False) -> bytes:
    """One event of a streamed chat."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop" if last else None}
    return _event(
        {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}
    )


def _event(told: object) -> bytes:
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def refusal(status: int, message: str, *, kind: str = "BadRequestError") -> web.Response:
    """An error as vLLM words it."""
    told = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": told}, status=status)


def _tokens(body: dict[str, Any]) -> int:
    return max(1, len(json.dumps(body.get("messages", body.get("prompt", "")))) // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A manifest to write: ``extra`` are further lines of it."""

    url: str
    engine: str = "openai"
    name: str = "engine"
    extra: str = ""

    def manifest(self) -> str:
        return f'engine = "{self.engine}"\nurl = "{self.url}"\n{self.extra}'


@contextlib.asynccontextmanager
async def mesh(
    base: Path,
    *,
    settings: str = "",
    env: Mapping[str, str] | None = None,
    policy: str = "",
    **nodes: Iterable[str | Endpoint],
) -> AsyncIterator[Cluster]:
    """Daemons by name, each with its endpoints, running, paired, and ready to serve what their engines list.

    ``settings`` goes to the end of every ``pairmesh.toml``, ``policy`` becomes every ``policy.toml``.
    """
    made = [
        Node(name=name, ip=f"127.0.0.{number}", base=base / name, more_env=dict(env or {}))
        for number, name in enumerate(nodes, start=2)
    ]
    cluster = Cluster(base=base, nodes=made, engines=[])
    async with closing(cluster):
        for node in made:
            node.write_settings(
                [f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in made if o is not node], settings
            )
            if policy:
                (node.config / "policy.toml").write_text(policy)
            for number, told in enumerate(nodes[node.name], start=1):
                endpoint = Endpoint(url=told, name=f"engine{number}") if isinstance(told, str) else told
                (node.config / "endpoints" / f"{endpoint.name}.toml").write_text(endpoint.manifest())
        await asyncio.gather(*(node.start() for node in made))
        await pair(made)
        for node in made:
            await wait_for(partial(_sees, node, nodes), 15, f"{node.name} sees all nodes and engines")
        yield cluster


async def _sees(node: Node, wanted: Mapping[str, Iterable[object]]) -> bool:
    members = await node.members()
    return all(
        name in members
        and members[name]["routable"]
        and sum(bool(engine["models"]) for engine in members[name]["engines"]) >= len(list(endpoints))
        for name, endpoints in wanted.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a client got. Header names are in lower case; ``seconds`` from sending to the end."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    seconds: float

    @property
    def body(self) -> Any:
        """The JSON of a whole answer."""
        return json.loads(self.raw)

    @property
    def code(self) -> str:
        """The code of an error in the OpenAI format."""
        return str(self.body["error"]["code"])


async def post(
    node: Node,
    path: str,
    body: Mapping[str, Any] | bytes,
    *,
    headers: Mapping[str, str] | None = None,
    within_s: float = 60.0,
) -> Reply:
    """One request to a node's API on a connection of its own; TimeoutError after ``within_s``."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | dict(headers or {})
    timeout = aiohttp.ClientTimeout(total=within_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{node.api}{path}", data=data, headers=sent) as reply,
    ):
        raw = await reply.read()
        told = {name.lower(): value for name, value in reply.headers.items()}
        return Reply(status=reply.status, headers=told, raw=raw, seconds=loop.time() - began)


async def chat(
    node: Node,
    model: str = "m",
    *,
    text: str = "hello",
    headers: Mapping[str, str] | None = None,
    within_s: float = 60.0,
    **more: Any,
) -> Reply:
    """A chat completion with one message; ``more`` are further members of the body."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]} | more
    return await post(node, WORK[0], body, headers=headers, within_s=within_s)


def served_by(reply: Reply) -> str:
    """The name of the node that answered."""
    return reply.headers["x-pairmesh-node"].partition("/")[0].removeprefix("@").partition("~")[0]
