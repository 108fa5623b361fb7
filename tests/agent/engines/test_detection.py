"""Engines on well-known ports beside those of manifests: each is watched once. Real sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent.settings.manifest import EngineKind
from tests.support.engine_setup import Watched, manifest
from tests.support.fakes.ollama import FakeModel, FakeOllama
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
