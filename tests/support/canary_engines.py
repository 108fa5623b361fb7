"""Engines that say marked text in every way an engine can: answers, echoes of the prompt, errors, and broken HTTP.

Each misbehaves by one script and answers properly for the model named ``<script>-plain``, on the same sockets.
"""

import json
from collections.abc import Callable

from tests.support.canary import Canaries
from tests.support.scripted_engine import STREAM_HEAD, Script, ScriptedEngine, Wire, chunk, event, whole

END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def answer(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    told = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return json.dumps(
        told | {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    ).encode()


def says(text: str) -> Script:
    """``text``, streamed if that was asked for."""

    async def script(wire: Wire, body: bytes) -> None:
        if json.loads(body.decode("latin-1")).get("stream"):
            wire.write(STREAM_HEAD + event(text) + END)
        else:
            wire.write(whole(200, answer(text)))

    return script


def refuses(status: int) -> Script:
    """An error that quotes the request."""

    async def script(wire: Wire, body: bytes) -> None:
        quoted = json.dumps({"error": {"message": f"cannot serve {body.decode()}", "type": "x"}}).encode()
        wire.write(whole(status, quoted))

    return script


def writes(make: Callable[[bytes], bytes]) -> Script:
    """Whatever ``make`` makes of the request's body; then the connection ends."""

    async def script(wire: Wire, body: bytes) -> None:
        wire.write(make(body))
        await wire.drain()
        wire.close()

    return script


def scripts(marks: Canaries) -> dict[str, Script]:
    def mark(plant: str) -> bytes:
        return marks.mint(f"engine: {plant}").encode()

    broken_event = b'data: {"error":{"message":"%s"}}\n\n' % mark("error in mid-stream")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    return {
        "answers": says(marks.mint("engine: answer")),
        "scolds": refuses(400),
        "breaks": refuses(500),
        "overloaded": refuses(503),
        "loses": writes(
            lambda body: STREAM_HEAD + event(mark("stream that is lost").decode()) + chunk(broken_event + body)
        ),
        "garbles": writes(lambda body: STREAM_HEAD + event("x") + mark("malformed chunk") + b"\r\n" + body),
        "overflows": writes(lambda body: head + b"content-length: 2\r\n\r\n{}" + mark("surplus") + body),
        "falls-short": writes(lambda body: head + b"content-length: 99999\r\n\r\n" + mark("cut short") + body),
        "bad-head": writes(lambda body: head + mark("header without colon") + b"\r\n\r\n" + body),
        "bad-line": writes(lambda body: mark("status line") + b" " + body + b"\r\n\r\n"),
        "odd-head": writes(
            lambda body: b"HTTP/1.1 200 %s\r\ncontent-type: application/json\r\nx-odd: %s\r\nserver: %s\r\n"
            b"content-length: 2\r\n\r\n{}" % (mark("reason phrase"), mark("unknown header"), mark("server"))
        ),
        "trails": writes(
            lambda body: head
            + b"transfer-encoding: chunked\r\n\r\n2;x=%s\r\n{}\r\n0\r\nx-trailer: %s\r\n\r\n"
            % (mark("chunk extension"), mark("trailer"))
        ),
    }  # fmt: skip


def engines(marks: Canaries) -> dict[str, ScriptedEngine]:
    """One engine per script."""
    return {
        name: ScriptedEngine({name: script, f"{name}-plain": says("all is well")})
        for name, script in scripts(marks).items()
    }
