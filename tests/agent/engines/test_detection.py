"""Engines on well-known ports beside those of manifests: each is watched once. Real sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.effects.clock import SystemClock
from agent.engines.detect import STRANGER_MOST_MS, Detection
from agent.settings.manifest import EngineKind
from tests.support.engine_setup import QUICK, Watched, manifest
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.fakes.replay import ReplayServer, Sample
from tests.support.until import until


@pytest.fixture
async def fake() -> AsyncIterator[FakeOllama]:
    async with FakeOllama(models=[FakeModel(name="tiny:latest")]).serving() as served:
        yield served


async def test_an_engine_of_another_host_leaves_its_port_here_free(fake: FakeOllama) -> None:
    elsewhere = manifest(fake.port, EngineKind.OLLAMA, host="127.0.0.2", remote_host=True)
    async with Watched(elsewhere, ports=(fake.port,)) as watched:
        await until(lambda: "ollama" in watched.watch.endpoints())
        assert watched.status("ollama").detected


async def test_an_engine_that_got_a_manifest_while_ports_were_tried_is_watched_once(fake: FakeOllama) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def keep_waiting(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await go_on.wait()
        writer.close()

    other = FakeOllama(models=[FakeModel(name="tiny:latest")])
    async with await asyncio.start_server(keep_waiting, "127.0.0.1") as slow, other.serving():
        ports = (fake.port, slow.sockets[0].getsockname()[1], other.port)
        async with Watched(ports=ports) as watched:
            await reached.wait()
            await watched.watch.adopt(manifest(fake.port, EngineKind.OLLAMA), None)
            go_on.set()
            await until(lambda: "ollama" in watched.watch.endpoints())
            found = {name: status.manifest.url.port for name, status in watched.watch.endpoints().items()}
    assert found == {"here": fake.port, "ollama": other.port}


async def test_a_model_that_was_pulled_is_found_once_somebody_asks_for_it() -> None:
    lazy = type(QUICK)(fast_ms=50, slow_ms=60_000)
    async with FakeOllama(models=[FakeModel(name="tiny:latest")]).serving() as fake:
        described = manifest(fake.port, EngineKind.OLLAMA)
        async with Watched(described, cadence=lazy) as watched:
            await until(lambda: bool(watched.status().owned))
            fake.models.append(FakeModel(name="pulled:latest"))
            watched.watch.look_for_models()
            await until(lambda: len(watched.status().owned) == 2)
            asked = fake.calls.count(("GET", "/api/tags"))
            watched.watch.look_for_models()
            await until(lambda: watched.status().observed_ms is not None)
            assert fake.calls.count(("GET", "/api/tags")) == asked, "not again within two seconds"


async def test_a_port_where_something_else_answers_is_tried_ever_more_rarely() -> None:
    class Shifted(SystemClock):
        now = 0

        def boot_ms(self) -> int:
            return self.now

    clock = Shifted()
    server = ReplayServer({})
    async with server.serving():
        detection = Detection(clock)
        tries = []
        while clock.now < 600_000:
            before = len(server.calls)
            assert await detection.detect([server.port]) == ()
            if len(server.calls) > before:
                tries.append(clock.now)
            clock.now += 5_000
        assert tries[:4] == [0, 5_000, 15_000, 35_000]
        assert len(tries) < 16
        server.routes["/v1/models"] = Sample(200, {}, b'{"data":[]}')
        clock.now += STRANGER_MOST_MS
        assert [found.port for found in await detection.detect([server.port])] == [server.port]
