"""Discovery against real multicast DNS on the loopback interface, and against records as strangers write them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from ipaddress import ip_address

import pytest
from zeroconf import IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from agent.effects.clock import SystemClock
from agent.mesh.addresses import PeerAddress
from agent.mesh.discovery import (
    EVENTS_PER_S,
    SERVICE,
    TXT_BYTES,
    Discovery,
    sighting,
)
from agent.mesh.interfaces import IpAddress
from router_core.ids import Id32, NodeId, node_id_of
from tests.support.until import until

LOOPBACK = ip_address("127.0.0.1")
IDS = [node_id_of(Id32(bytes([number]) * 32)) for number in range(1, 5)]


class Watcher:
    """A discovery with everything it sighted."""

    def __init__(self, me: NodeId, port: int) -> None:
        self.sightings: list[tuple[NodeId, tuple[PeerAddress, ...]]] = []
        self.failures: list[BaseException] = []
        self.addresses: tuple[IpAddress, ...] = (LOOPBACK,)
        self.discovery = Discovery(
            me,
            port,
            sighted=self._sighted,
            clock=SystemClock(),
            failed=lambda name, exc: self.failures.append(exc),
            recheck_s=0.05,
        )

    def _sighted(self, node_id: NodeId, endpoints: Sequence[PeerAddress]) -> None:
        self.sightings.append((node_id, tuple(endpoints)))


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def started(stack: AsyncExitStack, me: NodeId, port: int) -> Watcher:
    watcher = Watcher(me, port)
    running = asyncio.create_task(watcher.discovery.run(lambda: watcher.addresses))

    async def end() -> None:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    stack.push_async_callback(end)
    return watcher


def info(
    node_id: NodeId, *, port: int = 7433, id_text: str | None = None, v: str = "1", pad: int = 0
) -> AsyncServiceInfo:
    properties = {"v": v, "id": node_id if id_text is None else id_text}
    properties.update({f"pad{n}": "x" * 200 for n in range(pad)})
    return AsyncServiceInfo(
        SERVICE,
        f"{node_id}.{SERVICE}",
        port=port,
        addresses=[LOOPBACK.packed],
        properties=properties,
        server=f"{node_id}.local.",
    )


def sighted(watcher: Watcher) -> set[str]:
    """Which nodes of this test ``watcher`` saw: other programs on the host may announce theirs."""
    return {str(node_id) for node_id, _ in watcher.sightings} & set(IDS)


async def test_two_nodes_on_one_interface_sight_each_other_and_follow_a_change(stack: AsyncExitStack) -> None:
    a = await started(stack, IDS[0], 7433)
    b = await started(stack, IDS[1], 7533)
    await until(lambda: (IDS[1], (PeerAddress(LOOPBACK, 7533),)) in a.sightings, 15)
    await until(lambda: (IDS[0], (PeerAddress(LOOPBACK, 7433),)) in b.sightings, 15)
    moved = ip_address("127.0.0.9")
    b.addresses = (moved,)
    newest_first = PeerAddress(moved, 7533)
    await until(
        lambda: any(seen[0] == newest_first for _, seen in a.sightings), 15, picture=lambda: a.sightings
    )
    assert sighted(a) == {IDS[1]}
    assert a.failures == b.failures == []


async def test_a_service_that_is_no_node_is_refused_and_says_nothing(stack: AsyncExitStack) -> None:
    a = await started(stack, IDS[0], 7433)
    stranger = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    stack.push_async_callback(stranger.async_close)
    odd = AsyncServiceInfo(
        SERVICE, f"printer.{SERVICE}", port=631, addresses=[LOOPBACK.packed], server="p.local."
    )
    await stranger.async_register_service(odd)
    await stranger.async_register_service(info(IDS[2], id_text=IDS[3]))
    await until(lambda: a.discovery.seen.refused >= 2, 15)
    assert sighted(a) == set()


@pytest.mark.threat("T2")
async def test_browse_events_are_limited_per_second(stack: AsyncExitStack) -> None:
    zeroconf = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    stack.push_async_callback(zeroconf.async_close)
    watcher = Watcher(IDS[0], 7433)
    for turn in range(4 * EVENTS_PER_S):
        name = node_id_of(Id32(turn.to_bytes(32, "big")))
        watcher.discovery.changed(zeroconf.zeroconf, SERVICE, f"{name}.{SERVICE}", ServiceStateChange.Added)
    seen = watcher.discovery.seen
    assert seen.events <= 2 * EVENTS_PER_S
    assert seen.events + seen.dropped >= 4 * EVENTS_PER_S


def test_a_record_counts_only_if_it_is_of_that_id_version_and_size() -> None:
    good = info(IDS[0])
    assert sighting(IDS[0], good) == (PeerAddress(LOOPBACK, 7433),)
    assert sighting(IDS[1], good) == ()
    assert sighting(IDS[0], info(IDS[0], id_text="")) == ()
    assert sighting(IDS[0], info(IDS[0], v="2")) == ()
    assert sighting(IDS[0], info(IDS[0], port=0)) == ()
    bloated = info(IDS[0], pad=3)
    assert len(bloated.text) > TXT_BYTES
    assert sighting(IDS[0], bloated) == ()


async def test_without_addresses_nothing_is_announced(stack: AsyncExitStack) -> None:
    a = await started(stack, IDS[0], 7433)
    b = Watcher(IDS[1], 7533)
    b.addresses = ()
    asked: list[int] = []

    def addresses() -> tuple[IpAddress, ...]:
        asked.append(1)
        return b.addresses

    running = asyncio.create_task(b.discovery.run(addresses))
    await until(lambda: len(asked) > 2)
    assert b.discovery.seen.failures == 0
    b.addresses = (LOOPBACK,)
    await until(lambda: b.sightings and a.sightings, 15)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_both_families_are_announced_and_a_move_is_told_without_waiting(stack: AsyncExitStack) -> None:
    a, b = await started(stack, IDS[0], 7433), await started(stack, IDS[1], 7533)
    both = (LOOPBACK, ip_address("::1"))
    a.addresses = b.addresses = both
    a.discovery.moved()
    b.discovery.moved()
    wanted = {PeerAddress(ip, 7533) for ip in both}
    await until(lambda: any(set(seen) == wanted for _, seen in a.sightings), 15, picture=lambda: a.sightings)


async def test_an_id_that_somebody_else_announces_silences_nobody(stack: AsyncExitStack) -> None:
    """A reflector repeats what it heard before this node moved; a stranger may announce what it likes."""
    reflector = AsyncZeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    stack.push_async_callback(reflector.async_close)
    await reflector.async_register_service(info(IDS[0], port=1))
    a = await started(stack, IDS[0], 7433)
    b = await started(stack, IDS[1], 7533)
    await until(
        lambda: (IDS[0], (PeerAddress(LOOPBACK, 7433),)) in b.sightings, 15, picture=lambda: b.sightings
    )
    assert a.failures == []
    assert a.discovery.seen.failures == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_interface_without_multicast_is_tried_again(stack: AsyncExitStack) -> None:
    """zeroconf drops its socket unclosed when an interface is missing; that warning is not ours."""
    watcher = await started(stack, IDS[0], 7433)
    watcher.addresses = (ip_address("192.0.2.1"),)
    await until(lambda: watcher.discovery.seen.failures >= 2, 15)
    watcher.addresses = (LOOPBACK,)
    other = await started(stack, IDS[1], 7533)
    await until(lambda: watcher.sightings and other.sightings, 15)
