"""Generic OpenAI-compatible servers (gateways, llama-swap, TGI, llama-cpp-python, ...): flavour ``plain``.

They list their models, or the manifest does where they cannot. Nothing tells residency or load, so every
model counts as ready and the load is our own requests. Where the API lies below a path, what ``/health`` of the host
says is not about it.
"""

from collections.abc import Iterable
from typing import Any, Final

from agent.engines import shape
from agent.engines.client import FAST_S, SLOW_S, EngineClient
from agent.engines.contract import (
    EngineMisspoke,
    Identity,
    LoadSource,
    Observation,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    ResidencyState,
)
from agent.engines.listing import EngineList
from agent.engines.names import declared_only
from agent.settings.manifest import API_PATH, Manifest
from router_core import limits
from router_core.record.state import Dialect

SHORT_BYTES: Final = 256 * limits.KIB
"""A list up to here is read at every look."""
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
    """The dialects that a server's own description names, None if it names none."""
    paths = openapi.get("paths") if isinstance(openapi, dict) else None
    found = Dialect(0)
    for path, dialect in PATHS.items():
        if isinstance(paths, dict) and path in paths:
            found |= dialect
    return found or None


def listed_models(items: Iterable[dict[str, Any]]) -> tuple[OwnedModel, ...]:
    """The entries of an OpenAI model list. ``context_window`` 0 means unknown."""
    owned = []
    for item in items:
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
        self._listing: EngineList | None = None
        self._owned: tuple[OwnedModel, ...] = ()
        self._resident: tuple[ObservedModel, ...] = ()
        self._health_route = manifest.url.path == API_PATH
        self._lists = self._local = not manifest.remote_host

    @property
    def instance(self) -> str | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    @property
    def more_models(self) -> int:
        return self._listing.more if self._listing is not None else 0

    async def inventory(self) -> tuple[OwnedModel, ...]:
        """What it lists; of a ``cloud`` endpoint, whose list may be long and is not free, what the operator declares."""
        if self._only_declared:
            self._take(self._declared)
            return self._owned
        try:
            await self._list(SLOW_S)
        except EngineMisspoke as error:
            if not self._declared or error.reason in ("auth", "redirect", "loading"):
                raise
            self._take(self._declared)
        return self._owned

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        """On this host the list is the sign of life, too, so that a change of it is seen at once; elsewhere, and where it
        is long, whatever is answered under ``/health``."""
        before = self._listing
        if self._lists:
            try:
                await self._list(FAST_S)
            except EngineMisspoke as error:
                self._lists = error.reason != "too_large"
                if (self._lists and not self._declared) or error.reason in ("auth", "loading"):
                    raise
        elif self._health_route:
            reply = await self._client.get("/health", timeout_s=FAST_S, cap=limits.ENGINE_HEALTH_BODY)
            if reply.status not in (404, 405):
                reply.require()
        else:
            await self._client.touch()
        return Observation(
            resident=self._resident,
            load=ObservedLoad(source=LoadSource.OWN),
            owned=None if self._listing is before else self._owned,
        )

    async def _list(self, timeout_s: float) -> None:
        listing = await self._client.get_listing("/v1/models", "data", timeout_s=timeout_s)
        if listing is not self._listing:
            self._listing = listing
            self._lists = self._local and listing.size <= SHORT_BYTES
            self._take(listed_models(listing.items))

    def _take(self, owned: tuple[OwnedModel, ...]) -> None:
        if owned != self._owned:
            self._owned = owned
            self._resident = tuple(_ready(model) for model in owned)


def _ready(model: OwnedModel) -> ObservedModel:
    return ObservedModel(native_id=model.native_id, state=ResidencyState.RESIDENT, ctx=model.ctx_served)
