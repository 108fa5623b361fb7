"""Ollama's adapter over real sockets: what it tells, what it keeps to itself, what it never asks."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agent.effects.clock import SystemClock
from agent.engines.catalogue import CATALOGUE, LOOPBACK_PORTS
from agent.engines.client import EngineClient
from agent.engines.contract import FOREVER_S, EndpointHealth, Identity, LoadSource, OwnedModel, ResidencyState
from agent.engines.detect import Detection, default_manifest
from agent.engines.identify import identify
from agent.engines.ollama import Ollama, dialects_of, owned_model, resident_model, shown_of
from agent.settings.manifest import EngineKind
from router_core.record.state import Capability, Dialect, LoadPolicy
from tests.support.engine_setup import Watched, client_of, manifest
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.fakes.replay import ReplayServer, Sample
from tests.support.until import until

TINY = FakeModel(name="tiny:latest", num_ctx=2_048)
CHATTY = FakeModel(name="hf.co/bart/Chatty-GGUF:Q4_K_M", ctx=8_192)
EMBEDDER = FakeModel(name="embedder:v1", capabilities=("embedding",), family="bert")
OLD = FakeModel(name="old:7b", capabilities=None, shown_params="7B", params=0, quant="unknown")
CLOUD = FakeModel(name="huge:1t-cloud", size=384, cloud="https://cloud.example:443")
NATIVE = Dialect.OLLAMA_CHAT | Dialect.OLLAMA_GENERATE | Dialect.OLLAMA_EMBED
HARMLESS = {
    ("GET", "/health"),
    ("GET", "/api/version"),
    ("GET", "/api/ps"),
    ("GET", "/api/tags"),
    ("POST", "/api/show"),
}


@pytest.fixture
async def fake() -> AsyncIterator[FakeOllama]:
    async with FakeOllama(models=[TINY, CHATTY, EMBEDDER, OLD, CLOUD]).serving() as served:
        yield served


def adapter(client: EngineClient) -> Ollama:
    identity = Identity(engine=EngineKind.OLLAMA, flavour="native")
    return Ollama(client=client, identity=identity, manifest=manifest(1, EngineKind.OLLAMA))


async def ask(fake: FakeOllama, path: str, **body: Any) -> bytes:
    async with aiohttp.ClientSession(fake.url) as session, session.post(path, json=body) as reply:
        return await reply.read()


async def inventory(fake: FakeOllama) -> dict[str, OwnedModel]:
    async with client_of(manifest(fake.port, EngineKind.OLLAMA)) as client:
        return {model.native_id: model for model in await adapter(client).inventory()}


# --- who answers ---------------------------------------------------------------------------------------------


async def test_ollama_is_known_by_two_routes_and_found_on_its_ports(fake: FakeOllama) -> None:
    assert {11434, 11435} <= set(LOOPBACK_PORTS)
    (found,) = await Detection(SystemClock()).detect([fake.port])
    assert (found.identity.engine, found.identity.version) == (EngineKind.OLLAMA, "0.13.3")
    assert found.identity.loads_on_demand
    assert default_manifest(found, {"ollama"}).name == "ollama-2"


async def test_one_of_the_two_routes_alone_is_not_ollama() -> None:
    tags = Sample(200, {}, b'{"models":[]}')
    version = Sample(200, {}, b'{"version":"0.13.3"}')
    for routes in ({"/api/tags": tags, "/api/ps": tags}, {"/api/version": version, "/api/tags": tags}):
        server = ReplayServer(routes)
        async with server.serving(), client_of(manifest(server.port)) as client:
            assert await identify(client) is None


@pytest.mark.parametrize(
    ("version", "newer"),
    [("0.13.3", True), ("0.13.10-rc1", True), ("1.0.0", True), ("0.13.2", False), ("0.9.6", False)],
)
def test_newer_routes_are_spoken_from_their_version_on(version: str, newer: bool) -> None:
    told = dialects_of(version, NATIVE)
    assert told & NATIVE == NATIVE
    assert bool(told & Dialect.RESPONSES) is newer
    assert bool(told & Dialect.MESSAGES) is newer


@pytest.mark.parametrize("version", ["0.0.0", "main", ""])
def test_a_build_without_a_number_speaks_the_least(version: str) -> None:
    assert dialects_of(version, NATIVE) == NATIVE


def test_what_it_can_is_in_the_catalogue() -> None:
    entry = CATALOGUE[EngineKind.OLLAMA, "native"]
    assert entry.dialects & NATIVE == NATIVE
    assert entry.caps.known & ~entry.caps.has == Capability.COUNT_TOKENS


# --- what it owns --------------------------------------------------------------------------------------------


async def test_a_model_is_told_with_what_its_list_and_its_description_say(fake: FakeOllama) -> None:
    told = (await inventory(fake))["hf.co/bart/Chatty-GGUF:Q4_K_M"]
    assert told.name == told.native_id
    assert told.digest == bytes.fromhex(CHATTY.digest)
    assert (told.size_bytes, told.quant, told.family, told.format) == (CHATTY.size, "Q4_K_M", "llama", "gguf")
    assert told.params_b == pytest.approx(3.212749888)
    assert (told.ctx_max, told.ctx_served) == (8_192, None)
    assert told.base == "hf.co/bart/chatty-gguf-instruct-3.2b"
    assert told.caps.has == Capability.TOOLS
    assert told.caps.known & Capability.VISION
    assert told.local


async def test_what_is_not_told_stays_unknown(fake: FakeOllama) -> None:
    owned = await inventory(fake)
    old = owned["old:7b"]
    assert old.caps.known == Capability(0)
    assert old.quant is None
    assert old.params_b == 7.0, "the list's rounded number, where the description has none"
    bare = owned_model({"model": "m"}, "m", shown_of({}))
    facts = (
        bare.digest,
        bare.size_bytes,
        bare.params_b,
        bare.ctx_max,
        bare.ctx_served,
        bare.quant,
        bare.base,
    )
    assert facts == (None,) * 7


async def test_a_num_ctx_parameter_is_what_one_request_may_use(fake: FakeOllama) -> None:
    told = (await inventory(fake))["tiny:latest"]
    assert (told.ctx_max, told.ctx_served) == (131_072, 2_048)
    assert (await inventory(fake))["embedder:v1"].caps.has == Capability.EMBEDDINGS


@pytest.mark.parametrize(
    ("item", "local"),
    [
        ({"model": "a:latest"}, True),
        ({"model": "cloud:latest"}, True),
        ({"model": "a:cloud"}, False),
        ({"model": "a:120b-cloud"}, False),
        ({"model": "a:latest", "remote_host": "https://cloud.example"}, False),
        ({"model": "a:latest", "remote_model": "a"}, False),
    ],
)
def test_a_model_of_the_cloud_is_not_local(item: dict[str, Any], local: bool) -> None:
    assert owned_model(item, item["model"], shown_of({})).local is local


async def test_each_digest_is_described_once_and_a_new_one_again(fake: FakeOllama) -> None:
    async with client_of(manifest(fake.port, EngineKind.OLLAMA)) as client:
        reader = adapter(client)
        for _ in range(3):
            await reader.inventory()
        assert fake.calls.count(("POST", "/api/show")) == 4, "the cloud's model is not asked about"
        fake.models[0] = FakeModel(name="tiny:latest", salt="pulled anew", ctx=4_096)
        assert (await reader.inventory())[0].ctx_max == 4_096
        assert fake.calls.count(("POST", "/api/show")) == 5


async def test_a_description_that_fails_is_asked_for_again_and_costs_no_list() -> None:
    tags = Sample(200, {}, b'{"models":[{"name":"m:latest","model":"m:latest","digest":"ab"}]}')
    server = ReplayServer({"/api/tags": tags, "/api/show": Sample(500)})
    async with server.serving(), client_of(manifest(server.port, EngineKind.OLLAMA)) as client:
        reader = adapter(client)
        (first,) = await reader.inventory()
        assert (first.name, first.ctx_max) == ("m:latest", None)
        shown = b'{"model_info":{"general.architecture":"x","x.context_length":7}}'
        server.routes["/api/show"] = Sample(200, {}, shown)
        (second,) = await reader.inventory()
        assert second.ctx_max == 7


# --- what is in memory ---------------------------------------------------------------------------------------


NOW = datetime(2026, 7, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size", "vram", "told"),
    [
        (1_000, None, (1_000, 0)),
        (1_000, 400, (1_000, 400)),
        (1_000, 1_000, (1_000, 1_000)),
        (1_000, 1_001, (1_000, None)),
        (0, 0, (None, None)),
    ],
)
def test_a_split_that_cannot_be_is_unknown(
    size: int, vram: int | None, told: tuple[int | None, int | None]
) -> None:
    item = {"model": "m", "size": size} | ({} if vram is None else {"size_vram": vram})
    model = resident_model(item, NOW)
    assert model is not None
    assert (model.total_bytes, model.vram_bytes) == told


@pytest.mark.parametrize(
    ("expires", "state", "left"),
    [
        ("2026-07-01T12:05:00.123456789Z", ResidencyState.RESIDENT, 300),
        ("2026-07-01T14:05:00+02:00", ResidencyState.RESIDENT, 300),
        ("2026-07-01T11:59:58Z", ResidencyState.UNLOADING, 0),
        ("2318-01-01T00:00:00Z", ResidencyState.RESIDENT, FOREVER_S),
        ("0001-01-01T00:00:00Z", ResidencyState.RESIDENT, None),
        ("soon", ResidencyState.RESIDENT, None),
        ("2026-07-01T12:05:00", ResidencyState.RESIDENT, None),
    ],
)
def test_an_expiry_is_read_on_the_engines_own_clock(
    expires: str, state: ResidencyState, left: int | None
) -> None:
    model = resident_model({"model": "m", "expires_at": expires}, NOW)
    assert model is not None
    assert (model.state, model.expires_s) == (state, left)


async def test_residents_are_told_with_their_context(fake: FakeOllama) -> None:
    fake.vram = 1.0
    await ask(fake, "/api/generate", model="tiny", keep_alive="10m")
    async with client_of(manifest(fake.port, EngineKind.OLLAMA)) as client:
        seen = await adapter(client).observe(0, 2_000)
    (model,) = seen.resident
    assert (model.native_id, model.state, model.ctx) == ("tiny:latest", ResidencyState.RESIDENT, 2_048)
    assert model.vram_bytes == model.total_bytes == TINY.size
    assert model.expires_s is not None
    assert 590 <= model.expires_s <= 600
    assert (seen.load.source, seen.load.running) == (LoadSource.OWN, None)


async def test_a_listed_model_loads_while_an_own_older_request_waits_for_its_first_byte(
    fake: FakeOllama,
) -> None:
    async with client_of(manifest(fake.port, EngineKind.OLLAMA)) as client:
        reader = adapter(client)

        async def state(now_ms: int, waiting: dict[str, int]) -> list[ResidencyState]:
            reader.awaits(waiting)
            return [model.state for model in (await reader.observe(now_ms, 1_000)).resident]

        assert await state(1_000, {"tiny:latest": 900}) == []
        await ask(fake, "/api/generate", model="tiny")
        assert await state(2_000, {"tiny:latest": 900}) == [ResidencyState.LOADING]
        assert await state(3_000, {"tiny:latest": 900, "old:7b": 2_500}) == [ResidencyState.LOADING]
        assert await state(4_000, {}) == [ResidencyState.RESIDENT]
        assert await state(5_000, {"tiny:latest": 4_500}) == [ResidencyState.RESIDENT], (
            "a warm one just thinks"
        )


# --- watched -------------------------------------------------------------------------------------------------


async def test_watching_tells_all_and_never_asks_what_loads_or_keeps(fake: FakeOllama) -> None:
    async with Watched(manifest(fake.port, EngineKind.OLLAMA)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        status = watched.status()
        assert [model.name for model in status.owned if model.local] == [
            "tiny:latest",
            "hf.co/bart/Chatty-GGUF:Q4_K_M",
            "embedder:v1",
            "old:7b",
        ]
        assert status.load_policy is LoadPolicy.ON_DEMAND
        assert status.dialects & (NATIVE | Dialect.EMBED) == NATIVE | Dialect.EMBED
        await ask(fake, "/api/generate", model="tiny", keep_alive="5m")
        await until(lambda: [m.native_id for m in watched.status().resident] == ["tiny:latest"])
        expires = fake.runners["tiny:latest"].expires_at
        fake.calls.clear()
        await until(lambda: fake.calls.count(("GET", "/api/ps")) >= 5)
        assert fake.runners["tiny:latest"].expires_at == expires
    assert set(fake.calls) <= HARMLESS
    assert fake.loads == ["tiny:latest"]


async def test_a_load_is_seen_as_one_through_the_watch(fake: FakeOllama) -> None:
    fake.load_s = 30
    async with Watched(manifest(fake.port, EngineKind.OLLAMA)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        sent_ms = watched.told[-1][0].observed_ms or 0
        watched.watch.report_sent("here", "tiny:latest", sent_ms)
        loading = asyncio.create_task(ask(fake, "/api/generate", model="tiny"))
        await until(lambda: [m.state for m in watched.status().resident] == [ResidencyState.LOADING])
        watched.watch.report_heard("here", "tiny:latest", sent_ms)
        await until(lambda: [m.state for m in watched.status().resident] == [ResidencyState.RESIDENT])
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)


async def test_an_engine_that_leaves_and_comes_back_in_another_version_is_read_anew(fake: FakeOllama) -> None:
    async with Watched(manifest(fake.port, EngineKind.OLLAMA)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        assert watched.status().dialects & Dialect.RESPONSES
        fake.version = "0.12.0"
        watched.watch.report_connect_failed("here")
        await until(lambda: not watched.status().dialects & Dialect.RESPONSES)
        await until(lambda: watched.status().health is EndpointHealth.READY)


async def test_a_real_server_is_read_and_left_as_it_is() -> None:
    url = os.environ.get("PAIRMESH_TEST_OLLAMA_URL")
    if url is None:
        pytest.skip("PAIRMESH_TEST_OLLAMA_URL names no real server")
    told = urlsplit(url)
    described = manifest(
        told.port or 11434, EngineKind.OLLAMA, host=told.hostname or "127.0.0.1", remote_host=True
    )
    async with client_of(described) as client:
        verdict = await identify(client, described)
        assert isinstance(verdict, Identity)
        reader = adapter(client)
        before = [model.native_id for model in (await reader.observe(0, 1_000)).resident]
        owned = {model.native_id for model in await reader.inventory()}
        assert owned.issuperset(before)
        assert [model.native_id for model in (await reader.observe(1_000, 1_000)).resident] == before
