"""The belief of a node: the roster rules it, its own word is in it, and nothing a member signs can break it."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.relay.ports import Routed, Turned
from router_core.record.membership import Liveness
from router_core.record.state import (
    Dispatch,
    EngineFacts,
    EngineLoad,
    GpuFacts,
    GpuLoad,
    HostFacts,
    HostLoad,
    ModelFacts,
    ProfileFacts,
    ResidentModel,
    ResourceLevel,
    SeenRouter,
    Static,
    Volatile,
)
from router_core.router.breaker import BreakerState
from tests.agent.node.rig import World, a_member, an_endpoint, id16, key_of

U8, U16, U32 = st.integers(0, 0xFF), st.integers(0, 0xFFFF), st.integers(0, 0xFFFF_FFFF)
FEW = st.integers(0, 3)
HOLD = [HealthCheck.too_slow, HealthCheck.data_too_large]


def edge(most: int) -> st.SearchStrategy[int]:
    """Numbers where arithmetic breaks: nothing, little, everything, and what is between."""
    return st.sampled_from([0, 1, most]) | st.integers(0, most)


def maybe(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | inner


LEVEL, CENT = maybe(st.integers(0, 3)), maybe(edge(100))
ENGINE = st.builds(
    EngineFacts,
    name=st.sampled_from(["llama", "ollama", ""]),
    kind=st.sampled_from(["llamacpp", "ollama", "vllm", "unheard"]),
    dialects=U16,
    cap_known=U32,
    cap_has=U32,
    slots=maybe(edge(0xFFFF)),
    max_queue=edge(0xFFFF),
    gpus=st.lists(FEW, max_size=3).map(tuple),
    load_policy=U8,
    flags=st.integers(0, 7),
)
MODEL = st.builds(
    ModelFacts,
    name=st.sampled_from(["tiny", "tiny:latest", "a/b", "Q", ""]),
    engine=FEW,
    digest=maybe(st.sampled_from([b"", b"d" * 32])),
    params_m=maybe(edge(0xFFFF_FFFF)),
    active_m=maybe(edge(0xFFFF_FFFF)),
    quant=maybe(st.sampled_from(["Q4_K_M", "F16", "strange"])),
    size_mib=maybe(edge(0xFFFF_FFFF)),
    ctx_max=maybe(edge(0xFFFF_FFFF)),
    ctx_served=maybe(edge(0xFFFF_FFFF)),
    parallel=maybe(edge(0xFFFF)),
    kv_bytes_per_token=maybe(edge(0xFFFF_FFFF)),
    offload_pct=maybe(edge(100)),
    aliases=st.lists(st.sampled_from(["tiny", "small", "..", ""]), max_size=2).map(tuple),
)
PROFILE = st.builds(
    ProfileFacts,
    model=FEW,
    engine=FEW,
    n=edge(0xFFFF),
    prompt_dtps=maybe(edge(0xFFFF_FFFF)),
    gen_dtps=maybe(edge(0xFFFF_FFFF)),
    beta_m=maybe(edge(0xFFFF)),
    prompt_sd_c=maybe(edge(0xFFFF)),
    gen_sd_c=maybe(edge(0xFFFF)),
    load_p75_ds=maybe(edge(0xFFFF)),
    success_c=edge(100),
)
GPU = st.builds(
    GpuFacts,
    uuid8=st.just(bytes(8)),
    name=st.just("gpu"),
    vram_total_mib=maybe(edge(0xFFFF_FFFF)),
    memory=st.integers(0, 1),
    mem_bw_gbs=maybe(edge(0xFFFF)),
)
STATIC = st.builds(
    Static,
    host=st.builds(HostFacts, cpus=edge(0xFFFF), ram_total_mib=edge(0xFFFF_FFFF)),
    gpus=st.lists(GPU, max_size=2).map(tuple),
    engines=st.lists(ENGINE, max_size=3).map(tuple),
    models=st.lists(MODEL, max_size=4).map(tuple),
    profiles=st.lists(PROFILE, max_size=3).map(tuple),
)
VOLATILE = st.builds(
    Volatile,
    flags=st.integers(0, 0xFF),
    level=LEVEL,
    host=st.builds(HostLoad, ram_available_mib=maybe(edge(0xFFFF_FFFF)), age_ds=U16),
    gpus=st.lists(
        st.builds(
            GpuLoad,
            vram_free_mib=maybe(edge(0xFFFF_FFFF)),
            score_c=CENT,
            level=LEVEL,
            state=st.integers(0, 12),
        ),
        max_size=2,
    ).map(tuple),
    resources=st.lists(
        st.builds(ResourceLevel, code=st.integers(0, 12), level=LEVEL, score_c=CENT), max_size=4
    ).map(tuple),
    engines=st.lists(
        st.builds(
            EngineLoad,
            state=st.integers(0, 9),
            running=maybe(edge(0xFFFF)),
            queued=maybe(edge(0xFFFF)),
            slots=maybe(edge(0xFFFF)),
            ours=edge(0xFFFF),
            work_ds=edge(0xFFFF_FFFF),
            obtainable_mib=maybe(edge(0xFFFF_FFFF)),
        ),
        max_size=3,
    ).map(tuple),
    residents=st.lists(
        st.builds(
            ResidentModel,
            model=st.integers(0, 5),
            engine=FEW,
            state=st.integers(0, 9),
            load_left_ds=maybe(edge(0xFFFF)),
            idle_s=edge(0xFFFF),
            mem_mib=maybe(edge(0xFFFF_FFFF)),
            ctx=maybe(edge(0xFFFF_FFFF)),
        ),
        max_size=4,
    ).map(tuple),
    seen=st.lists(
        st.builds(
            SeenRouter, router=st.just(id16("me")[:8]), inst=st.sampled_from([1, 7]), seq=U32, accepted=U32
        ),
        max_size=2,
    ).map(tuple),
    disp=maybe(st.builds(Dispatch, total=U32, rps_c=U32, work_c=edge(0xFFFF_FFFF))),
)


@settings(max_examples=100, deadline=None, suppress_health_check=HOLD)
@given(
    static=maybe(STATIC),
    volatile=maybe(VOLATILE),
    state=st.sampled_from([Liveness.UNCONFIRMED, Liveness.FRESH, Liveness.LATE, Liveness.SUSPECT]),
    model=st.sampled_from(["tiny", "small", "a/b", "Q"]),
    cap=maybe(st.integers(0, 1_000_000)),
)
def test_no_record_of_a_member_breaks_the_fleet_or_a_choice(
    static: Static | None, volatile: Volatile | None, state: Liveness, model: str, cap: int | None
) -> None:
    world = World()
    world.own(an_endpoint())
    world.admit("beta", "gamma")
    world.peer("gamma", an_endpoint())
    world.hear("beta", static, volatile, state)
    told = world.ask(model=model, max_tokens=cap).decide(
        attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
    )
    assert isinstance(told, Routed | Turned)
    assert told.decision_id is not None
    world.clock.now += 3_000
    world.hear("beta", static, volatile, state)
    world.ask(model=model).decide(attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now)
    for choosing in world.placing.open.values():
        assert choosing.decision is not None
        msgspec.json.encode(choosing.decision.record)


def test_a_member_that_left_the_roster_is_gone_at_once() -> None:
    world = World()
    world.peer("beta", an_endpoint())
    assert id16("beta") in world.board.current.nodes
    assert {row.key for row in world.router.fleet.rows} == {key_of("beta")}
    world.admit()
    assert id16("beta") not in world.board.current.nodes
    assert world.router.fleet.rows == ()


def test_this_node_is_always_there_whatever_the_roster_says() -> None:
    world = World()
    world.own(an_endpoint())
    world.admit("beta")
    world.admit()
    assert [row.key for row in world.router.fleet.rows] == [key_of("me")]
    assert world.viewing.members == {id16("me"): a_member("me")}


def test_the_fleet_and_the_board_are_of_one_view() -> None:
    world = World()
    for step in range(3):
        world.own(an_endpoint())
        world.peer("beta", an_endpoint(slots=step + 1))
        assert world.router.fleet.gen == world.board.current.gen


@pytest.mark.parametrize("state", [Liveness.GONE, Liveness.LEFT, Liveness.REMOVED])
def test_who_is_gone_offers_nothing(state: Liveness) -> None:
    world = World()
    world.peer("beta", an_endpoint())
    world.peer("beta", an_endpoint(), state=state)
    assert world.router.fleet.rows == ()


def test_a_restarted_node_is_not_held_to_the_faults_of_its_former_process() -> None:
    world = World()
    world.peer("beta", an_endpoint())
    world.peer("gamma", an_endpoint())
    for name in ("beta", "gamma"):
        world.router.breakers.failed(key_of(name), world.clock.now, connection_refused=True)
    world.peer("beta", an_endpoint())
    assert world.router.breakers.state(key_of("beta"), world.clock.now) is BreakerState.OPEN
    world.peer("beta", an_endpoint(), epoch=2)
    assert world.router.breakers.state(key_of("beta"), world.clock.now) is BreakerState.CLOSED
    assert world.router.breakers.state(key_of("gamma"), world.clock.now) is BreakerState.OPEN


def test_own_word_is_believed_before_anybody_else_hears_it() -> None:
    world = World()
    world.own(an_endpoint())
    assert world.route(world.ask()).choice.is_self
    world.own(an_endpoint(resident=()))
    told = world.ask().decide(attempt=1, tried=frozenset(), refused=frozenset(), now=1_000_000)
    assert isinstance(told, Turned)
    assert told.code == "model_absent"


def test_who_takes_no_requests_is_left_out_by_name_and_asked_again_once_it_does() -> None:
    world = World()
    world.peer("beta", an_endpoint())
    world.peer("gamma", an_endpoint())
    world.viewing.reach_changed({id16("beta")})
    chosen = world.route(world.ask())
    assert chosen.choice.endpoint == key_of("gamma")
    world.router.breakers.failed(key_of("beta"), world.clock.now, connection_refused=True)
    world.viewing.reach_changed({id16("beta"), id16("gamma")})
    turned = world.ask("r2").decide(attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now)
    assert isinstance(turned, Turned)
    assert (turned.code, turned.status) == ("unreachable", 503)
    world.viewing.reach_changed({id16("gamma")})
    assert world.router.breakers.state(key_of("beta"), world.clock.now) is BreakerState.CLOSED
    assert world.route(world.ask("r3")).choice.endpoint == key_of("beta")
