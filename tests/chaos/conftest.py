"""The run of this process, the mesh of a module, and what is checked around every chaos test."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.chaos.capabilities import probe, required
from tests.support.chaos.mesh import Mesh, meshed
from tests.support.chaos.run import Run

SEED = 1
POOLS_FULL = 32
"""As many requests at once as leave every pool of idle connections full: what comes later adds none."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=SEED, help="victims and times of chaos tests")


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    missing = probe().missing
    if required() & missing.keys():
        pytest.fail(f"chaos needs {missing}")
    if missing:
        pytest.skip("; ".join(f"{name}: {why}" for name, why in missing.items()))
    with tempfile.TemporaryDirectory(prefix="pmc-") as folder:
        made = Run(seed=request.config.getoption("--seed", default=SEED), base=Path(folder))
        yield made
        left = made.leftovers()
    assert left == [], "the run left something behind"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(run: Run, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """Nodes that find each other by multicast: three, or those that the module names as ``HOSTS``."""
    module = request.module.__name__.rpartition(".")[2].removeprefix("test_")
    hosts = getattr(request.module, "HOSTS", ("a", "b", "c"))
    async with meshed(run.base, module[:8], hosts) as made:
        for name in made.nodes:
            await made.burst(name, POOLS_FULL)
        await made.quiesce()
        await made.note_usage()
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def whole(mesh: Mesh) -> AsyncIterator[Mesh]:
    """The module's mesh; after the test it must become quiet, and every invariant hold."""
    yield mesh
    await mesh.quiesce()
    assert await mesh.violations() == []
