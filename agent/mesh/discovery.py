"""Multicast discovery: announce this node, see others. Hints only; nothing here says who is alive or trusted.

Service ``_pairmesh._tcp``, instance name = node id, TXT ``v=1`` and ``id=<node id>``. What strangers may fill is
bounded: 50 browse events a second, TXT of 512 bytes, eight addresses a sighting, four look-ups at once (the book
bounds the ids). Nothing is logged per packet. Announced only on the interfaces of the own addresses that are told to
others; a loopback listener means no multicast at all.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final

from zeroconf import Error as ZeroconfError
from zeroconf import IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from agent.effects.clock import Clock
from agent.effects.tasks import Failed, Tasks
from agent.mesh.addresses import PeerAddress
from agent.mesh.interfaces import IpAddress
from router_core import limits
from router_core.ids import NodeId, parse_node_id

SERVICE: Final = "_pairmesh._tcp.local."
TXT_BYTES: Final = 512
EVENTS_PER_S: Final = 50
LOOKUPS: Final = 4
LOOKUP_MS: Final = 1_500
RECHECK_S: Final = 10.0
"""How often the own addresses are compared with those announced, and a failed start is repeated."""

Sighted = Callable[[NodeId, Sequence[PeerAddress]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryCounts:
    """What discovery met since start."""

    events: int = 0
    dropped: int = 0
    refused: int = 0
    failures: int = 0


class Discovery:
    """One node's presence in multicast DNS. ``sighted`` is told of every id but the own, members or not."""

    def __init__(
        self,
        me: NodeId,
        port: int,
        *,
        sighted: Sighted,
        clock: Clock,
        failed: Failed,
        recheck_s: float = RECHECK_S,
    ) -> None:
        self._recheck_s = recheck_s
        self._me = me
        self._port = port
        self._sighted = sighted
        self._clock = clock
        self._tasks = Tasks(failed)
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._moved = asyncio.Event()
        self._window = (0, 0)
        self._events = self._dropped = self._refused = self._failures = 0

    @property
    def seen(self) -> DiscoveryCounts:
        return DiscoveryCounts(
            events=self._events, dropped=self._dropped, refused=self._refused, failures=self._failures
        )

    def moved(self) -> None:
        """The own addresses changed: look at them now."""
        self._moved.set()

    async def run(self, addresses: Callable[[], tuple[IpAddress, ...]]) -> None:
        """Announce and browse on the interfaces of ``addresses()`` until cancelled; follows when they change.

        Without addresses nothing is sent or received. Where multicast fails, it is tried again each round.
        """
        current: tuple[IpAddress, ...] = ()
        try:
            while True:
                self._moved.clear()
                wanted = addresses()
                if set(wanted) != set(current):
                    await self._stop()
                    current = wanted if await self._start(wanted) else ()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._moved.wait(), self._recheck_s)
        finally:
            await self._stop()

    async def _start(self, addresses: Sequence[IpAddress]) -> bool:
        """Over both families, or over IPv4 alone where IPv6 cannot be had."""
        v4 = [address for address in addresses if address.version == 4]
        for used in dict.fromkeys((tuple(addresses), tuple(v4))):
            if not used or await self._begin(used, addresses):
                return True
        return False

    async def _begin(self, used: Sequence[IpAddress], addresses: Sequence[IpAddress]) -> bool:
        versions = {address.version for address in used}
        version = (
            IPVersion.All if len(versions) == 2 else IPVersion.V6Only if 6 in versions else IPVersion.V4Only
        )
        try:
            self._zeroconf = AsyncZeroconf(interfaces=[str(each) for each in used], ip_version=version)
            # Cooperating: an id is unique, and what a reflector kept of it is no reason to be silent.
            await self._zeroconf.async_register_service(
                self._announcement(addresses), cooperating_responders=True
            )
        except (OSError, RuntimeError, ZeroconfError):  # RuntimeError: an address that is gone meanwhile
            self._failures += 1
            await self._stop()
            return False
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, SERVICE, handlers=[self.changed])
        return True

    async def _stop(self) -> None:
        """Take the announcement back and close; a network that is gone is no reason to keep a socket."""
        await self._tasks.aclose()
        zeroconf, self._zeroconf = self._zeroconf, None
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.async_cancel()
        if zeroconf is not None:
            with contextlib.suppress(OSError):
                await zeroconf.async_unregister_all_services()
            await zeroconf.async_close()

    def _announcement(self, addresses: Sequence[IpAddress]) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            SERVICE,
            f"{self._me}.{SERVICE}",
            port=self._port,
            addresses=[address.packed for address in addresses],
            properties={"v": "1", "id": self._me},
            server=f"{self._me}.local.",
        )

    def changed(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """A service came or changed; one that went says nothing, since presence here means nothing."""
        if state_change is ServiceStateChange.Removed:
            return
        node_id = parse_node_id(name.removesuffix(f".{SERVICE}"))
        if node_id is None:
            self._refused += 1
            return
        if node_id == self._me:
            return
        if not self._within_rate():
            self._dropped += 1
            return
        self._events += 1
        info = AsyncServiceInfo(service_type, name)
        if info.load_from_cache(zeroconf):
            self._read(node_id, info)
        elif len(self._tasks) < LOOKUPS:
            self._tasks.spawn(self._look_up(zeroconf, node_id, info), "mdns look-up")
        else:
            self._dropped += 1

    def _within_rate(self) -> bool:
        second, count = self._window
        now_s = self._clock.boot_ms() // 1_000
        self._window = (now_s, count + 1 if second == now_s else 1)
        return self._window[1] <= EVENTS_PER_S

    async def _look_up(self, zeroconf: Zeroconf, node_id: NodeId, info: AsyncServiceInfo) -> None:
        if await info.async_request(zeroconf, LOOKUP_MS):
            self._read(node_id, info)

    def _read(self, node_id: NodeId, info: AsyncServiceInfo) -> None:
        endpoints = sighting(node_id, info)
        if endpoints:
            self._sighted(node_id, endpoints)
        else:
            self._refused += 1


def sighting(node_id: NodeId, info: Any) -> tuple[PeerAddress, ...]:
    """Where a service record says ``node_id`` is; empty if it is not of this version, too long or not of that id."""
    properties = info.properties
    if len(info.text or b"") > TXT_BYTES or properties.get(b"v") != b"1":
        return ()
    if properties.get(b"id") != node_id.encode("ascii") or not info.port:
        return ()
    ips: list[IPv4Address | IPv6Address] = info.ip_addresses_by_version(IPVersion.All)
    return tuple(PeerAddress(ip_address(ip.packed), info.port) for ip in ips[: limits.ADDRESSES])
