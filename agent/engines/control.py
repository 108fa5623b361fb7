"""Telling an engine what to hold: the only calls of this room that change anything.

Kept apart from the adapters, whose client cannot send them; a connection lives for one order. Rules: an order is sent
once and never repeated; nothing is unloaded that its engine says is in use; engines on other hosts are not ours to
order. Whether an order was right, and whether it has shown effect, is somebody else's to see.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, Protocol
from urllib.parse import quote

import msgspec

from agent.engines.client import FAST_S, SLOW_S, EngineClient, EngineReply
from agent.engines.contract import (
    EndpointStatus,
    EngineBusy,
    EngineControl,
    EngineUnreachable,
)
from agent.engines.exposition import read_values
from agent.engines.llamacpp import RUNNING, WAITING
from agent.settings.manifest import EngineKind
from router_core import limits

KEEP_S: Final = 1_800
"""How long Ollama keeps what we loaded, if nobody asks for it: after that its worth is not what it was."""
_NO_METRICS: Final = frozenset({404, 501})


class OrderingClient(EngineClient):
    """A client that can post. Close it after the order."""

    async def order(self, path: str, body: dict[str, Any], timeout_s: float) -> EngineReply:
        """POST ``body`` to ``path``; any status is an answer here."""
        headers = {"Content-Type": "application/json"}
        return await self._ask(
            "POST", path, timeout_s, limits.ENGINE_BODY, headers, msgspec.json.encode(body)
        )


class LlamaRouterControl:
    """Orders for llama.cpp's ``llama-server`` in router mode, which answers before an order is carried out."""

    def __init__(self, status: EndpointStatus) -> None:
        self._status = status

    async def load(self, native_id: str, within_s: float) -> None:
        async with _ordering(self._status) as client:
            reply = await client.order("/models/load", {"model": native_id}, min(within_s, SLOW_S))
            if not _says(reply, b"already running"):
                reply.require()

    async def unload(self, native_id: str) -> None:
        async with _ordering(self._status) as client:
            await self._require_unused(client, native_id)
            reply = await client.order("/models/unload", {"model": native_id}, SLOW_S)
            if not _says(reply, b"not running"):
                reply.require()

    async def _require_unused(self, client: EngineClient, native_id: str) -> None:
        """Raise :class:`EngineBusy` if a request is in the model; a server without metrics cannot tell."""
        query = f"?model={quote(native_id, safe='')}&autoload=false"
        try:
            reply = await client.get("/metrics" + query, timeout_s=FAST_S)
        except EngineUnreachable as error:
            if error.reason == "timeout":
                raise EngineBusy("silent", "no metrics in time") from None
            raise
        if reply.status in _NO_METRICS or _says(reply, b"not loaded"):
            return
        if any(read_values(reply.require().body, {RUNNING, WAITING}).values()):
            raise EngineBusy("in_use")


class OllamaControl:
    """Orders for Ollama: a generation of nothing loads, one that is kept for no time unloads once nobody uses it."""

    def __init__(self, status: EndpointStatus) -> None:
        self._status = status

    async def load(self, native_id: str, within_s: float) -> None:
        await self._generate(native_id, KEEP_S, within_s)

    async def unload(self, native_id: str) -> None:
        await self._generate(native_id, 0, SLOW_S)

    async def _generate(self, native_id: str, keep_s: int, within_s: float) -> None:
        async with _ordering(self._status) as client:
            body = {"model": native_id, "keep_alive": keep_s, "stream": False}
            (await client.order("/api/generate", body, within_s)).require()


class ControlFactory(Protocol):
    """Makes the control that loads and unloads models of one endpoint."""

    def __call__(self, status: EndpointStatus) -> EngineControl: ...


CONTROLS: Final[dict[tuple[EngineKind, str], ControlFactory]] = {
    (EngineKind.LLAMACPP, "router"): LlamaRouterControl,
    (EngineKind.OLLAMA, "native"): OllamaControl,
}
"""The engines that can be told what to hold."""


def control_of(status: EndpointStatus) -> EngineControl | None:
    """What orders the engine of ``status``; None if it takes no orders, is on another host, or is not up."""
    identity = status.identity
    if identity is None or status.manifest.remote_host or not status.health.takes_requests:
        return None
    made = CONTROLS.get((identity.engine, identity.flavour))
    return made(status) if made is not None else None


@contextlib.asynccontextmanager
async def _ordering(status: EndpointStatus) -> AsyncIterator[OrderingClient]:
    client = OrderingClient(status.manifest, status.credential)
    try:
        yield client
    finally:
        await client.aclose()


def _says(reply: EngineReply, words: bytes) -> bool:
    return reply.status == 400 and words in reply.body[:512].lower()
