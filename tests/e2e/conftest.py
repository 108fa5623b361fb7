"""A cluster of two daemons with real engines, shared by the tests of one module."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support import llama, tiny_gguf
from tests.support.cluster import Cluster, Node, closing, pair

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
OWNED = {"alpha": ("tiny",), "beta": ("tiny", "mid")}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    try:
        llama.find_binary()
    except llama.LlamaUnavailable as why:
        pytest.skip(str(why))
    folder = tmp_path_factory.mktemp("models")
    made = {"tiny": folder / "tiny.gguf", "mid": folder / "mid.gguf"}
    tiny_gguf.write_model(made["tiny"], name="tiny")
    tiny_gguf.write_model(made["mid"], size_mb=40, name="mid")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    base = tmp_path_factory.mktemp("cluster")
    made = Cluster(base=base, nodes=[], engines=[])
    async with closing(made):
        for name, ip in IPS.items():
            folder = base / name / "models"
            folder.mkdir(parents=True)
            for model in OWNED[name]:
                (folder / f"{model}.gguf").symlink_to(models[model])
            made.engines.append(llama.LlamaServer(llama.router(folder), base / name / "engine.log", host=ip))
        embedder = llama.LlamaServer(
            llama.single(models["tiny"], alias="embedder", embedding=True),
            base / "alpha" / "embedder.log",
            host=IPS["alpha"],
        )
        made.engines.append(embedder)
        for engine in made.engines:
            await asyncio.to_thread(engine.start)
        made.nodes += [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
        for node, engine in zip(made.nodes, made.engines, strict=False):
            node.write_settings(
                [
                    f"@{other.name}={other.ip}:{other.ports['mesh']}"
                    for other in made.nodes
                    if other is not node
                ]
            )
            node.write_endpoint(engine, extra="max_queue = 64\n")
        made["alpha"].write_endpoint(embedder, "embedder", jit_load=False)
        await asyncio.gather(*(node.start() for node in made.nodes))
        await pair(made.nodes)
        await made.full_view()
        yield made
