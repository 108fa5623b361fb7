"""What keeping a model in memory is worth, and which residents would make room for another.

The worth is requests/s times this node's share of them, times the seconds a load costs, per GiB held: the rate at which
waiting is saved for each unit of memory (the ratio that GreedyDual-Size caching ranks by: Cao and Irani, "Cost-Aware
WWW Proxy Caching Algorithms", 1997). Pure functions.
"""

from collections.abc import Callable, Iterable

from router_core.placement.residency.events import EngineResidency, HostLook, Key, Model

_GIB = 2**30
_LEAST_BYTES = 2**26


def worth(model: Model, share: float) -> float:
    """Seconds of waiting saved per second and GiB; a model is held to take 64 MiB at least."""
    size = max(_LEAST_BYTES, model.held_bytes or model.need_bytes or 0)
    return model.rate * share * model.load_s / (size / _GIB)


def share(served: float, asked: float, able: int, weight: float) -> float:
    """This node's part of a model's requests, shrunk to an equal part among ``able`` endpoints by ``weight`` requests."""
    return min(1.0, (served + weight / max(1, able)) / (max(asked, served) + weight))


def room_for(
    target: Model, picture: HostLook, evictable: Iterable[Model], worth_of: Callable[[Key], float]
) -> tuple[Model, ...] | None:
    """The residents to evict so that ``target`` and the reserve fit, those of least worth first; empty if it fits as
    it is, None if no eviction yields enough or something needed is unknown."""
    if target.need_bytes is None or picture.free_bytes is None:
        return None
    lacking = target.need_bytes + picture.reserve_bytes - picture.free_bytes
    crowd = _lacking_places(target, picture)
    ranked = sorted(evictable, key=lambda model: (worth_of(model.key), model.used_ms or 0, model.key))
    chosen: list[Model] = []
    for model in ranked:
        shares_engine = model.key[0] == target.key[0]
        if (crowd > 0 and shares_engine) or (crowd <= 0 and lacking > 0):
            chosen.append(model)
            lacking -= model.held_bytes
            crowd -= shares_engine
    for model in ranked:
        if crowd > 0 or lacking <= 0:
            break
        if model not in chosen:
            chosen.append(model)
            lacking -= model.held_bytes
    if lacking > 0 or crowd > 0:
        return None
    return _without_spare(chosen, lacking, crowd, target)


def _without_spare(chosen: list[Model], lacking: int, crowd: int, target: Model) -> tuple[Model, ...]:
    """``chosen`` without those that the others make unnecessary, the worthiest spared first."""
    needed = list(chosen)
    for model in reversed(chosen):
        shares_engine = model.key[0] == target.key[0]
        if lacking + model.held_bytes <= 0 and (not shares_engine or crowd < 0):
            needed.remove(model)
            lacking += model.held_bytes
            crowd += shares_engine
    return tuple(needed)


def _lacking_places(target: Model, picture: HostLook) -> int:
    """How many models must leave the engine of ``target`` before it holds one more."""
    most = picture.places.get(target.key[0])
    if most is None:
        return 0
    taken = sum(
        model.key[0] == target.key[0]
        and model.held in (EngineResidency.LOADING, EngineResidency.RESIDENT, EngineResidency.LEAVING)
        for model in picture.models
    )
    return taken + 1 - most
