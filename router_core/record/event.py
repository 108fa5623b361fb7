"""Which changes of a volatile record others must hear of at once."""

from router_core.record.state import EngineLoad, Flag, Level, Volatile

_JUMP_MIB = 1_024
_WATCHED = Flag.DRAINING | Flag.LONELY | Flag.CONFLICT | Flag.NO_LOAD | Flag.DEGRADED


def is_event(old: Volatile, new: Volatile) -> bool:
    """True if ``new`` must be published at once: a level, an engine's state, a residency or a flag changed, or a queue
    crossed 0 or the slots."""
    if (old.flags ^ new.flags) & _WATCHED or old.level != new.level:
        return True
    if _levels(old) != _levels(new) or _residency(old) != _residency(new) or _gpus_changed(old, new):
        return True
    if len(old.engines) != len(new.engines):
        return True
    return any(
        before.state != after.state
        or bool(before.queued) != bool(after.queued)
        or _full(before) != _full(after)
        for before, after in zip(old.engines, new.engines, strict=True)
    )


def _levels(body: Volatile) -> tuple[tuple[int, Level | int | None], ...]:
    return tuple((resource.code, resource.level) for resource in body.resources)


def _gpus_changed(old: Volatile, new: Volatile) -> bool:
    """Whether a GPU changed its level or state, or its free memory moved by more than 1 GiB and a tenth."""
    if len(old.gpus) != len(new.gpus):
        return True
    return any(
        before.state != after.state
        or before.level != after.level
        or _jumped(before.vram_free_mib, after.vram_free_mib)
        for before, after in zip(old.gpus, new.gpus, strict=True)
    )


def _jumped(before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > max(_JUMP_MIB, before // 10)


def _residency(body: Volatile) -> frozenset[tuple[int, int, int]]:
    return frozenset((model.engine, model.model, model.state) for model in body.residents)


def _full(load: EngineLoad) -> bool:
    return load.running is not None and load.slots is not None and load.running >= load.slots
