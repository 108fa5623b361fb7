"""GPUs in what a node says of itself: positions, engines that may use them, memory for a cold load, urgency."""

from typing import Any

import pytest

from agent.engines.contract import LoadSource, ObservedLoad, ResidencyState
from agent.node.state.own_work import own_work
from agent.node.state.statement import static_statement, volatile_statement
from router_core.policy.pressure import GIB
from router_core.pressure.samples import GpuIdentity, GpuSample, GpuStanding, Sampled, measured
from router_core.record.event import is_event
from router_core.record.state import Flag, GpuState, Level, LoadPolicy, Static, Volatile
from tests.agent.node.rig import a_resident, a_sample, an_endpoint

NOW = 1_000_000
ONE, TWO = "11" * 8, "22" * 8


def a_gpu(
    key: str = ONE, *, unified: bool = False, state: GpuState = GpuState.OK, **over: Any
) -> GpuStanding:
    sample = GpuSample(
        identity=GpuIdentity(key=key, name="card", vram_total_bytes=24 * GIB, unified=unified),
        state=state,
        util_pct=measured(0, NOW),
        vram_free_bytes=measured(over.pop("free", 10 * GIB), NOW),
    )
    rated: dict[str, Any] = {
        "external_pct": measured(0.0, NOW),
        "source": 4,
        "level": Level.NONE,
        "score": 0.0,
    }
    return GpuStanding(sample=sample, **(rated | over))


def a_host(*gpus: GpuStanding) -> Sampled:
    return a_sample(gpus=gpus)


def said(sampled: Sampled, *endpoints: Any, free_mib: int | None = 10_240) -> tuple[Static, Volatile]:
    static = static_statement(
        sampled=sampled, addrs=(), version="1", router=True, endpoints=endpoints, profiles=()
    )
    volatile = volatile_statement(
        static, sampled=sampled, endpoints=endpoints, work={}, times={}, seen=(), disp=None, flags=Flag(0),
        load_memory_mib=free_mib, now=NOW,
    )  # fmt: skip
    return static, volatile


def test_gpus_are_in_both_records_in_the_same_order_and_engines_may_use_all_of_them() -> None:
    static, volatile = said(a_host(a_gpu(ONE), a_gpu(TWO, free=GIB)), an_endpoint())
    assert [gpu.uuid8.hex() for gpu in static.gpus] == [ONE, TWO]
    assert [gpu.vram_free_mib for gpu in volatile.gpus] == [10_240, 1_024]
    assert static.engines[0].gpus == (0, 1)


def test_an_engine_elsewhere_uses_no_gpu_of_this_host() -> None:
    static, _ = said(a_host(a_gpu()), an_endpoint(remote_host=True))
    assert static.engines[0].gpus == ()


def test_a_lost_gpu_is_used_by_no_engine_unless_it_is_the_only_one() -> None:
    lost = a_gpu(TWO, state=GpuState.LOST)
    assert said(a_host(a_gpu(ONE), lost), an_endpoint())[0].engines[0].gpus == (0,)
    assert said(a_host(lost), an_endpoint())[0].engines[0].gpus == (0,)


def test_on_a_gpu_only_what_lies_in_its_memory_can_be_given_back() -> None:
    spilled = an_endpoint(resident=(a_resident(total_bytes=8 * GIB, vram_bytes=2 * GIB),))
    _, own = said(a_host(a_gpu()), spilled)
    assert own.engines[0].obtainable_mib == 10_240 + 2_048 - 1_024
    _, shared = said(a_host(a_gpu(unified=True)), spilled)
    assert shared.engines[0].obtainable_mib == 10_240 + 8_192 - 1_024
    _, unknown = said(a_host(a_gpu()), spilled, free_mib=None)
    assert unknown.engines[0].obtainable_mib is None


@pytest.mark.parametrize(
    ("changed", "urgent"),
    [
        ({}, False),
        ({"free": 10 * GIB - 200 * 2**20}, False),
        ({"free": 8 * GIB}, True),
        ({"level": Level.HIGH}, True),
        ({"state": GpuState.UNRESPONSIVE}, True),
        ({"external_pct": measured(9.0, NOW)}, False),
    ],
)
def test_others_hear_at_once_of_levels_states_and_leaps_of_free_memory(
    changed: dict[str, Any], urgent: bool
) -> None:
    before = said(a_host(a_gpu()), an_endpoint())[1]
    after = said(a_host(a_gpu(**changed)), an_endpoint())[1]
    assert is_event(before, after) is urgent


def none_at(_engine: str) -> int:
    return 0


def test_an_idle_engine_is_no_work() -> None:
    work = own_work([an_endpoint()], none_at)
    assert (work.in_flight, work.loading, work.units) == (False, False, ("llama-server.service",))
    assert work.residents == {("llama", "/tiny.gguf")}


def test_requests_of_ours_and_those_others_sent_the_engine_are_both_its_work() -> None:
    assert own_work([an_endpoint()], lambda _engine: 1).in_flight
    load = ObservedLoad(source=LoadSource.ENGINE, running=1, waiting=0)
    assert own_work([an_endpoint(load=load)], none_at).in_flight


@pytest.mark.parametrize(
    ("state", "policy", "requests", "loading"),
    [
        (ResidencyState.LOADING, LoadPolicy.FIXED, 0, True),
        (ResidencyState.UNLOADING, LoadPolicy.FIXED, 0, True),
        (ResidencyState.RESIDENT, LoadPolicy.ON_DEMAND, 1, False),
        (ResidencyState.SLEEPING, LoadPolicy.ON_DEMAND, 1, True),
        (ResidencyState.SLEEPING, LoadPolicy.ON_DEMAND, 0, False),
        (ResidencyState.SLEEPING, LoadPolicy.FIXED, 1, False),
    ],
)
def test_a_load_is_what_the_engine_says_or_a_request_at_an_empty_one_that_loads_on_demand(
    state: ResidencyState, policy: LoadPolicy, requests: int, loading: bool
) -> None:
    engine = an_endpoint(resident=(a_resident(state=state),), jit_load=policy is LoadPolicy.ON_DEMAND)
    assert own_work([engine], lambda _engine: requests).loading is loading
