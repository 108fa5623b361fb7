"""Ollama's own API: what it owns, what is in its memory, and nothing that would load or keep a model.

``/api/tags`` and ``/api/ps`` are read again and again, ``/api/show`` once per digest. Ollama tells no load, so the
load is our own requests. A model that is still loading is listed like a loaded one: it counts as loading while a
request of ours that began before the entry appeared has not got a byte. Models that run in Ollama's cloud are
marked, so that they are never offered.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from msgspec import Struct

from agent.engines import shape
from agent.engines.client import SLOW_S, EngineClient, EngineReply
from agent.engines.contract import (
    FOREVER_S,
    EngineMisspoke,
    EngineUnreachable,
    Identity,
    LoadSource,
    Observation,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    ResidencyState,
)
from agent.engines.gguf import base_of
from agent.engines.quants import quant_of
from agent.settings.manifest import Caps, Manifest
from router_core.record.state import Capability, Dialect

RESPONSES_SINCE: Final = (0, 13, 3)
"""The version from which ``/v1/responses`` is there; ``/v1/messages`` is tried from the same one on."""

_NEVER_S: Final = 10 * 365 * 86_400
_SHOWN_MOST: Final = 1_024
_NUM_CTX = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)
_PARAMETERS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s?([KMBT])")
_SCALES: Final = {"K": 1e-6, "M": 1e-3, "B": 1.0, "T": 1e3}
_NUMBERS = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_CAPABILITIES: Final = {
    "tools": Capability.TOOLS,
    "vision": Capability.VISION,
    "embedding": Capability.EMBEDDINGS,
    "thinking": Capability.REASONING,
    "audio": Capability.AUDIO_IN,
}


def dialects_of(version: str, least: Dialect) -> Dialect:
    """What a server of ``version`` speaks: ``least``, and newer routes if its number is high enough."""
    numbers = _NUMBERS.match(version)
    if numbers is None or tuple(int(part) for part in numbers.groups()) < RESPONSES_SINCE:
        return least
    return least | Dialect.RESPONSES | Dialect.MESSAGES


class Shown(Struct, frozen=True, gc=False, kw_only=True):
    """What ``/api/show`` says of one model; empty if it says nothing."""

    params_b: float | None = None
    ctx_max: int | None = None
    num_ctx: int | None = None
    base: str | None = None
    family: str | None = None
    caps: Caps | None = None


class Ollama:
    """Adapter for one Ollama server."""

    def __init__(self, client: EngineClient, identity: Identity, manifest: Manifest) -> None:
        self._client = client
        self._shown: dict[tuple[str, str], Shown] = {}
        self._appeared: dict[str, int] = {}
        self._waiting: Mapping[str, int] = {}
        self._more = 0

    @property
    def instance(self) -> str | None:
        return None

    @property
    def restarts(self) -> int:
        return 0

    @property
    def more_models(self) -> int:
        return self._more

    def awaits(self, since_ms: Mapping[str, int]) -> None:
        self._waiting = since_ms

    async def inventory(self) -> tuple[OwnedModel, ...]:
        listed = await self._client.get_listing("/api/tags", "models", timeout_s=SLOW_S)
        self._more = listed.more + max(0, len(listed.items) - _SHOWN_MOST)
        owned = []
        shown: dict[tuple[str, str], Shown] = {}
        for item in listed.items[:_SHOWN_MOST]:
            name = shape.text(item, "model") or shape.text(item, "name")
            if name is None:
                continue
            told = Shown()
            if is_local(item, name):
                key = (name, shape.text(item, "digest") or "")
                known = self._shown.get(key) or await self._show(name)
                if known is not None:
                    shown[key] = told = known
            owned.append(owned_model(item, name, told))
        self._shown = shown
        return tuple(owned)

    async def observe(self, now_ms: int, period_ms: int) -> Observation:
        reply = (await self._client.get("/api/ps")).require()
        wall = _date_of(reply)
        resident = tuple(
            model for item in shape.objects(reply.json(), "models") if (model := resident_model(item, wall))
        )
        self._appeared = {model.native_id: self._appeared.get(model.native_id, now_ms) for model in resident}
        return Observation(
            resident=tuple(self._inferred(model) for model in resident),
            load=ObservedLoad(source=LoadSource.OWN),
        )

    def _inferred(self, model: ObservedModel) -> ObservedModel:
        since = self._waiting.get(model.native_id)
        if model.state is not ResidencyState.RESIDENT or since is None:
            return model
        if since > self._appeared[model.native_id]:
            return model
        return ObservedModel(native_id=model.native_id, state=ResidencyState.LOADING, ctx=model.ctx)

    async def _show(self, name: str) -> Shown | None:
        """What the engine tells of ``name``; None if it could not tell now and should be asked again."""
        try:
            reply = await self._client.show(name)
        except EngineUnreachable as error:
            if error.reason != "timeout":
                raise
            return None
        if reply.status in (401, 403):
            reply.require()
        if reply.status >= 500:
            return None
        try:
            return shown_of(reply.json()) if reply.status == 200 else Shown()
        except EngineMisspoke:
            return Shown()


def is_local(item: dict[str, Any], name: str) -> bool:
    """Whether a listed model runs on this engine's own host, and not in Ollama's cloud."""
    remote = shape.text(item, "remote_model") or shape.text(item, "remote_host")
    tag = name.rpartition("/")[2].partition(":")[2]
    return remote is None and not tag.lower().endswith("cloud")


def owned_model(item: dict[str, Any], name: str, shown: Shown) -> OwnedModel:
    """One entry of ``/api/tags`` with what ``/api/show`` says of it."""
    return OwnedModel(
        native_id=name,
        name=name,
        digest=_digest(shape.text(item, "digest")),
        size_bytes=shape.whole(item, "size") or None,
        params_b=shown.params_b or _parameters(shape.text(item, "details", "parameter_size")),
        ctx_max=shown.ctx_max,
        ctx_served=shown.num_ctx,
        quant=quant_of(shape.text(item, "details", "quantization_level")),
        base=shown.base,
        family=(shown.family or shape.text(item, "details", "family") or "")[:48] or None,
        format=shape.text(item, "details", "format"),
        caps=shown.caps or _caps(item) or Caps(),
        local=is_local(item, name),
        modified_at=shape.text(item, "modified_at"),
    )


def shown_of(tree: Any) -> Shown:
    """The facts in an answer of ``/api/show``. A ``num_ctx`` parameter cuts what one request may use."""
    arch = shape.text(tree, "model_info", "general.architecture")
    basename = shape.text(tree, "model_info", "general.basename")
    size = shape.text(tree, "model_info", "general.size_label")
    count = shape.whole(tree, "model_info", "general.parameter_count")
    finetune = shape.text(tree, "model_info", "general.finetune")
    version = shape.text(tree, "model_info", "general.version")
    ctx_max = shape.whole(tree, "model_info", f"{arch}.context_length") if arch is not None else None
    parameters = tree.get("parameters") if isinstance(tree, dict) else None
    line = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
    return Shown(
        params_b=count / 1e9 if count else None,
        ctx_max=ctx_max or None,
        num_ctx=int(line[1]) or None if line is not None else None,
        base=base_of(basename, finetune, size, version),
        family=arch,
        caps=_caps(tree),
    )


def resident_model(item: dict[str, Any], wall: datetime | None) -> ObservedModel | None:
    """One entry of ``/api/ps``, None if it has no name. ``wall`` is the engine's own time.

    A split that cannot be (more on the GPU than there is, or no size at all) is unknown.
    """
    name = shape.text(item, "model") or shape.text(item, "name")
    if name is None:
        return None
    size, vram = shape.whole(item, "size") or None, shape.whole(item, "size_vram") or 0
    left = _seconds_left(shape.text(item, "expires_at"), wall)
    return ObservedModel(
        native_id=name,
        state=ResidencyState.UNLOADING if left is not None and left < 0 else ResidencyState.RESIDENT,
        ctx=shape.whole(item, "context_length") or None,
        total_bytes=size,
        vram_bytes=vram if size is not None and vram <= size else None,
        expires_s=max(0, left) if left is not None else None,
    )


def _seconds_left(told: str | None, wall: datetime | None) -> int | None:
    """Seconds until ``told`` (RFC 3339), negative once past; ten years or more is never."""
    if told is None or wall is None:
        return None
    try:
        at = datetime.fromisoformat(told)
        left = (at - wall).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    if at.year <= 1970:
        return None
    return FOREVER_S if left > _NEVER_S else int(left // 1)


def _date_of(reply: EngineReply) -> datetime | None:
    """When the engine answered, by its own clock: expiries are told on that one."""
    try:
        told = parsedate_to_datetime(reply.headers["date"])
    except (KeyError, ValueError, TypeError):
        return None
    return told if told.tzinfo is not None else None


def _digest(told: str | None) -> bytes | None:
    try:
        raw = bytes.fromhex((told or "").removeprefix("sha256:"))
    except ValueError:
        return None
    return raw if len(raw) == 32 else None


def _parameters(told: str | None) -> float | None:
    """Billions of ``8.0B`` or ``137M``."""
    found = _PARAMETERS.fullmatch(told or "")
    return float(found[1]) * _SCALES[found[2]] if found is not None else None


def _caps(tree: Any) -> Caps | None:
    """Told capabilities, None from a version that tells none. What is not in the list is a known no."""
    told = shape.texts(tree, "capabilities")
    if not told:
        return None
    known = has = Capability(0)
    for word, capability in _CAPABILITIES.items():
        known |= capability
        has |= capability if word in told else Capability(0)
    return Caps(known=known, has=has)
