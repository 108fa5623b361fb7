"""How values that a later version added read today: an enum code that is not known here reads as unknown.

Ranges never change, so a code outside its field's range is a fault of the codec's, not a case of this table.
A resource level of an unknown code is left out: not listed means unknown.
"""

from typing import Final

from msgspec.structs import replace

from router_core.record.state import (
    EngineState,
    GpuState,
    Label,
    LoadPolicy,
    ModelState,
    Platform,
    ResourceCode,
    Static,
    Volatile,
)
from router_core.record.text import plain

_GPU_STATE: Final = max(GpuState)
_GPU_SOURCE: Final = 5
_ENGINE_STATE: Final = max(EngineState)
_MODEL_STATE: Final = max(ModelState)
_RESOURCE: Final = max(ResourceCode)
_LOAD_POLICY: Final = max(LoadPolicy)
_OS, _ARCH, _PROFILE, _MEMORY, _VENDOR = 3, 2, 2, 1, 4


def read_volatile(body: Volatile) -> Volatile:
    """``body`` with every unknown code read as unknown; the same object if there is none."""
    if (
        all(gpu.state <= _GPU_STATE and gpu.source <= _GPU_SOURCE for gpu in body.gpus)
        and all(entry.code <= _RESOURCE for entry in body.resources)
        and all(engine.state <= _ENGINE_STATE for engine in body.engines)
        and all(model.state <= _MODEL_STATE for model in body.residents)
    ):
        return body
    return replace(
        body,
        gpus=tuple(
            replace(
                gpu,
                state=gpu.state if gpu.state <= _GPU_STATE else GpuState.UNKNOWN,
                source=gpu.source if gpu.source <= _GPU_SOURCE else 0,
            )
            for gpu in body.gpus
        ),
        resources=tuple(entry for entry in body.resources if entry.code <= _RESOURCE),
        engines=tuple(
            engine if engine.state <= _ENGINE_STATE else replace(engine, state=EngineState.UNKNOWN)
            for engine in body.engines
        ),
        residents=tuple(
            model if model.state <= _MODEL_STATE else replace(model, state=ModelState.UNKNOWN)
            for model in body.residents
        ),
    )


def read_static(body: Static) -> Static:
    """``body`` with every unknown code read as unknown (0; an unknown load policy as ``FIXED``), and with plain text."""
    return replace(
        body,
        software=replace(body.software, name=plain(body.software.name), version=plain(body.software.version)),
        platform=_read_platform(body.platform),
        gpus=tuple(
            replace(
                gpu,
                name=plain(gpu.name),
                memory=gpu.memory if gpu.memory <= _MEMORY else 0,
                vendor=gpu.vendor if gpu.vendor <= _VENDOR else 0,
            )
            for gpu in body.gpus
        ),
        engines=tuple(
            replace(
                engine,
                kind=plain(engine.kind),
                version=plain(engine.version),
                load_policy=engine.load_policy if engine.load_policy <= _LOAD_POLICY else LoadPolicy.FIXED,
                labels=tuple(Label(key=plain(each.key), value=plain(each.value)) for each in engine.labels),
            )
            for engine in body.engines
        ),
        models=tuple(
            replace(
                model,
                family=None if model.family is None else plain(model.family),
                quant=None if model.quant is None else plain(model.quant),
            )
            for model in body.models
        ),
    )


def _read_platform(platform: Platform) -> Platform:
    return replace(
        platform,
        os=platform.os if platform.os <= _OS else 0,
        arch=platform.arch if platform.arch <= _ARCH else 0,
        profile=platform.profile if platform.profile <= _PROFILE else 0,
    )
