"""Where a client can put text: every part of a request, well-formed or not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.canary import Canaries

CHAT = "/v1/chat/completions"
HEADERS = (
    "accept", "accept-encoding", "accept-language", "anthropic-version", "authorization", "baggage", "cache-control",
    "cookie", "content-encoding", "content-language", "content-type", "date", "expect", "forwarded", "from",
    "if-match", "origin", "pragma", "prefer", "proxy-authorization", "range", "referer", "te", "traceparent",
    "tracestate", "trailer", "upgrade", "user-agent", "via", "warning", "x-api-key", "x-forwarded-for",
    "x-claude-code-session-id", "x-pairmesh-length", "x-pairmesh-locality", "x-pairmesh-model",
    "x-pairmesh-prefer", "x-pairmesh-require", "x-pairmesh-route", "x-pairmesh-state", "x-pairmesh-unheard-of",
    "x-session-id", "x-stainless-lang", "sec-fetch-site", "sec-websocket-key",
)  # fmt: skip
OTHER_PATHS = (
    "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank", "/api/chat",
    "/api/generate", "/api/embed", "/api/show", "/api/pull",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One well-formed HTTP request."""

    body: bytes
    path: str = CHAT
    headers: dict[str, str] = field(default_factory=dict)


def chat(**changes: Any) -> bytes:
    told = {"model": "answers-plain", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    return json.dumps(told | changes).encode()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def bodies(marks: Canaries) -> Iterator[bytes]:
    """Chats with text in each place of the body."""
    m = marks.mint
    yield chat(messages=user(m("prompt")))
    yield chat(messages=user(f"{m('long prompt')} " * 3_000))
    yield chat(messages=[{"role": "system", "content": m("system text")}, *user("x")])
    yield chat(messages=user([{"type": "text", "text": m("text part")}]))
    picture = f"data:image/png;base64,{m('picture')}"
    yield chat(messages=user([{"type": "image_url", "image_url": {"url": picture}}]))
    file = {"filename": m("file name"), "file_data": m("file data")}
    yield chat(messages=user([{"type": "file", "file": file}]))
    described = {"name": m("tool name"), "description": m("tool description")}
    parameters = {"type": "object", "properties": {m("tool parameter"): {"type": "string"}}}
    yield chat(tools=[{"type": "function", "function": described | {"parameters": parameters}}])
    called = {"name": m("called tool"), "arguments": json.dumps({"x": m("tool arguments")})}
    call = {"id": m("tool call id"), "type": "function", "function": called}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": m("tool call id"), "content": m("tool result")}
    yield chat(messages=[*user("x"), asked, result])
    yield chat(**{m("unknown field"): m("value of an unknown field")})
    yield chat(
        user=m("user"), metadata={"x": m("metadata")}, stop=[m("stop")], prompt_cache_key=m("cache key")
    )
    yield chat(response_format={"type": "json_schema", "json_schema": {"name": m("schema"), "schema": {}}})
    yield chat(pairmesh={"session": m("session in the body"), "prefer": [f"@{m('preferred node')}"]})
    yield chat(pairmesh={m("unknown hint"): 1, "require": [m("unknown term")]})
    yield chat(model=m("model name"))
    yield chat(model=f"org/{m('model path')}:{m('model tag')}@sha256")
    yield chat(model=f"\x00{m('bad model name')}")
    yield chat()[:-1] + b', "model": "%s"}' % m("second model name").encode()
    yield b'{"model": "answers-plain", "x": "' + m("bad json").encode()
    yield m("no json").encode()
    yield b'{"model": "answers-plain", "x": "\xff' + m("invalid utf-8").encode() + b'"}'
    yield b"[" * 5_000 + m("deep nesting").encode()


def requests(marks: Canaries) -> Iterator[Sent]:
    """Text in each part of a well-formed request."""
    yield from (Sent(body=body) for body in bodies(marks))
    for name in HEADERS:
        yield Sent(body=chat(), headers={name: marks.mint(f"header {name}")})
    yield Sent(body=chat(), headers={marks.mint("header name"): "x"})
    yield Sent(body=chat(), headers={"x-request-id": f"{marks.mint('malformed request id')} y"})
    yield Sent(body=chat(), headers={"x-pairmesh-require": f"cap={marks.mint('capability')}"})
    yield Sent(body=chat(), headers={"x-pairmesh-require": f"node=@{marks.mint('required node')}"})
    yield Sent(
        body=chat(), headers={"x-pairmesh-prefer": f"@{marks.mint('preferred')}/{marks.mint('endpoint')}"}
    )
    yield Sent(body=chat(), path=f"{CHAT}?{marks.mint('query name')}={marks.mint('query value')}")
    yield Sent(body=chat(), path=f"/v1/{marks.mint('path')}")
    yield Sent(body=b"", path=f"/v1/models/{marks.mint('model in the path')}")
    for path in OTHER_PATHS:
        text = marks.mint(f"{path}: text")
        told = {"prompt": text, "input": text, "query": text, "system": text, "messages": user(text)}
        yield Sent(body=chat(**told), path=path)
        yield Sent(body=chat(**told, model=marks.mint(f"{path}: model name")), path=path)


def native(marks: Canaries, model: str) -> Iterator[Sent]:
    """Text in each part of what Ollama's own clients send, for ``model``."""

    def m(plant: str) -> str:
        return marks.mint(f"native {plant}")

    def sent(path: str, **told: Any) -> Sent:
        return Sent(body=json.dumps({"model": model} | told).encode(), path=path)

    for stream in (False, True):
        yield sent("/api/generate", prompt=m("prompt"), system=m("system"), suffix=m("suffix"), stream=stream)
        yield sent("/api/generate", prompt="x", template=m("template"), raw=True, context=[1], stream=stream)
        yield sent("/api/generate", prompt="x", images=[m("picture")], stream=stream)
        yield sent("/api/generate", prompt="x", format={"title": m("schema")}, stream=stream)
        yield sent("/api/generate", prompt="x", options={m("option"): m("value")}, stream=stream)
        yield sent("/api/generate", prompt="x", keep_alive=m("keep alive"), stream=stream)
        yield sent("/api/chat", messages=user(m("message")), stream=stream)
        yield sent(
            "/api/chat", messages=[{"role": m("role"), "content": "x", "name": m("name")}], stream=stream
        )
        called = [
            {"function": {"name": m("called tool"), "arguments": {m("argument"): m("value of an argument")}}}
        ]
        yield sent("/api/chat", messages=[{"role": "assistant", "tool_calls": called}], stream=stream)
        yield sent("/api/chat", messages=user("x"), tools=[{"type": m("tool type")}], stream=stream)
    for path in ("/api/embed", "/api/embeddings"):
        yield sent(path, input=m("input"), prompt=m("input"))
    yield sent("/api/show", verbose=m("verbose"), system=m("shown system"))
    for path in (
        "/api/generate",
        "/api/chat",
        "/api/show",
        "/api/embed",
        "/api/pull",
        "/api/create",
        "/api/copy",
    ):
        yield sent(
            path, model=m("model"), name=m("old name"), source=m("source"), destination=m("destination")
        )
    yield Sent(body=b'{"model": "%s' % m("cut off").encode(), path="/api/chat")
    yield Sent(body=b"", path=f"/api/blobs/sha256:{m('blob')}")


def broken(marks: Canaries, host: str) -> Iterator[bytes]:
    """Bytes that are no proper request."""

    def mark(plant: str) -> bytes:
        return marks.mint(f"broken: {plant}").encode()

    head = b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\n" % (
        CHAT.encode(),
        host.encode(),
    )
    chunked = head + b"transfer-encoding: chunked\r\n\r\n"
    body = chat()
    yield chunked + mark("chunk size") + b"\r\n"
    yield chunked + b"5;x=%s\r\nhello\r\n0\r\n\r\n" % mark("chunk extension")
    yield chunked + b"5\r\nhello%s\r\n" % mark("behind a chunk")
    yield chunked + b"%x\r\n%s\r\n0\r\nx-trailer: %s\r\n\r\n" % (len(body), body, mark("trailer"))
    yield head + b"content-length: 5\r\n\r\nhello" + mark("behind a short length")
    yield head + b"content-length: %d\r\n\r\n%s%s" % (len(body), body, mark("behind a request"))
    yield head + b"content-length: %s\r\n\r\n" % mark("length")
    yield head + b"content-length: 500\r\n\r\n" + mark("cut off")
    yield head + mark("no colon") + b"\r\n\r\n"
    yield head + b" %s\r\n\r\n" % mark("folded")
    yield head + b"x-nul: %s\x00\r\n\r\n" % mark("nul")
    yield head + b"x-long: %s\r\n\r\n" % (mark("long header") * 2_000)
    yield b"%s / HTTP/1.1\r\nhost: %s\r\n\r\n" % (mark("method"), host.encode())
    yield b"GET /%s HTTP/1.1\r\nhost: %s\r\n\r\n" % (mark("long target") * 400, host.encode())
    yield b"GET http://%s/ HTTP/1.1\r\nhost: %s\r\n\r\n" % (mark("authority"), host.encode())
    yield b"GET / HTTP/%s\r\n\r\n" % mark("version")
    yield b"GET /v1/models HTTP/1.1\r\nhost: %s\r\n\r\n" % mark("host")
    yield b"CONNECT %s:1 HTTP/1.1\r\nhost: %s\r\n\r\n" % (mark("tunnel"), host.encode())
    yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + mark("http/2")
    yield b"\x16\x03\x01\x02\x00\x01" + mark("tls")
    yield mark("garbage") + b"\r\n\r\n"
