"""Orders to engines: a real llama-server in router mode, and Ollama by its fake."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from agent.engines.client import EngineClient
from agent.engines.contract import (
    EndpointHealth,
    EngineBusy,
    EngineControl,
    EngineMisspoke,
    EngineUnreachable,
    ResidencyState,
)
from agent.engines.control import control_of
from agent.settings.manifest import EngineKind
from tests.agent.engines.conftest import StartLlama
from tests.support.engine_setup import Watched, manifest
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.llama import router, single
from tests.support.until import until

SMALL, LARGE = FakeModel(name="small:latest"), FakeModel(name="large:latest")


def states(watched: Watched) -> dict[str, ResidencyState]:
    return {model.native_id: model.state for model in watched.status().resident}


def is_gone(watched: Watched) -> bool:
    """Nothing is in memory. A server that had to kill a child to unload its model tells that as a failure."""
    return set(states(watched).values()) <= {ResidencyState.FAILED}


async def ready(watched: Watched) -> EngineControl:
    await until(lambda: watched.status().health is EndpointHealth.READY and watched.status().owned)
    control = control_of(watched.status())
    assert control is not None
    return control


# --- llama.cpp ----------------------------------------------------------------------------------------------


async def test_a_router_loads_and_unloads_what_it_is_told(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        control = await ready(watched)
        await control.load("tiny", 10.0)
        await until(lambda: states(watched) == {"tiny": ResidencyState.RESIDENT})
        await control.load("tiny", 10.0)
        await control.unload("tiny")
        await until(lambda: is_gone(watched), 30)
        await control.unload("tiny")


@pytest.mark.lesson("ggml-org/llama.cpp#21678: a swap that kills what runs")
async def test_a_model_with_a_request_in_it_is_not_unloaded_whoever_sent_it(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    body = {"model": "mid", "prompt": "once", "max_tokens": 900, "stream": True}
    async with Watched(manifest(server.port)) as watched, aiohttp.ClientSession(server.url) as session:
        control = await ready(watched)
        async with session.post("/v1/completions", json=body) as answer:
            await answer.content.readline()
            with pytest.raises(EngineBusy, match="in_use"):
                await control.unload("mid")
            assert states(watched) == {"mid": ResidencyState.RESIDENT}
            assert await answer.content.readline() is not None
        await until(lambda: watched.status().resident[0].running == 0)
        await control.unload("mid")
        await until(lambda: is_gone(watched), 30)


async def test_a_router_that_cannot_load_a_model_says_so_or_tells_it_as_failed(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        control = await ready(watched)
        with pytest.raises(EngineMisspoke, match="status"):
            await control.load("no-such-model", 10.0)
        await control.load("broken", 10.0)
        await until(lambda: states(watched) == {"broken": ResidencyState.FAILED})


async def test_a_router_tells_how_many_models_it_holds(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(router(models, models_max=1))
    async with Watched(manifest(server.port)) as watched:
        await ready(watched)
        identity = watched.status().identity
    assert identity is not None
    assert identity.models_most == 1


async def test_an_engine_that_has_gone_takes_no_order(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        control = await ready(watched)
        await asyncio.to_thread(server.stop)
        for order in (control.load("tiny", 1.0), control.unload("tiny")):
            with pytest.raises(EngineUnreachable):
                await order
        await until(lambda: control_of(watched.status()) is None)


async def test_a_server_with_one_model_or_on_another_host_takes_no_orders(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny"))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        assert control_of(watched.status()) is None
    other = start_llama(router(models))
    async with Watched(manifest(other.port, remote_host=True)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        assert control_of(watched.status()) is None


# --- Ollama -------------------------------------------------------------------------------------------------


@pytest.fixture
async def fake() -> AsyncIterator[FakeOllama]:
    async with FakeOllama(models=[SMALL, LARGE]).serving() as served:
        yield served


async def test_ollama_loads_for_half_an_hour_and_unloads_by_keeping_for_no_time(fake: FakeOllama) -> None:
    async with Watched(manifest(fake.port, EngineKind.OLLAMA)) as watched:
        control = await ready(watched)
        await control.load(SMALL.name, 10.0)
        assert fake.loads == [SMALL.name]
        assert fake.runners[SMALL.name].keep_s == 1_800
        await until(lambda: states(watched) == {SMALL.name: ResidencyState.RESIDENT})
        await control.unload(SMALL.name)
        assert fake.runners == {}
    assert all("prompt" not in body and "options" not in body for body in fake.bodies)


async def test_ollama_that_fails_or_takes_too_long_is_told(fake: FakeOllama) -> None:
    fake.broken = frozenset({LARGE.name})
    async with Watched(manifest(fake.port, EngineKind.OLLAMA)) as watched:
        control = await ready(watched)
        with pytest.raises(EngineMisspoke, match="status"):
            await control.load(LARGE.name, 10.0)
        with pytest.raises(EngineMisspoke, match="status"):
            await control.load("no-such-model", 10.0)
        fake.gate = asyncio.Event()
        with pytest.raises(EngineUnreachable, match="timeout"):
            await control.load(SMALL.name, 0.05)
        fake.gate.set()


def test_what_polls_an_engine_cannot_order_it() -> None:
    assert not hasattr(EngineClient, "order")
