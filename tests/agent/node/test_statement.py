"""What is said of this node: units and positions are those of the records, and unknown is never nothing."""

import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.engines.contract import EndpointHealth, EndpointStatus, LoadSource, ObservedLoad, ResidencyState
from agent.node.state.statement import EndpointWork, ModelTimes, foreign_requests, static_statement
from agent.settings.manifest import EngineUrl
from router_core import limits
from router_core.record.codec import decode_static, encode_static
from router_core.record.event import is_event
from router_core.record.state import (
    EngineFlag,
    EngineState,
    Flag,
    LoadPolicy,
    ModelDemand,
    ModelState,
    ProfileFacts,
    ResourceLevel,
    Volatile,
)
from tests.agent.node.rig import a_resident, a_sample, an_endpoint, an_owned, owned_models, stated

MIB = 2**20


def said(*endpoints: EndpointStatus, **over: Any) -> Volatile:
    return stated(*endpoints, **over)[1]


# --- S -----------------------------------------------------------------------------------------------------


def test_a_model_is_told_in_the_units_of_the_record() -> None:
    owned = an_owned(
        size_bytes=5 * MIB - 1,
        params_b=7.24,
        active_b=0.5,
        base="llama-3-8b",
        quant="Q4_K_M",
        ctx_max=8_192,
        ctx_served=4_096,
        parallel=2,
        keep=True,
        aliases=("small",),
    )
    (model,) = stated(an_endpoint(owned=(owned,)))[0].models
    assert (model.size_mib, model.params_m, model.active_m) == (4, 7_240, 500)
    assert model.base8 == hashlib.sha256(b"llama-3-8b").digest()[:8]
    assert (model.ctx_max, model.ctx_served, model.parallel) == (8_192, 4_096, 2)
    assert (model.flags, model.aliases) == (1, ("small",))


def test_that_an_endpoint_lies_outside_the_mesh_is_told_with_its_price_and_not_where_it_is() -> None:
    url = EngineUrl(scheme="https", host="api.example.com", port=443, path="/openai/v1")
    manifest = replace(
        an_endpoint().manifest, url=url, cloud=True, remote_host=True, price_in=0.5, price_out=2.0
    )
    static = stated(an_endpoint(manifest=manifest))[0]
    (outside,) = static.engines
    assert EngineFlag(outside.flags) == EngineFlag.CLOUD | EngineFlag.REMOTE_HOST
    assert (outside.price_in, outside.price_out) == (5_000, 20_000), "in 1/10,000"
    assert b"example" not in encode_static(static)
    (inside,) = stated(an_endpoint())[0].engines
    assert inside.flags == 0


def test_what_is_not_known_of_a_model_is_none() -> None:
    (model,) = stated(an_endpoint(owned=(an_owned(),)))[0].models
    told = (model.size_mib, model.params_m, model.active_m, model.base8, model.digest, model.quant)
    assert told == (None,) * len(told)
    assert (model.ctx_max, model.ctx_served, model.parallel, model.kv_bytes_per_token) == (None,) * 4


def test_an_endpoint_is_told_without_its_address() -> None:
    static = stated(an_endpoint(remote_host=True, jit_load=True, slots=3, max_queue=5))[0]
    (engine,) = static.engines
    assert (engine.name, engine.kind, engine.slots, engine.max_queue) == ("llama", "llamacpp", 3, 5)
    assert engine.load_policy == LoadPolicy.ON_DEMAND
    assert engine.flags == EngineFlag.REMOTE_HOST
    assert b"127.0.0.1" not in encode_static(static)
    assert b".gguf" not in encode_static(static)


def test_models_that_live_elsewhere_are_not_this_nodes() -> None:
    static = stated(an_endpoint(owned=(an_owned(), an_owned("far", local=False))))[0]
    assert [model.name for model in static.models] == ["tiny"]


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(0, 40), max_size=20),
    kept=st.sets(st.tuples(st.integers(0, 19), st.integers(0, 39)), max_size=10),
)
def test_positions_mean_what_they_say_however_much_was_cut(
    counts: list[int], kept: set[tuple[int, int]]
) -> None:
    endpoints = [
        an_endpoint(
            f"e{place}",
            owned=owned_models(*(f"m{place}-{i}" for i in range(count))),
            resident=tuple(a_resident(f"m{place}-{i}") for i in range(0, count, 7)),
        )
        for place, count in enumerate(counts)
    ]
    profiles = [
        (endpoint.name, model.name, ProfileFacts(model=0, engine=0, ctx=index, n=place))
        for place, endpoint in enumerate(endpoints)
        for index, model in enumerate(endpoint.owned)
    ]
    keep = frozenset((f"e{place}", f"m{place}-{index}") for place, index in kept)
    static = static_statement(
        sampled=None, addrs=(), version="1", router=True, endpoints=endpoints, profiles=profiles, keep=keep
    )
    assert decode_static(encode_static(static)) == static
    assert len(static.engines) == min(len(counts), limits.ENGINES)
    for model in static.models:
        assert model.name.startswith(f"m{static.engines[model.engine].name[1:]}-")
    for facts in static.profiles:
        model = static.models[facts.model]
        assert (model.engine, model.name) == (facts.engine, f"m{facts.n}-{facts.ctx}")
    names = {(static.engines[model.engine].name, model.name) for model in static.models}
    offered = {(e.name, m.name) for e in endpoints[: limits.ENGINES] for m in e.owned}
    assert keep & offered <= names
    _, volatile = stated(*endpoints[: limits.ENGINES])
    assert len(volatile.engines) == len(static.engines)


# --- V -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "foreign", "running", "queued"), [(0, 0, 0, 0), (3, 0, 3, 0), (3, 1, 4, 0), (6, 3, 4, 5)]
)
def test_work_fills_the_slots_and_the_rest_waits(ours: int, foreign: int, running: int, queued: int) -> None:
    work = {"llama": EndpointWork(ours=ours, foreign=foreign, work_s=1.26)}
    (load,) = said(an_endpoint(), work=work).engines
    assert (load.running, load.queued, load.ours, load.work_ds, load.slots) == (running, queued, ours, 13, 4)


@pytest.mark.parametrize(
    ("health", "state"),
    [
        (EndpointHealth.READY, EngineState.READY),
        (EndpointHealth.DEGRADED, EngineState.READY),
        (EndpointHealth.UNREACHABLE, EngineState.DOWN),
        (EndpointHealth.STARTING, EngineState.STARTING),
        (EndpointHealth.UNAUTHORISED, EngineState.DOWN),
        (EndpointHealth.REFUSED, EngineState.DOWN),
    ],
)
def test_an_engine_that_takes_no_requests_has_no_load(health: EndpointHealth, state: EngineState) -> None:
    (load,) = said(an_endpoint(health=health)).engines
    assert load.state == state
    assert (load.running is None) is (state != EngineState.READY)


def test_an_engine_that_was_never_looked_at_is_not_called_ready() -> None:
    (load,) = said(an_endpoint(observed_ms=None)).engines
    assert load.state == EngineState.UNKNOWN
    (load,) = said(an_endpoint(observed_ms=None, health=EndpointHealth.STARTING)).engines
    assert load.state == EngineState.STARTING


def test_the_age_of_an_engines_word_runs_in_tenths_of_a_second() -> None:
    (load,) = said(an_endpoint(observed_ms=990_000)).engines
    assert load.age_ds == 100


def test_a_cold_load_could_have_what_is_free_and_what_idle_models_would_give_back() -> None:
    idle = a_resident(total_bytes=2_000 * MIB)
    busy = a_resident("busy", total_bytes=1_000 * MIB, running=1)
    endpoint = an_endpoint(owned=owned_models("tiny", "busy"), resident=(idle, busy))
    assert said(endpoint, load_memory_mib=10_000).engines[0].obtainable_mib == 10_000 + 2_000 - 1_024
    assert said(endpoint, load_memory_mib=100_000).engines[0].obtainable_mib == 100_000 + 2_000 - 5_000
    assert said(an_endpoint(), load_memory_mib=100).engines[0].obtainable_mib == 0
    assert said(endpoint, load_memory_mib=None).engines[0].obtainable_mib is None


def test_what_is_in_memory_is_told_by_position() -> None:
    first = an_endpoint("a", owned=owned_models("x", "y"), resident=(a_resident("y", total_bytes=3 * MIB),))
    second = an_endpoint(
        "b",
        owned=owned_models("x"),
        resident=(
            a_resident("x", ResidencyState.SLEEPING, total_bytes=4 * MIB, vram_bytes=MIB, ctx=4_096),
            a_resident("nobody-knows"),
        ),
    )
    static, volatile = stated(first, second, times={("b", "x"): ModelTimes(used_ms=940_000)})
    told = [
        (static.engines[row.engine].name, static.models[row.model].name, row.state, row.mem_mib)
        for row in volatile.residents
    ]
    assert told == [("a", "y", ModelState.RESIDENT, 3), ("b", "x", ModelState.SLEEPING, 4)]
    sleeping = volatile.residents[1]
    assert (sleeping.vram_share_pct, sleeping.ctx, sleeping.idle_s) == (25, 4_096, 60)
    assert (volatile.residents[0].vram_share_pct, volatile.residents[0].ctx) == (None, None)


def test_a_model_that_failed_to_load_is_not_in_memory() -> None:
    assert said(an_endpoint(resident=(a_resident(state=ResidencyState.FAILED),))).residents == ()


def test_a_model_whose_memory_nobody_tells_takes_what_its_file_does() -> None:
    endpoint = an_endpoint(owned=(an_owned(size_bytes=7 * MIB),))
    assert said(endpoint).residents[0].mem_mib == 7
    assert said(an_endpoint()).residents[0].mem_mib is None


def test_without_a_sample_nothing_is_known_and_nothing_is_loaded() -> None:
    volatile = said(an_endpoint(), sampled=None)
    assert volatile.flags == Flag.SENSOR_STALE | Flag.NO_LOAD
    assert (volatile.level, volatile.host.ram_available_mib) == (None, None)


# --- events ------------------------------------------------------------------------------------------------

CALM = said(an_endpoint(), work={"llama": EndpointWork(ours=1)})


def with_load(**over: Any) -> Volatile:
    return replace(CALM, engines=(replace(CALM.engines[0], **over),))


@pytest.mark.parametrize(
    "after",
    [
        replace(CALM, level=2),
        replace(CALM, flags=CALM.flags | Flag.DRAINING),
        replace(CALM, flags=CALM.flags | Flag.NO_LOAD),
        replace(CALM, resources=(ResourceLevel(code=1, level=2), *CALM.resources[1:])),
        replace(CALM, residents=()),
        replace(CALM, residents=(replace(CALM.residents[0], state=ModelState.UNLOADING),)),
        replace(CALM, engines=()),
        with_load(state=EngineState.DOWN),
        with_load(queued=1),
        with_load(running=4),
    ],
)
def test_a_change_that_others_choose_by_is_an_event_both_ways(after: Volatile) -> None:
    assert is_event(CALM, after)
    assert is_event(after, CALM)


@pytest.mark.parametrize(
    "after",
    [
        CALM,
        replace(CALM, flags=CALM.flags | Flag.URGENT),
        replace(CALM, flags=CALM.flags | Flag.SENSOR_STALE),
        replace(CALM, resources=(replace(CALM.resources[0], score_c=60, age_ds=3), *CALM.resources[1:])),
        replace(CALM, residents=(replace(CALM.residents[0], idle_s=60),)),
        with_load(running=3, work_ds=400, ours=3, age_ds=9, kv_c=50),
    ],
)
def test_what_merely_moves_waits_for_the_next_record(after: Volatile) -> None:
    assert not is_event(CALM, after)


# --- whose requests ----------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    running=st.none() | st.integers(0, 50),
    waiting=st.none() | st.integers(0, 50),
    ours=st.integers(0, 50),
    source=st.sampled_from(list(LoadSource)),
)
def test_foreign_requests_are_what_an_engine_counts_beyond_ours(
    running: int | None, waiting: int | None, ours: int, source: LoadSource
) -> None:
    load = ObservedLoad(source=source, running=running, waiting=waiting)
    foreign = foreign_requests(an_endpoint(load=load), ours)
    if running is None or source is LoadSource.OWN:
        assert foreign == 0
    else:
        assert foreign == max(0, running + (waiting or 0) - ours)
    assert foreign_requests(an_endpoint(load=None), ours) == 0


def test_the_samplers_flags_are_part_of_the_statement() -> None:
    assert said(an_endpoint(), sampled=a_sample(flags=Flag.NO_LOAD)).flags == Flag.NO_LOAD


# --- what is moved ------------------------------------------------------------------------------------------


def test_a_model_that_is_being_unloaded_by_us_is_told_so_at_once() -> None:
    before, after = said(an_endpoint()), said(an_endpoint(), leaving={("llama", "tiny")})
    assert [row.state for row in before.residents] == [ModelState.RESIDENT]
    assert [row.state for row in after.residents] == [ModelState.UNLOADING]
    assert is_event(before, after)


def test_a_manifest_says_how_much_memory_loads_leave_free() -> None:
    plain = an_endpoint()
    (told,) = said(plain, load_memory_mib=10_000).engines
    assert told.obtainable_mib == 10_000 - 1_024
    frugal = replace(plain, manifest=replace(plain.manifest, reserve_vram_mib=64))
    (told,) = said(frugal, load_memory_mib=10_000).engines
    assert told.obtainable_mib == 10_000 - 64


def test_what_is_asked_of_this_router_is_told() -> None:
    asked = (ModelDemand(key8=bytes(8), rpm=3, work_c=7),)
    assert said(an_endpoint(), demand=asked).demand == asked
