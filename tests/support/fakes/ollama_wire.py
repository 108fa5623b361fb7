"""How an Ollama writes what it says: JSON, lines, events, times."""

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from tests.support.fakes.ollama_engine import Refused


def told_durations(**durations: int) -> dict[str, int]:
    return {name: value for name, value in durations.items() if value}


def vector(text: Any) -> list[float]:
    return [byte / 255 for byte in hashlib.sha256(str(text).encode()).digest()]


def stamp(at: float) -> str:
    """RFC 3339 with nanoseconds, as Go writes it. Times beyond what ``datetime`` reaches are cut to year 2318."""
    told = datetime.fromtimestamp(min(at, 11_000_000_000), UTC)
    return told.strftime("%Y-%m-%dT%H:%M:%S.") + f"{told.microsecond * 1000:09d}Z"


def json_reply(told: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(told, separators=(",", ":")).encode(),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )


async def write_line(reply: web.StreamResponse, told: Any) -> None:
    await reply.write(json.dumps(told, separators=(",", ":")).encode() + b"\n")


async def write_event(reply: web.StreamResponse, told: Any) -> None:
    await reply.write(b"data: " + json.dumps(told, separators=(",", ":")).encode() + b"\n\n")


async def read_body(request: web.Request) -> dict[str, Any]:
    """The JSON that was sent; raises ``Refused`` as the real server words it."""
    raw = await request.read()
    if not raw:
        raise Refused(400, "missing request body")
    try:
        told: dict[str, Any] = json.loads(raw)
    except ValueError:
        raise Refused(400, "invalid character in request body") from None
    return told


def error_reply(refused: Refused, *, openai: bool) -> web.Response:
    """The error in the words of the API that was called."""
    if openai:
        told: Any = {"message": refused.text, "type": "api_error", "param": None, "code": None}
        return json_reply({"error": told}, refused.status)
    return json_reply({"error": refused.text}, refused.status)
