"""Generic OpenAI-compatible servers (gateways, llama-swap, TGI, llama-cpp-python, ...): flavour ``plain``.

They list their models, or the manifest does where they cannot. Nothing tells residency or load, so every
model counts as ready and the load is our own requests. Where the API lies below a path, what ``/health`` of the host
says is not about it.
"""

from typing import Any, Final

from agent.engines import shape
from agent.engines.client import FAST_S, SLOW_S, EngineClient
from agent.engines.contract import (
    EngineLoad,
    EngineMisspoke,
    Identity,
    LoadSource,
    Observation,
    OwnedModel,
    Residency,
    ResidentModel,
)
from agent.engines.names import declared_only
from agent.settings.manifest import API_PATH, Manifest
from router_core import limits
from router_core.record.state import Dialect

PATHS: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": Dialect.CHAT,
    "/v1/completions": Dialect.COMPLETION,
    "/v1/responses": Dialect.RESPONSES,
    "/v1/embeddings": Dialect.EMBED,
    "/v1/messages": Dialect.MESSAGES,
    "/v1/rerank": Dialect.RERANK,
}
"""Routes of ``/openapi.json`` and what they mean."""


def dialects_of(openapi: Any) -> Dialect | None:
    """The dialects a server's own description tells, None if it tells none."""
    paths = openapi.get("paths") if isinstance(openapi, dict) else None
    found = Dialect(0)
    for path, dialect in PATHS.items():
        if isinstance(paths, dict) and path in paths:
            found |= dialect
    return found or None


def listed_models(tree: Any) -> tuple[OwnedModel, ...]:
    """The entries of an OpenAI model list. ``context_window`` 0 means not told."""
    owned = []
    for item in shape.objects(tree, "data"):
        native = shape.text(item, "id")
        if native is not None:
            served = shape.whole(item, "max_model_len") or shape.whole(item, "context_window") or None
            parent = shape.text(item, "parent")
            owned.append(OwnedModel(native_id=native, name=native, ctx_served=served, parent=parent))
    return tuple(owned)


class OpenAiPlain:
    """Adapter for any server with an OpenAI-compatible API."""

    def __init__(self, client: EngineClient, identity: Identity, manifest: Manifest) -> None:
        self._client = client
        self._declared = declared_only(manifest.models)
        self._only_declared = manifest.cloud and bool(manifest.models)
        self._owned: tuple[OwnedModel, ...] = ()
        self._health_route = manifest.url.path == API_PATH

    @property
    def instance(self) -> str | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    async def inventory(self) -> tuple[OwnedModel, ...]:
        """What it lists; of a ``cloud`` endpoint, whose list may be long and is not free, what the operator declares."""
        if self._only_declared:
            self._owned = self._declared
            return self._owned
        try:
            self._owned = listed_models(await self._client.get_json("/v1/models", timeout_s=SLOW_S))
        except EngineMisspoke as error:
            if not self._declared or error.reason in ("auth", "redirect", "loading"):
                raise
            self._owned = self._declared
        return self._owned

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        if self._health_route:
            reply = await self._client.get("/health", timeout_s=FAST_S, cap=limits.ENGINE_HEALTH_BODY)
            self._health_route = reply.status not in (404, 405)
            if self._health_route:
                reply.require()
        if not self._health_route:
            await self._client.touch()
        return Observation(
            resident=tuple(_ready(model) for model in self._owned), load=EngineLoad(source=LoadSource.OWN)
        )


def _ready(model: OwnedModel) -> ResidentModel:
    return ResidentModel(native_id=model.native_id, state=Residency.RESIDENT, ctx=model.ctx_served)
