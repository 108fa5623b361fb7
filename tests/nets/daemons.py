"""Net 4: 300 mixed requests through two real daemons with an engine each: status, headers and bodies, without ids and
times. Where more than one endpoint could serve, the request says which one, so that no measured time decides."""

import asyncio
import json
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
from aiohttp import web

from tests.nets.canonical import plain
from tests.nets.net import Net
from tests.support.field import Endpoint, OpenAiEngine, mesh, refusal

REQUESTS: Final = 300
_SEED: Final = "daemons"
_LEFT_OUT: Final = frozenset({"date", "server-timing", "content-length"})
_IDS: Final = frozenset({"x-pairmesh-decision-id", "x-request-id"})
_TIMES: Final = frozenset({"created", "modified_at", "expires_at"})
_COUNTS: Final = re.compile(rb"[a-z_]+ \d+(?:, [a-z_]+ \d+)+")
_GIVEN_ID: Final = "given-by-the-client"
_CAPS: Final = '[[models]]\nname = "plain"\ncaps = {vision = false, tools = false}\n'
_VIEWS: Final = (
    "/v1/models", "/v1/models/m", "/v1/models/absent", "/api/tags", "/api/version", "/api/ps", "/health", "/",
    "/nope", "/v1/chat/completions", "/api/pull", "/api/blobs/sha256:00",
)  # fmt: skip
_HINTS: Final = (
    {"prefer": "@nobody"},
    {"prefer": "@alpha"},
    {"class": "batch"},
    {"class": "nonsense"},
    {"require": "node=@nobody"},
    {"require": "%%"},
    {"require": "cap=vision"},
    {"require": "engine=ollama"},
    {"require": "ctx>=999999"},
    {"match": "family"},
    {"locality": "host"},
    {"expect-tokens": "40"},
    {"no-such-hint": "x"},
)
_BAD_BODIES: Final = (
    b"",
    b"{",
    b"[]",
    b'{"messages": []}',
    b'{"model": 7}',
    b'{"model": "m", "model": "n", "messages": []}',
    b'{"model": "bad\\u0000name", "messages": []}',
    b'{"model": "m", "messages": [], "pairmesh": 5}',
    b'{"model": "m", "messages": [], "pairmesh": {"class": "batch"}}',
    b"\xff\xfe",
)
_BAD_HEADERS: Final = (
    {"host": "elsewhere.example"},
    {"origin": "http://page.example"},
    {"sec-fetch-site": "cross-site"},
    {"via": "1.1 pairmesh"},
    {"content-type": "text/html", "cookie": "a=b"},
    {"content-encoding": "gzip"},
    {"authorization": "Bearer nothing"},
)


class Asked:
    """One request as it is sent."""

    def __init__(
        self, node: str, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> None:
        self.node, self.method, self.path, self.body, self.headers = node, method, path, body, headers


def requests() -> list[Asked]:
    """All of them, in order; the seed alone decides."""
    rng = Random(_SEED)
    return [_asked(rng) for _ in range(REQUESTS)]


def _asked(rng: Random) -> Asked:
    node, kind = rng.choice(("alpha", "beta")), rng.random()
    if kind < 0.15:
        method = rng.choice(("GET", "GET", "GET", "GET", "HEAD", "OPTIONS", "PUT", "DELETE"))
        return Asked(node, method, rng.choice(_VIEWS), None, {})
    headers = {"content-type": "application/json"}
    if rng.random() < 0.3:
        headers["x-request-id"] = _GIVEN_ID
    if kind < 0.24:
        path = rng.choice(
            ("/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate", "/api/pull")
        )
        return Asked(node, "POST", path, rng.choice(_BAD_BODIES), headers)
    if kind < 0.32:
        headers |= rng.choice(_BAD_HEADERS)
    model = rng.choice(("m", "m", "m", "n", "n", "n", "plain", "both", "both", "absent"))
    if model == "both":
        headers["x-pairmesh-require"] = f"node=@{rng.choice(('alpha', 'beta'))}"
    elif rng.random() < 0.35:
        name, value = rng.choice([*rng.choice(_HINTS).items()])
        headers[f"x-pairmesh-{name}"] = value
    if rng.random() < 0.15:
        headers["x-session-id"] = rng.choice(("s1", "s2"))
    path = rng.choice(
        ("/v1/chat/completions",) * 6 + ("/v1/completions", "/v1/embeddings", "/api/chat", "/api/show")
    )
    return Asked(node, "POST", path, json.dumps(_body(rng, path, model)).encode(), headers)


def _body(rng: Random, path: str, model: str) -> dict[str, Any]:
    does = rng.choice(("well",) * 9 + ("400", "404", "422", "429", "500", "cut"))
    if path == "/v1/embeddings":
        return {"model": model, "input": ["one", "two"]}
    if path == "/v1/completions":
        return {"model": model, "prompt": f"{does} hello", "max_tokens": 3}
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": f"{does} hello"}]}
    if rng.random() < 0.5:
        body["stream"] = True
    if rng.random() < 0.3:
        body["max_tokens"] = rng.choice((1, 5))
    if rng.random() < 0.1:
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    if rng.random() < 0.1:
        body["pairmesh"] = {"class": "batch"}
    return body


async def _does_as_told(request: web.Request, body: dict[str, Any]) -> web.StreamResponse | None:
    """The first word of the prompt says what the engine does."""
    messages = body.get("messages") or [{"content": body.get("prompt", "")}]
    does = str(messages[0]["content"]).partition(" ")[0]
    if does.isdigit():
        return refusal(int(does), "as the prompt says")
    if does != "cut":
        return None
    reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await reply.prepare(request)
    await reply.write(b'data: {"choices": [{"index": 0, "delta": {"content": "w"}}]}\n\n')
    assert request.transport is not None
    request.transport.close()
    return reply


async def replies() -> list[dict[str, Any]]:
    """What became of each request."""
    engines = [
        OpenAiEngine(models=dict.fromkeys(names, 8192), length=4, answer=_does_as_told)
        for names in (("m", "plain", "both"), ("n", "both"))
    ]
    with tempfile.TemporaryDirectory() as base:
        async with engines[0].serving() as one, engines[1].serving() as other:
            alpha, beta = Endpoint(url=one, extra=_CAPS), Endpoint(url=other)
            async with (
                mesh(Path(base), alpha=[alpha], beta=[beta]) as cluster,
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            ):
                return [
                    await _reply(session, f"{cluster[asked.node].api}{asked.path}", asked)
                    for asked in requests()
                ]


async def _reply(session: aiohttp.ClientSession, url: str, asked: Asked) -> dict[str, Any]:
    body, broke = b"", False
    async with session.request(asked.method, url, data=asked.body, headers=asked.headers) as reply:
        try:
            async for piece in reply.content.iter_any():
                body += piece
        except aiohttp.ClientPayloadError:
            broke = True
        return {
            "asked": f"{asked.method} {asked.path} at {asked.node}",
            "status": reply.status,
            "headers": sorted(_header(name.lower(), value) for name, value in reply.headers.items()
                              if name.lower() not in _LEFT_OUT),
            "body": _told(body),
            "broke": broke,
        }  # fmt: skip


def _header(name: str, value: str) -> str:
    return f"{name}: {'an id' if name in _IDS and value != _GIVEN_ID else value}"


def _told(body: bytes) -> Any:
    """A body as JSON without times, or its text; counts of a refusal in order, which else is that of random node ids."""
    body = _COUNTS.sub(lambda hit: b", ".join(sorted(hit[0].split(b", "))), body)
    try:
        return plain(json.loads(body), without=_TIMES)
    except ValueError:
        return re.sub(r'"created": ?\d+', '"created":0', body.decode("utf-8", "replace"))


def _run(label: str) -> list[dict[str, Any]]:
    assert label == "all"
    return asyncio.run(replies())


DAEMONS: Final = Net(
    name="daemons",
    about="300 mixed requests through two real daemons: status, headers, bodies, without ids and times",
    labels=lambda: ["all"],
    run=_run,
    whole=5,
)
