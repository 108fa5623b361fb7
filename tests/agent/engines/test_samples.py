"""What the adapters read out of recorded answers: inventory, residency, load."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from aiohttp import web

from agent.engines.catalogue import CATALOGUE
from agent.engines.client import EngineClient
from agent.engines.contract import (
    EngineAdapter,
    EngineMisspoke,
    EngineUnreachable,
    Identity,
    LoadSource,
    Observation,
    ObservedLoad,
    ObservedModel,
    OwnedModel,
    PushingAdapter,
    ResidencyState,
)
from agent.settings.manifest import Caps, DeclaredModel, EngineKind, Manifest
from router_core.record.state import Capability
from tests.agent.engines.conftest import SAMPLES
from tests.support.engine_setup import client_of, manifest
from tests.support.fakes.replay import ReplayServer, Sample

GetSample = Callable[[str], Sample]
NO_MEDIA = Caps(known=Capability.VISION | Capability.AUDIO_IN)
NO_MEDIA_NO_EMBEDDINGS = Caps(known=Capability.VISION | Capability.AUDIO_IN | Capability.EMBEDDINGS)


def adapter(
    client: EngineClient, described: Manifest, flavour: str, *, metrics: bool = True
) -> EngineAdapter:
    identity = Identity(engine=described.engine, flavour=flavour, metrics=metrics)
    entry = CATALOGUE[described.engine, flavour]
    return entry.adapter(client=client, identity=identity, manifest=described)


def single(sample: GetSample, prefix: str) -> ReplayServer:
    paths = {"/v1/models": "models", "/props": "props", "/metrics": "metrics", "/slots": "slots"}
    return ReplayServer({path: sample(f"{prefix}-{name}") for path, name in paths.items()})


async def test_a_single_llama_server(sample: GetSample) -> None:
    server = single(sample, "llama-single")
    async with server.serving(), client_of(manifest(server.port)) as client:
        llama = adapter(client, manifest(server.port), "single")
        assert await llama.inventory() == (
            OwnedModel(
                native_id="tiny",
                name="tiny",
                size_bytes=1_853_952,
                params_b=0.000925248,
                ctx_max=4_096,
                ctx_served=2_048,
                parallel=2,
                quant="F16",
                format="gguf",
                caps=NO_MEDIA,
            ),
        )
        assert await llama.observe(0, 1_000) == Observation(
            resident=(
                ObservedModel(
                    native_id="tiny", state=ResidencyState.RESIDENT, ctx=2_048, slots=2, running=0, waiting=0
                ),
            ),
            load=ObservedLoad(source=LoadSource.ENGINE, running=0, waiting=0),
        )
        assert llama.instance == "2828070849"
    assert ("GET", "/slots") not in server.calls, "an idle engine is not asked for its slots"


async def test_an_older_llama_server_tells_less_and_the_rest_is_unknown(sample: GetSample) -> None:
    server = single(sample, "llama-2026-04")
    async with server.serving(), client_of(manifest(server.port)) as client:
        llama = adapter(client, manifest(server.port), "single")
        (owned,) = await llama.inventory()
        seen = await llama.observe(0, 1_000)
    assert (owned.native_id, owned.name, owned.ctx_served, owned.parallel) == (
        "tiny.gguf",
        "tiny.gguf",
        1_024,
        2,
    )
    assert owned.quant is None
    assert seen.load == ObservedLoad(source=LoadSource.ENGINE, running=0, waiting=0)
    assert seen.resident[0].ctx == 1_024


async def test_a_sleeping_llama_server_is_asked_for_nothing_that_could_wake_it(sample: GetSample) -> None:
    server = single(sample, "llama-single")
    props = sample("llama-single-props")
    asleep = props.body.replace(b'"is_sleeping":false', b'"is_sleeping":true')
    server.routes["/props"] = Sample(200, props.headers, asleep)
    async with server.serving(), client_of(manifest(server.port)) as client:
        llama = adapter(client, manifest(server.port), "single")
        await llama.inventory()
        seen = await llama.observe(0, 1_000)
    assert seen.resident[0].state is ResidencyState.SLEEPING
    assert seen.load == ObservedLoad(source=LoadSource.OWN)
    assert {path for _, path in server.calls} == {"/v1/models", "/props"}


async def test_a_busy_llama_server_tells_the_share_of_its_context_in_use(sample: GetSample) -> None:
    server = single(sample, "llama-single")
    metrics = sample("llama-single-metrics")
    busy = metrics.body.replace(b"llamacpp:requests_processing 0", b"llamacpp:requests_processing 1")
    server.routes["/metrics"] = Sample(200, metrics.headers, busy)
    slots = (
        b'[{"id":0,"n_ctx":2048,"is_processing":true,"n_prompt_tokens":1000,"next_token":[{"n_decoded":24}]},'
        b'{"id":1,"n_ctx":2048,"is_processing":false}]'
    )
    server.routes["/slots"] = Sample(200, {}, slots)
    async with server.serving(), client_of(manifest(server.port)) as client:
        llama = adapter(client, manifest(server.port), "single")
        await llama.inventory()
        seen = await llama.observe(0, 1_000)
    assert seen.resident[0].kv_used == 0.25
    assert seen.load.running == 1


async def test_without_metrics_the_load_is_our_own_requests(sample: GetSample) -> None:
    server = single(sample, "llama-single")
    async with server.serving(), client_of(manifest(server.port)) as client:
        llama = adapter(client, manifest(server.port), "single", metrics=False)
        await llama.inventory()
        seen = await llama.observe(0, 1_000)
    assert seen.load == ObservedLoad(source=LoadSource.OWN)
    assert seen.resident[0].running is None


async def test_a_router_with_nothing_loaded(sample: GetSample) -> None:
    listed = sample("llama-router-models")
    server = ReplayServer({"/models": listed})
    async with server.serving(), client_of(manifest(server.port)) as client:
        router = adapter(client, manifest(server.port), "router")
        owned = await router.inventory()
        assert await router.observe(0, 1_000) == Observation(
            resident=(), load=ObservedLoad(source=LoadSource.OWN)
        )
    assert owned == tuple(
        OwnedModel(
            native_id=name,
            name=name,
            ctx_served=1_024,
            parallel=2,
            format="gguf",
            caps=NO_MEDIA_NO_EMBEDDINGS,
        )
        for name in ("broken", "mid", "tiny")
    )
    assert {path for _, path in server.calls} == {"/models"}


async def test_a_router_with_a_model_loaded_is_asked_about_it_without_loading_anything(
    sample: GetSample,
) -> None:
    server = ReplayServer(
        {
            "/models": sample("llama-router-models-loaded"),
            "/props": sample("llama-router-props"),
            "/metrics": sample("llama-router-metrics"),
        }
    )
    async with server.serving(), client_of(manifest(server.port)) as client:
        router = adapter(client, manifest(server.port), "router")
        mid = next(model for model in await router.inventory() if model.name == "mid")
        for now in range(2):
            await router.observe(now, 1_000)
        seen = await router.observe(2, 1_000)
    assert (mid.size_bytes, mid.quant, mid.ctx_max, mid.ctx_served) == (41_785_344, "F16", 4_096, 1_024)
    assert seen == Observation(
        resident=(
            ObservedModel(
                native_id="mid", state=ResidencyState.RESIDENT, ctx=1_024, slots=2, running=0, waiting=0
            ),
        ),
        load=ObservedLoad(source=LoadSource.ENGINE, running=0, waiting=0),
    )
    asked = [path for _, path in server.calls if "model=" in path]
    assert all(path.endswith("&autoload=false") for path in asked)
    assert asked.count("/props?model=mid&autoload=false") == 1, "facts of a loaded model are read once"


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_a_model_gone_between_the_list_and_the_question_is_no_fault(
    sample: GetSample, status: int
) -> None:
    gone = Sample(status, {}, b'{"error":{"message":"model is not loaded"}}')
    server = ReplayServer({"/models": sample("llama-router-models-loaded"), "/props": gone, "/metrics": gone})
    async with server.serving(), client_of(manifest(server.port)) as client:
        seen = await adapter(client, manifest(server.port), "router").observe(0, 1_000)
    assert seen.resident[0].running is None


def steps_of(seen: Observation) -> list[tuple[str, ResidencyState, float | None]]:
    return [(model.native_id, model.state, model.progress) for model in seen.resident]


async def test_the_events_of_a_router_tell_every_step_of_a_load(sample: GetSample) -> None:
    recorded = (SAMPLES / "llama-router-models-sse.txt").read_bytes()
    events = Sample(200, {"Content-Type": "text/event-stream"}, recorded)
    server = ReplayServer({"/models": sample("llama-router-models"), "/models/sse": events})
    async with server.serving(), client_of(manifest(server.port)) as client:
        router = adapter(client, manifest(server.port), "router")
        assert isinstance(router, PushingAdapter)
        changes = router.changes()
        steps = [steps_of(await anext(changes)) for _ in range(9)]
        with pytest.raises(EngineUnreachable):
            await anext(changes)
    assert steps == [
        [],
        [("mid", ResidencyState.LOADING, None)],
        [("mid", ResidencyState.LOADING, 0.0)],
        [("mid", ResidencyState.LOADING, 1.0)],
        [("mid", ResidencyState.RESIDENT, None)],
        [],
        [("broken", ResidencyState.LOADING, None)],
        [("broken", ResidencyState.LOADING, 0.0)],
        [("broken", ResidencyState.FAILED, None)],
    ]


async def test_a_plain_server_owns_what_it_lists_and_counts_as_ready(sample: GetSample) -> None:
    server = ReplayServer({"/v1/models": sample("llama-cpp-python-0.3.36-models")})
    async with server.serving():
        described = manifest(server.port, EngineKind.OPENAI)
        async with client_of(described) as client:
            plain = adapter(client, described, "plain")
            assert await plain.inventory() == (OwnedModel(native_id="tiny-lcpp", name="tiny-lcpp"),)
            seen = await plain.observe(0, 1_000)
            await plain.observe(0, 1_000)
    assert seen == Observation(
        resident=(ObservedModel(native_id="tiny-lcpp", state=ResidencyState.RESIDENT),),
        load=ObservedLoad(source=LoadSource.OWN),
    )
    assert {path for _, path in server.calls} == {"/v1/models"}, "its list is its sign of life"


async def test_a_plain_server_that_cannot_list_owns_what_its_manifest_declares(sample: GetSample) -> None:
    server = ReplayServer(
        {
            "/v1/models": sample("transformers-5.19.0-serve-models"),
            "/health": sample("transformers-5.19.0-serve-health"),
        }
    )
    declared = (DeclaredModel(name="small", upstream_name="hf-tiny@main", ctx_max=512),)
    async with server.serving():
        described = manifest(server.port, EngineKind.OPENAI, models=declared)
        async with client_of(described) as client:
            plain = adapter(client, described, "plain")
            (owned,) = await plain.inventory()
            seen = await plain.observe(0, 1_000)
    assert (owned.name, owned.native_id, owned.ctx_max) == ("small", "hf-tiny@main", 512)
    assert seen.resident[0].native_id == "hf-tiny@main"


async def test_with_the_event_stream_open_the_router_itself_is_still_asked_whether_it_lives(
    sample: GetSample,
) -> None:
    async def silent_events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    server = ReplayServer({"/models": sample("llama-router-models"), "/models/sse": silent_events})
    async with server.serving(), client_of(manifest(server.port)) as client:
        router = adapter(client, manifest(server.port), "router")
        assert isinstance(router, PushingAdapter)
        async with contextlib.aclosing(router.changes()) as changes:
            await anext(changes)
            server.calls.clear()
            with pytest.raises(EngineMisspoke):
                await router.observe(0, 1_000)
            server.routes["/health"] = sample("llama-router-health")
            await router.observe(0, 1_000)
        assert server.calls == [("GET", "/health")] * 2, "the list is left to the slow tier"
        await router.observe(0, 1_000)
        assert server.calls[-1] == ("GET", "/models"), "without the stream it is read again"
