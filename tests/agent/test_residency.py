"""Models loaded and unloaded by what is asked for: real llama-servers in router mode, and Ollama by its fake."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from agent.effects.clock import SystemClock
from agent.effects.tasks import Tasks
from agent.engines.contract import EndpointHealth, EndpointStatus, ResidencyState
from agent.observe.instruments import LoadMetrics
from agent.observe.log import Log
from agent.residency import ModelResidency, ResidencyListeners, ResidencySources
from agent.settings.manifest import DeclaredModel, EngineKind, Manifest
from router_core.placement.demand import demand_key
from router_core.placement.residency.events import Key
from router_core.policy.placement import PlacementPolicy
from router_core.policy.residency import ResidencyPolicy
from router_core.pressure.samples import GpuStanding
from router_core.record.state import Level, ModelDemand
from tests.agent.node.rig import World, a_sample
from tests.agent.node.test_gpus import a_gpu
from tests.support.engine_setup import Watched, manifest
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.llama import LlamaServer, LlamaUnavailable, find_binary, router
from tests.support.tiny_gguf import write_model
from tests.support.until import until

HASTY = ResidencyPolicy(
    tick_ms=40,
    calm_ms=120,
    turn_ms=20,
    resident_least_ms=150,
    unused_ms=100,
    freed_ms=50,
    watch_ms=20,
    retry_ms=200,
    load_least_ms=5_000,
    loads_per_hour=1_000,
)
MIB = 2**20
LIMIT_MIB = 500
"""Memory of the host in these tests: enough for one of the small models with what its process takes, not for two."""
SMALL, LARGE = FakeModel(name="small:latest", size=100 * MIB), FakeModel(name="large:latest", size=100 * MIB)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "tiny.gguf")
    write_model(folder / "mid.gguf", size_mb=40)
    return folder


@pytest.fixture
def server(tmp_path: Path, models: Path) -> Iterable[LlamaServer]:
    try:
        find_binary()
    except LlamaUnavailable as reason:
        pytest.skip(f"no real llama-server: {reason}")
    with LlamaServer(router(models), tmp_path / "llama.log") as running:
        yield running


class Node:
    """One node: a real watch over its engines, a real view, and the demand that a test puts into its record."""

    def __init__(
        self,
        described: Manifest,
        *,
        allowed: bool = True,
        unused_ms: int = 100,
        gpus: tuple[GpuStanding, ...] = (),
        reserve_mib: int = 0,
        limit_mib: int = LIMIT_MIB,
    ) -> None:
        self.gpus = gpus
        self.limit_mib = limit_mib
        self.watched = Watched(replace(described, reserve_vram_mib=reserve_mib))
        self.world = World(policy=PlacementPolicy(realloc_enabled=allowed))
        self.asked: dict[str, int] = {}
        self.level: Level | None = Level.NONE
        self.leaving: set[Key] = set()
        self.said: list[set[Key]] = []
        self.loaded: list[tuple[str, str, float]] = []
        self.metrics = LoadMetrics()
        clock = SystemClock()
        self.lines: list[str] = []
        self.tasks = Tasks(lambda name, error: self.watched.crashes.append((name, error)))
        self.residency = ModelResidency(
            self.watched.watch,
            ResidencySources(fleet=self.fleet, free_mib=self.free_mib, level=lambda: self.level, used={}),
            ResidencyListeners(changed=self.speak, loaded=lambda *told: self.loaded.append(told)),
            leave=self.leave,
            clock=clock,
            rng=Random(1),
            tasks=self.tasks,
            log=Log(self.lines.append, clock),
            metrics=self.metrics,
            policy=dataclasses.replace(HASTY, unused_ms=unused_ms),
        )

    @property
    def status(self) -> EndpointStatus:
        return self.watched.status()

    def fleet(self) -> Any:
        """The fleet with what the engine told last, as the daemon's next statement would have it."""
        self.world.clock.now += 1
        demand = tuple(
            ModelDemand(key8=demand_key(owned.digest, owned.name), rpm=self.asked[owned.name], work_c=0)
            for owned in self.status.owned
            if self.asked.get(owned.name)
        )
        self.world.own(self.status, demand=demand, leaving=self.leaving, sampled=a_sample(gpus=self.gpus))
        return self.world.router.fleet

    def free_mib(self) -> int:
        """The stated limit less what is held: as much as the engine tells, else what the model was said to need."""
        rows = {row.model: row.need_bytes for row in self.world.router.fleet.rows}
        names = {owned.native_id: owned.name for owned in self.status.owned}
        held = [
            model.total_bytes or rows.get(names[model.native_id], 0)
            for model in self.status.resident
            if model.state in (ResidencyState.LOADING, ResidencyState.RESIDENT)
        ]
        return self.limit_mib - sum(held) // MIB

    def leave(self, models: frozenset[Key]) -> None:
        self.leaving = set(models)

    def speak(self) -> None:
        self.said.append(set(self.leaving))

    def held(self) -> dict[str, ResidencyState]:
        """What is in memory. An engine that had to kill a process to unload its model tells that as a failure."""
        names = {owned.native_id: owned.name for owned in self.status.owned}
        return {
            names.get(model.native_id, ""): model.state
            for model in self.status.resident
            if model.state is not ResidencyState.FAILED
        }

    def holds(self, *names: str) -> bool:
        return self.held() == dict.fromkeys(names, ResidencyState.RESIDENT)

    async def looked(self, times: int) -> None:
        """Wait for some more looks at the engine."""
        seen: set[int | None] = set()

        def enough() -> bool:
            seen.add(self.status.observed_ms)
            return len(seen) > times

        await until(enough, 30)


@contextlib.asynccontextmanager
async def living(node: Node) -> AsyncIterator[Node]:
    async with node.watched:
        await until(lambda: node.status.health is EndpointHealth.READY and node.status.owned)
        node.residency.sampled(False)
        driver = asyncio.create_task(node.residency.run())
        try:
            yield node
        finally:
            driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await driver
            await node.tasks.aclose()


async def statuses(server: LlamaServer) -> dict[str, str]:
    """What the engine itself says of each model."""
    async with aiohttp.ClientSession(server.url) as session, session.get("/models") as answer:
        return {item["id"]: item["status"]["value"] for item in (await answer.json())["data"]}


# --- llama.cpp ----------------------------------------------------------------------------------------------


async def test_when_demand_moves_the_first_model_is_unloaded_and_the_second_loaded_before_a_request_asks(
    server: LlamaServer,
) -> None:
    async with living(Node(manifest(server.port))) as node:
        node.asked = {"tiny": 60}
        await until(lambda: node.holds("tiny"), 30)
        await until(lambda: node.loaded)
        node.asked = {"tiny": 6, "mid": 600}
        await until(lambda: node.holds("mid"), 30, picture=lambda: (node.held(), node.lines[-5:]))
        await until(lambda: len(node.loaded) == 2)
        assert [(endpoint, model) for endpoint, model, _ in node.loaded] == [
            ("here", "tiny"),
            ("here", "mid"),
        ]
        assert {("here", "tiny")} in node.said
        assert node.leaving == set()
        assert node.residency.reserved_mib == 0
        assert await statuses(server) == {"tiny": "unloaded", "mid": "loaded"}
    assert node.metrics.loads.value("preload", "ok") == 2


async def test_a_node_that_may_not_reallocate_loads_nothing(server: LlamaServer) -> None:
    async with living(Node(manifest(server.port), allowed=False)) as node:
        node.asked = {"tiny": 600, "mid": 600}
        node.residency.noticed()
        await node.looked(40)
        assert await statuses(server) == {"tiny": "unloaded", "mid": "unloaded"}
    assert node.lines == []


async def test_a_model_that_somebody_uses_is_not_unloaded_until_they_are_done(server: LlamaServer) -> None:
    body = {"model": "mid", "prompt": "once", "max_tokens": 100_000, "stream": True, "ignore_eos": True}
    async with living(Node(manifest(server.port))) as node, aiohttp.ClientSession(server.url) as session:
        node.asked = {"mid": 60}
        await until(lambda: node.holds("mid"), 30)
        answer = await session.post("/v1/completions", json={**body, "max_tokens": 500})
        words = asyncio.create_task(answer.read())
        await until(lambda: node.status.resident[0].running)
        node.asked = {"tiny": 600}
        await words
        raw = words.result()
        assert b"[DONE]" in raw, "the answer was not cut"
        told = json.loads(raw.rpartition(b"data: {")[2].join([b"{", b""]).split(b"\n")[0])
        assert told["timings"]["predicted_n"] == 500
        await until(lambda: node.holds("tiny"), 30, picture=lambda: (node.held(), node.lines[-9:]))


async def test_under_pressure_nothing_is_loaded_and_once_it_is_over_it_is(server: LlamaServer) -> None:
    async with living(Node(manifest(server.port))) as node:
        node.level = Level.HIGH
        node.asked = {"tiny": 600}
        await node.looked(20)
        assert node.held() == {}
        node.level = Level.NONE
        await until(lambda: node.holds("tiny"), 30)


async def test_an_engine_that_holds_one_model_is_made_to_drop_it_first_however_much_memory_is_free(
    tmp_path: Path, models: Path
) -> None:
    try:
        find_binary()
    except LlamaUnavailable as reason:
        pytest.skip(f"no real llama-server: {reason}")
    with LlamaServer(router(models, models_max=1), tmp_path / "llama.log") as server:
        async with living(Node(manifest(server.port), limit_mib=50_000)) as node:
            node.asked = {"tiny": 60}
            await until(lambda: node.holds("tiny"), 30)
            node.asked = {"tiny": 6, "mid": 600}
            await until(lambda: node.holds("mid"), 30, picture=lambda: (node.held(), node.lines[-5:]))
    told = [json.loads(line)["event"] for line in node.lines]
    assert told.index("model.draining") < told.index("model.unloaded")
    assert {("here", "tiny")} in node.said


# --- Ollama -------------------------------------------------------------------------------------------------


@pytest.fixture
async def fake() -> AsyncIterator[FakeOllama]:
    async with FakeOllama(models=[SMALL, LARGE]).serving() as served:
        yield served


async def test_ollama_swaps_models_as_demand_moves(fake: FakeOllama) -> None:
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA))) as node:
        node.asked = {SMALL.name: 60}
        await until(lambda: node.holds(SMALL.name))
        node.asked = {LARGE.name: 600}
        await until(lambda: node.holds(LARGE.name))
    assert fake.loads == [SMALL.name, LARGE.name]
    orders = [(body["model"], body["keep_alive"]) for body in fake.bodies if "keep_alive" in body]
    assert orders == [(SMALL.name, 1_800), (SMALL.name, 0), (LARGE.name, 1_800)]


async def test_a_model_that_others_use_in_ollama_stays_although_ollama_tells_of_no_request(
    fake: FakeOllama,
) -> None:
    """What it does tell is when the model expires, and that moves with every request."""
    offset_s = 0.0
    fake.wall = lambda: time.time() + offset_s
    async with (
        living(Node(manifest(fake.port, EngineKind.OLLAMA), unused_ms=2_000)) as node,
        aiohttp.ClientSession(fake.url) as session,
    ):
        node.asked = {SMALL.name: 60}
        await until(lambda: node.holds(SMALL.name))
        node.asked = {LARGE.name: 600}
        for _ in range(10):
            offset_s += 10.0
            body = {"model": SMALL.name, "prompt": "hello", "stream": False}
            async with session.post("/api/generate", json=body) as answer:
                assert answer.status == 200
            await node.looked(3)
            assert node.holds(SMALL.name)
        await until(lambda: node.holds(LARGE.name))


async def test_a_model_that_the_operator_keeps_makes_no_room(fake: FakeOllama) -> None:
    kept = (DeclaredModel(name=SMALL.name, keep=True),)
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA, models=kept))) as node:
        node.asked = {SMALL.name: 60}
        await until(lambda: node.holds(SMALL.name))
        node.asked = {LARGE.name: 600}
        await node.looked(40)
        assert node.holds(SMALL.name)


async def test_what_the_operator_keeps_free_is_not_loaded_into(fake: FakeOllama) -> None:
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA), reserve_mib=LIMIT_MIB // 2)) as node:
        node.asked = {SMALL.name: 600}
        await node.looked(40)
        assert node.held() == {}


async def test_a_model_outside_of_the_gpu_is_not_unloaded_to_make_room_in_it(fake: FakeOllama) -> None:
    """The fake tells that nothing of its models is on a GPU."""
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA), gpus=(a_gpu(),))) as node:
        node.asked = {SMALL.name: 60}
        await until(lambda: node.holds(SMALL.name))
        node.asked = {LARGE.name: 600}
        await node.looked(40)
        assert node.holds(SMALL.name)
    assert fake.loads == [SMALL.name]


async def test_a_load_in_ollama_is_seen_and_reserved_while_it_lasts(fake: FakeOllama) -> None:
    fake.gate = asyncio.Event()
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA))) as node:
        node.asked = {SMALL.name: 60}
        await until(lambda: node.held() == {SMALL.name: ResidencyState.LOADING})
        assert node.residency.reserved_mib > 300
        assert node.residency.ordering, "what it does to the host is ours"
        fake.gate.set()
        await until(lambda: node.holds(SMALL.name) and node.loaded)
        assert node.residency.reserved_mib == 0
        assert not node.residency.ordering


async def test_a_model_that_ollama_cannot_load_is_not_tried_again_at_once(fake: FakeOllama) -> None:
    fake.broken = frozenset({SMALL.name})
    async with living(Node(manifest(fake.port, EngineKind.OLLAMA))) as node:
        node.asked = {SMALL.name: 60}
        await until(lambda: node.metrics.loads.value("preload", "failed"))
        await until(lambda: node.metrics.loads.value("preload", "failed") == 3)
        assert len(fake.loads) == 3
    assert node.loaded == []
    assert any("model.order_refused" in line for line in node.lines)
