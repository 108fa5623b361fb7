"""What an origin does to its own body before sealing it, so that no reader ever has to refuse it.

Numbers above a field's range become the range's end, texts are cut at a character boundary, lists are truncated
in a fixed order until the body fits under its cap. What still does not fit is ``LocalMisuse``: a relay never
discovers an oversize record.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from msgspec import Struct, inspect
from msgspec.structs import replace

from router_core import limits
from router_core.errors import LocalMisuse
from router_core.record.codec import encode
from router_core.record.envelope import HEADER_MOST
from router_core.record.state import U32_MAX, Flag, ModelFacts, ProfileFacts, ResidentModel, Static, Volatile
from router_core.record.text import is_model_name, is_plain, plain

S = TypeVar("S", bound=Struct)

V_BODY_MOST: Final = limits.V_SIGNED - HEADER_MOST
S_BODY_MOST: Final = limits.S_SIGNED - HEADER_MOST


def in_range(body: S) -> S:
    """``body`` with every number moved to the nearest end of its field's range and every text in printable ASCII,
    cut to its limit. Lists keep their lengths; fixed-size ids are left alone."""
    clamped: S = _clamp_for(type(body))(body)
    return clamped


def fit_volatile(body: Volatile) -> Volatile:
    """``body`` in range and small enough to be sealed; raises ``LocalMisuse`` if it cannot be.

    Cut in this order: demand; unlinked, which becomes empty with RELAY_ALL; the oldest seen; models without a
    request, longest idle first.
    """
    _refuse_lengths(gpus=(body.gpus, limits.GPUS), engines=(body.engines, limits.ENGINES))
    body = in_range(body)
    body = replace(
        body,
        demand=body.demand[: limits.DEMAND],
        seen=body.seen[: limits.SEEN],
        lost=body.lost[: limits.LOST],
        resources=body.resources[: limits.RESOURCES],
    )
    if len(body.unlinked) > limits.UNLINKED:
        body = _relay_all(body)
    while len(body.residents) > limits.RESIDENTS:
        body = _without_idlest(body)
    while (size := len(encode(body))) > V_BODY_MOST:
        if body.demand:
            body = replace(body, demand=body.demand[:-1])
        elif body.unlinked:
            body = _relay_all(body)
        elif body.seen:
            body = replace(body, seen=body.seen[:-1])
        elif any(_is_idle(model) for model in body.residents):
            body = _without_idlest(body)
        else:
            raise LocalMisuse(f"a V body of {size} bytes cannot be cut, limit {V_BODY_MOST}")
    return body


def fit_static(body: Static, ranked: Sequence[int] = ()) -> Static:
    """``body`` in range and small enough to be sealed; raises ``LocalMisuse`` if it cannot be.

    Cut in this order: aliases; profiles, least recently used first; models. ``ranked`` lists indices of models
    worth keeping, best first (the resident ones, then by last use); the others follow by name. Models and aliases
    whose name no reader would accept are left out. The order of the kept models is not changed, positions in
    profiles are rewritten, and ``models_total`` still counts all. Positions in V must be taken from the result.
    """
    _refuse_lengths(gpus=(body.gpus, limits.GPUS), engines=(body.engines, limits.ENGINES))
    total = max(body.models_total, len(body.models))
    worth = [index for index in _by_worth(body, ranked) if is_model_name(body.models[index].name)]
    kept = set(worth[: limits.MODELS])
    body = replace(
        in_range(_with_models(body, kept)),
        models_total=min(total, U32_MAX),
    )
    body = replace(
        body,
        addrs=body.addrs[: limits.ADDRESSES],
        engines=tuple(
            replace(engine, labels=engine.labels[: limits.LABELS], gpus=engine.gpus[: limits.GPUS])
            for engine in body.engines
        ),
        models=tuple(replace(model, aliases=_aliases(model)) for model in body.models),
        profiles=_recent(body.profiles, limits.PROFILES),
    )
    if len(encode(body)) > S_BODY_MOST:
        body = replace(body, models=tuple(replace(model, aliases=()) for model in body.models))
    while len(encode(body)) > S_BODY_MOST and body.profiles:
        body = replace(body, profiles=_recent(body.profiles, len(body.profiles) - 1))
    leaving = _by_worth(body, _rewritten(ranked, kept))
    while (size := len(encode(_with_models(body, set(leaving))))) > S_BODY_MOST:
        if not leaving:
            raise LocalMisuse(f"an S body of {size} bytes cannot be cut, limit {S_BODY_MOST}")
        leaving.pop()
    return _with_models(body, set(leaving))


def _aliases(model: ModelFacts) -> tuple[str, ...]:
    return tuple(filter(is_model_name, model.aliases))[: limits.ALIASES]


def _refuse_lengths(**lists: tuple[Sequence[object], int]) -> None:
    """Positions refer to these lists, so cutting one would change what others mean."""
    for name, (rows, limit) in lists.items():
        if len(rows) > limit:
            raise LocalMisuse(f"{len(rows)} {name}, limit {limit}")


def _relay_all(body: Volatile) -> Volatile:
    return replace(body, unlinked=(), flags=body.flags | Flag.RELAY_ALL)


def _is_idle(model: ResidentModel) -> bool:
    return not model.running and not model.waiting


def _without_idlest(body: Volatile) -> Volatile:
    """``body`` without the model that is idle longest; among busy ones, the last listed goes."""
    rows = body.residents
    victim = max(range(len(rows)), key=lambda i: (_is_idle(rows[i]), rows[i].idle_s, i))
    return replace(body, residents=rows[:victim] + rows[victim + 1 :])


def _recent(profiles: tuple[ProfileFacts, ...], count: int) -> tuple[ProfileFacts, ...]:
    """The ``count`` most recently used, in their order."""
    by_age = sorted(range(len(profiles)), key=lambda i: (profiles[i].idle_h, i))
    return tuple(profiles[i] for i in sorted(by_age[:count]))


def _by_worth(body: Static, ranked: Sequence[int]) -> list[int]:
    """Indices of all models, the one to keep longest first."""
    first = [index for index in dict.fromkeys(ranked) if 0 <= index < len(body.models)]
    named = set(first)
    rest = [index for index in range(len(body.models)) if index not in named]
    return first + sorted(rest, key=lambda i: body.models[i].name)


def _rewritten(indices: Sequence[int], kept: set[int]) -> list[int]:
    position = {old: new for new, old in enumerate(sorted(kept))}
    return [position[index] for index in indices if index in position]


def _with_models(body: Static, kept: set[int]) -> Static:
    """``body`` with the models at ``kept`` alone, and the profiles that still have a model."""
    if len(kept) == len(body.models):
        return body
    position = {old: new for new, old in enumerate(sorted(kept))}
    return replace(
        body,
        models=tuple(body.models[index] for index in sorted(kept)),
        profiles=tuple(
            replace(profile, model=position[profile.model])
            for profile in body.profiles
            if profile.model in position
        ),
    )


Clamp = Callable[[Any], Any]


@cache
def _clamp_for(kind: type[Struct]) -> Clamp:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return _clamp_struct(described)


def _clamp_struct(described: inspect.StructType) -> Clamp:
    fields = [(field.name, clamp) for field in described.fields if (clamp := _clamp(field.type)) is not None]

    def clamp_struct(value: Any) -> Any:
        changed = {}
        for name, clamp in fields:
            old = getattr(value, name)
            new = clamp(old)
            if new is not old:
                changed[name] = new
        return replace(value, **changed) if changed else value

    return clamp_struct


def _clamp(described: inspect.Type) -> Clamp | None:
    """A function that moves a value into the range of the type described, or None if it has no range."""
    match described:
        case inspect.IntType(ge=low, le=high) if low is not None and high is not None:
            return lambda value: low if value < low else high if value > high else value
        case inspect.StrType(max_length=most) if most is not None:
            return lambda value: value if len(value) <= most and is_plain(value) else plain(value)[:most]
        case inspect.StructType():
            return _clamp_struct(described)
        case inspect.VarTupleType(item_type=item):
            each = _clamp(item)
            if each is None:
                return None
            return lambda rows: _clamp_rows(rows, each)
        case inspect.UnionType(types=types):
            known = [clamp for one in types if (clamp := _clamp(one)) is not None]
            if not known:
                return None
            return lambda value: None if value is None else known[0](value)
    return None


def _clamp_rows(rows: tuple[Any, ...], each: Clamp) -> tuple[Any, ...]:
    clamped = tuple([each(row) for row in rows])
    return clamped if any(map(_differ, clamped, rows)) else rows


def _differ(left: object, right: object) -> bool:
    return left is not right
