"""Names under which an engine's models are offered. Matching names is not done here."""

from collections.abc import Iterable

from msgspec.structs import replace

from agent.engines.contract import OwnedModel
from agent.settings.manifest import DeclaredModel
from router_core import limits
from router_core.placement.request.names import parse_model_name


def is_publishable(name: str) -> bool:
    """True if ``name`` may be published to other nodes."""
    return parse_model_name(name) is not None


def name_of_path(native_id: str) -> str:
    """``native_id``, or its last component if it is the path of a model file: paths never leave the host."""
    if native_id.startswith(("/", ".")) or native_id.endswith(".gguf"):
        return native_id.rstrip("/").rsplit("/", 1)[-1]
    return native_id


def overlaid(owned: Iterable[OwnedModel], declared: Iterable[DeclaredModel]) -> tuple[OwnedModel, ...]:
    """``owned`` with the operator's facts on top: a declared model matches by the engine's spelling, or by
    name where none is given."""
    by_native = {entry.upstream_name: entry for entry in declared if entry.upstream_name is not None}
    by_name = {entry.name: entry for entry in declared if entry.upstream_name is None}
    merged = []
    for model in owned:
        entry = by_native.get(model.native_id) or by_name.get(model.native_id) or by_name.get(model.name)
        merged.append(model if entry is None else _overlay(model, entry))
    return tuple(merged)


def declared_only(declared: Iterable[DeclaredModel]) -> tuple[OwnedModel, ...]:
    """The inventory of an engine that cannot list its models."""
    return tuple(
        _overlay(OwnedModel(native_id=entry.upstream_name or entry.name, name=entry.name), entry)
        for entry in declared
    )


def publishable(owned: Iterable[OwnedModel]) -> tuple[tuple[OwnedModel, ...], int]:
    """The models that may be offered, each name once, and how many had an unfit name."""
    kept: list[OwnedModel] = []
    taken: set[str] = set()
    unfit = 0
    for model in owned:
        if not is_publishable(model.name):
            unfit += 1
        elif model.name not in taken and len(kept) < limits.ENGINE_MODELS:
            aliases = dict.fromkeys(a for a in model.aliases if is_publishable(a) and a != model.name)
            fresh = tuple(alias for alias in aliases if alias not in taken)[: limits.ALIASES]
            taken.update((model.name, *fresh))
            kept.append(replace(model, aliases=fresh))
    return tuple(kept), unfit


def _overlay(model: OwnedModel, entry: DeclaredModel) -> OwnedModel:
    return replace(
        model,
        name=entry.name,
        aliases=(*entry.aliases, *model.aliases),
        digest=entry.digest or model.digest,
        base=entry.base or model.base,
        family=entry.family or model.family,
        params_b=entry.params_b or model.params_b,
        active_b=entry.active_b or model.active_b,
        quant=entry.quant or model.quant,
        ctx_max=_smaller(entry.ctx_max, model.ctx_max),
        ctx_served=_smaller(entry.ctx_max, model.ctx_served),
        size_bytes=entry.size_bytes or model.size_bytes,
        kv_bytes_per_token=entry.kv_bytes_per_token or model.kv_bytes_per_token,
        caps=model.caps.overruled_by(entry.caps),
        keep=entry.keep,
    )


def _smaller(one: int | None, other: int | None) -> int | None:
    known = [limit for limit in (one, other) if limit is not None]
    return min(known, default=None)
