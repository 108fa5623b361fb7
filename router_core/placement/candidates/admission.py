"""What pressure levels and full queues mean for an endpoint: the same table for routers and for an ingress.

Levels and scores come signed from the node that measured them; this maps them to what may be served. It knows
nothing of thresholds and hold times, which are the node's own, nor of single requests.
"""

import math
from collections.abc import Iterable
from enum import IntEnum
from random import Random

from msgspec import Struct

from router_core.policy.placement import PlacementPolicy
from router_core.record.state import (
    EngineFacts,
    EngineFlag,
    Flag,
    GpuLoad,
    GpuState,
    Level,
    ResourceCode,
    Static,
    Volatile,
)

_MEMORIES = (ResourceCode.VRAM, ResourceCode.MEMORY)
_GPU_RESOURCES = (ResourceCode.GPU_TIME, ResourceCode.VRAM)
_EXPECTED = (ResourceCode.CPU, ResourceCode.MEMORY, ResourceCode.GPU_TIME, ResourceCode.VRAM)
_NO_VRAM_LIMIT = frozenset({GpuState.UNSUPPORTED, GpuState.ASLEEP})
_REMOTE = int(EngineFlag.REMOTE_HOST)
_NO_LOAD = int(Flag.NO_LOAD)
_RETRY_MOST_S = 60
_RETRY_WITHOUT_ROWS_S = 30
_JITTER = 0.2


class Gate(IntEnum):
    """What the node's pressure leaves open at an endpoint, from nothing closed to everything."""

    OPEN = 0
    SOFT = 1
    SHUT = 2


class Squeeze(Struct, frozen=True, gc=False, kw_only=True):
    """Pressure on one endpoint: the gate with the resource that closed it, and the score in 0..1.

    ``SOFT`` excludes unless nothing else is left. ``loads`` is False where cold loads are excluded besides, with
    ``no_loads`` saying why; ``unsure`` where nobody knows whether there is memory for one.
    """

    gate: Gate
    loads: bool
    score: float
    detail: str | None = None
    no_loads: str | None = None
    unsure: bool = False


FREE = Squeeze(gate=Gate.OPEN, loads=True, score=0.0)


def squeeze_of(static: Static, volatile: Volatile, engine: EngineFacts, unknown: float) -> Squeeze:
    """Pressure of a node on one of its endpoints; ``unknown`` is the score of an expected signal that is missing."""
    if engine.flags & _REMOTE:
        return FREE
    resources = {row.code: row for row in volatile.resources}
    gpus = _gpus_of(static, volatile, engine)
    score, gate = 0.0, Gate.OPEN
    detail = None
    unsure = False
    no_loads = "no_load" if volatile.flags & _NO_LOAD else None
    for code in _EXPECTED:
        row = resources.get(code)
        if (row is None or row.score_c is None) and (static.gpus or code not in _GPU_RESOURCES):
            score = max(score, unknown)
        if (row is None or row.level is None) and code in _MEMORIES and not _unlimited(code, static, gpus):
            unsure = True
    for row in volatile.resources:
        if row.score_c is not None:
            score = max(score, row.score_c / 100.0)
        if row.level is None or row.level < Level.HIGH:
            continue
        if row.level >= Level.CRITICAL:
            gate, detail = Gate.SHUT, _name(row.code)
        elif row.code in _MEMORIES:
            no_loads = _name(row.code)
        elif gate < Gate.SOFT:
            gate, detail = Gate.SOFT, _name(row.code)
    for gpu in gpus:
        if gpu.score_c is not None:
            score = max(score, gpu.score_c / 100.0)
        if gpu.level is not None and gpu.level >= Level.CRITICAL:
            gate, detail = Gate.SHUT, "gpu"
    return Squeeze(
        gate=gate,
        loads=no_loads is None,
        score=min(1.0, score),
        detail=detail,
        no_loads=no_loads,
        unsure=unsure,
    )


def shed_share(saturation: float, policy: PlacementPolicy) -> float:
    """The part of ``background`` requests that is turned away at this saturation."""
    return min(1.0, max(0.0, (saturation - policy.shed_above) / policy.shed_range))


def retry_after_s(waits_s: Iterable[float], rng: Random) -> int:
    """Seconds after which asking again may help: the shortest expected wait, at least 1, jittered by 20 %, at most 60.

    30 without any row.
    """
    known = list(waits_s)
    if not known:
        return _RETRY_WITHOUT_ROWS_S
    base = max(1.0, min(known))
    return min(_RETRY_MOST_S, math.ceil(base * (1.0 - _JITTER + 2.0 * _JITTER * rng.random())))


def _gpus_of(static: Static, volatile: Volatile, engine: EngineFacts) -> list[GpuLoad]:
    if len(volatile.gpus) != len(static.gpus):
        return []
    return [volatile.gpus[i] for i in engine.gpus if i < len(volatile.gpus)]


def _unlimited(code: int, static: Static, gpus: list[GpuLoad]) -> bool:
    if code != ResourceCode.VRAM:
        return False
    return not static.gpus or (bool(gpus) and all(gpu.state in _NO_VRAM_LIMIT for gpu in gpus))


def _name(code: int) -> str:
    try:
        return ResourceCode(code).name.lower()
    except ValueError:
        return "other"
