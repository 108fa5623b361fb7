"""Members, records and views for tests that start from what nodes say of themselves."""

from typing import Any

from router_core.ids import NodeName
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import (
    Dialect,
    EngineFacts,
    EngineLoad,
    EngineState,
    GpuFacts,
    GpuLoad,
    GpuState,
    HostFacts,
    HostLoad,
    Level,
    LoadPolicy,
    ModelFacts,
    ModelState,
    ResidentModel,
    ResourceCode,
    ResourceLevel,
    Role,
    Static,
    Volatile,
)
from router_core.view.cluster import ClusterView
from router_core.view.fold import empty, fold
from tests.support.fleets import ME, NOW, id32

CALM = tuple(
    ResourceLevel(code=code, level=Level.NONE, score_c=5)
    for code in (ResourceCode.CPU, ResourceCode.MEMORY, ResourceCode.GPU_TIME, ResourceCode.VRAM)
)


def a_member(name: str, roles: int = int(Role.NODE | Role.ROUTER)) -> Member:
    return Member(id32=id32(name), der=name.encode(), roles=roles, admission=1, name=NodeName(name))


def a_static(**over: Any) -> Static:
    """One GPU of 24 GiB and 1,000 GB/s, one llama.cpp with 4 slots, one model ``tiny`` of 4 GiB."""
    fields: dict[str, Any] = {
        "host": HostFacts(cpus=8, ram_total_mib=32_768),
        "gpus": (GpuFacts(uuid8=bytes(8), name="gpu", vram_total_mib=24_576, mem_bw_gbs=1000),),
        "engines": (
            EngineFacts(
                name="llamacpp",
                kind="llamacpp",
                dialects=int(Dialect.CHAT | Dialect.COMPLETION),
                slots=4,
                max_queue=8,
                gpus=(0,),
                load_policy=LoadPolicy.ON_DEMAND,
            ),
        ),
        "models": (ModelFacts(name="tiny", engine=0, size_mib=4096, ctx_served=8192, parallel=4),),
    }
    return Static(**(fields | over))


def a_volatile(**over: Any) -> Volatile:
    """Calm, with ``tiny`` resident and nothing in flight."""
    fields: dict[str, Any] = {
        "host": HostLoad(ram_available_mib=16_384, cpu_external_pct=3),
        "gpus": (GpuLoad(vram_free_mib=18_000, score_c=5, level=Level.NONE, state=GpuState.OK),),
        "resources": CALM,
        "engines": (
            EngineLoad(state=EngineState.READY, running=0, queued=0, slots=4, obtainable_mib=18_000),
        ),
        "residents": (ResidentModel(model=0, engine=0, state=ModelState.RESIDENT, mem_mib=4200, ctx=8192),),
    }
    return Volatile(**(fields | over))


def a_change(name: str, **over: Any) -> ViewChange:
    """What the mesh says of ``name``: fresh, confirmed, taken half a second ago."""
    fields: dict[str, Any] = {
        "origin": a_member(name).id16,
        "state": Liveness.FRESH,
        "confirmed": True,
        "epoch": 1,
        "inst": 1,
        "seq": 1,
        "mono_ms": NOW - 500,
        "base_ms": 0,
        "due_ms": 2000,
        "volatile": a_volatile(),
        "static": a_static(),
    }
    return ViewChange(**(fields | over))


def a_view(*changes: ViewChange, members: tuple[Member, ...] | None = None) -> ClusterView:
    """A view of these nodes, all of them members unless told otherwise."""
    if members is None:
        members = tuple(a_member(bytes(change.origin).rstrip(b"\x01").decode()) for change in changes)
    return fold(empty(ME, NodeName("me")), changes, {member.id16: member for member in members}, NOW)
