"""What the rooms of one node share, as the daemon wires them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from agent.assembly.node import Assembly
from agent.effects.clock import SystemClock
from agent.identity.own import load_identity
from agent.observe.log import Log
from agent.settings.load import Settings, load
from agent.store.folders import Folders
from router_core.policy.placement import PRESETS
from tests.agent.node.rig import an_asked, an_endpoint, stated
from tests.support.cluster import Node
from tests.support.until import until


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Assembly]:
    """One node, built and wired; nothing of it runs but the journal."""
    files = Node(name="alone", ip="127.0.0.1", base=tmp_path)
    files.write_settings([])
    folders = Folders(state=tmp_path / "state", runtime=tmp_path / "run", config=files.config)
    folders.prepare()
    settings = load(folders.config, host_name="alone")
    assert isinstance(settings, Settings)
    clock = SystemClock()
    built = Assembly(settings, folders, load_identity(folders.state, None), clock, Log(lambda _: None, clock))
    try:
        built.ports.bind()
        await built.build()
        yield built
    finally:
        await built.journal.aclose()
        built.ports.close()


def finds_what_the_last_one_found(node: Assembly) -> bool:
    """Whether a decision leaves what it found out to the next one of its kind."""
    now = node.clock.boot_ms()
    assert not node.placement.router.fleet.sifted
    node.placement.placing(an_asked(now)).decide(attempt=1, tried=frozenset(), refused=frozenset(), now=now)
    return len(node.placement.router.fleet.sifted) == 1


async def test_decisions_build_on_each_other_under_the_first_policy_and_under_the_next(
    node: Assembly,
) -> None:
    node.placement.viewing.said(*stated(an_endpoint(), now=node.clock.boot_ms()), 2_000)
    assert finds_what_the_last_one_found(node)

    (node.folders.config / "policy.toml").write_text('preset = "latency"')
    following = asyncio.create_task(node.reloading.run())
    try:
        node.reload.set()
        await until(lambda: node.placement.router.fleet.policy == PRESETS["latency"])
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    assert (
        node.placement.router.queue.policy
        is node.placement.placing.policy
        is node.placement.router.fleet.policy
    )
    # The node may have spoken for itself meanwhile, and it has no engine.
    node.placement.viewing.said(*stated(an_endpoint(), now=node.clock.boot_ms()), 2_000)
    assert finds_what_the_last_one_found(node)


async def test_a_fault_that_was_made_good_costs_later_decisions_nothing(node: Assembly) -> None:
    node.placement.viewing.said(*stated(an_endpoint(), now=node.clock.boot_ms()), 2_000)
    [row] = node.placement.router.fleet.rows
    node.placement.router.breakers.failed(row.key, node.clock.boot_ms())
    node.placement.router.breakers.succeeded(row.key, node.clock.boot_ms())
    assert finds_what_the_last_one_found(node)


async def test_no_address_of_this_host_is_outside_wherever_the_node_listens(node: Assembly) -> None:
    assert node.settings.mesh.listen.ip == ip_address("127.0.0.1")
    assert node.mesh.own.all
    assert not [address for address in node.mesh.own.all if node.mesh.outside(address)]
    assert node.mesh.outside(ip_address("203.0.113.9"))
