"""Where others can reach this host: its addresses, ranked, and kept current.

Rules kept here: a LAN comes before a VPN; bridges that only containers or virtual machines hang on are told to nobody
as long as there is anything else, for every host has such a bridge and most have it under the same address; what the
kernel tells counts before what an interface is called. ``ranked`` is pure, ``OwnAddresses`` looks.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from ipaddress import IPv6Address, ip_network
from typing import Final

from agent.mesh.interfaces import HostNetwork, Interface, InterfaceAddress, IpAddress, changes, read_network
from agent.settings.values import Listen
from router_core import limits

LOOK_S: Final = 10.0
"""How often the addresses are looked at without being told of a change."""
SETTLE_S: Final = 0.5
"""How long after a change they are looked at: a lease that is renewed takes an address away and gives it back."""

_HANGERS_ON: Final = frozenset(
    {"veth", "tun", "tap", "macvtap", "ipvtap", "dummy", "ifb", "vxlan", "geneve", "netkit"}
)
"""Kinds of bridge ports behind which there are containers, virtual machines or nothing."""
_CONTAINER_NAME: Final = re.compile(
    r"docker.*|br-.*|virbr\d.*|vnet\d+|veth.*|cni.*|cali.*|flannel.*|podman\d*|lxcbr\d*|lxdbr\d*|lxc.*|incusbr\d*"
    r"|nerdctl\d*|weave|cilium_.*|kube-.*|nodelocaldns|vmnet\d+|vmenet\d+|vboxnet\d+|waydroid\d*|bridge1\d\d"
)
_OVERLAY_KINDS: Final = frozenset(
    {
        "wireguard",
        "tun",
        "ppp",
        "ipip",
        "ip6tnl",
        "sit",
        "gre",
        "ip6gre",
        "vti",
        "vti6",
        "xfrm",
        "amneziawg",
        "ovpn",
    }
)
_OVERLAY_NAME: Final = re.compile(
    r"(tailscale|wg|utun|tun|ppp|ipsec|ham|wt)\d+|zt[0-9a-z]+|nordlynx|nebula\d*"
)
"""Looked at only where the kernel does not tell what an interface is made of."""
_LAN: Final = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
_SHARED: Final = ip_network("100.64.0.0/10")
_OVERLAY_V6: Final = ip_network("fd7a:115c:a1e0::/48")
_ULA: Final = ip_network("fc00::/7")


class _Tier(IntEnum):
    DEFAULT_ROUTE = 1
    LAN = 2
    OVERLAY = 3
    OTHER = 4
    GUESTS = 5


def ranked(network: HostNetwork, in_use: Collection[IpAddress] = frozenset()) -> tuple[IpAddress, ...]:
    """Addresses that others may reach this host at, best first; ``in_use`` are those that links run over now."""
    by_name = {interface.name: interface for interface in network.interfaces}
    bridges = {each.name for each in network.interfaces if _is_bridge_of_guests(each, network.interfaces)}
    found: dict[IpAddress, tuple[bool, int, int, int, int]] = {}
    spare: dict[IpAddress, tuple[int, int]] = {}
    for place, held in enumerate(_lasting(network.addresses)):
        interface, ip = by_name[held.interface], held.ip
        if held.interface in bridges and interface.metric is None and ip not in in_use:
            spare[ip] = (1, place)
        elif not interface.running and ip not in in_use:
            spare[ip] = (0, place)
        else:
            tier = _tier(held, interface, held.interface in bridges)
            is_idle = ip not in in_use or tier is _Tier.GUESTS
            rank = (is_idle, tier, interface.metric or 0, _family(ip), place)
            found[ip] = min(rank, found.get(ip, rank))
    if not found:
        least = min((kind for kind, _ in spare.values()), default=0)
        return tuple(ip for ip, (kind, _) in spare.items() if kind == least)[: limits.ADDRESSES]
    return tuple(sorted(found, key=found.__getitem__))


def _lasting(addresses: tuple[InterfaceAddress, ...]) -> list[InterfaceAddress]:
    """Those that mean something beyond this host and this link, and that will stay."""
    kept = [each for each in addresses if each.usable and _means_something(each.ip)]
    stable = {(each.interface, _prefix(each.ip)) for each in kept if not each.temporary}
    return [each for each in kept if not each.temporary or (each.interface, _prefix(each.ip)) not in stable]


def _means_something(ip: IpAddress) -> bool:
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def _prefix(ip: IpAddress) -> bytes:
    return ip.packed[:8]


def _tier(held: InterfaceAddress, interface: Interface, of_guests: bool) -> _Tier:
    if of_guests and interface.metric is None:
        return _Tier.GUESTS
    if _is_overlay(held.ip, interface):
        return _Tier.OVERLAY
    if interface.metric is not None:
        return _Tier.DEFAULT_ROUTE
    return _Tier.LAN if any(held.ip in lan for lan in _LAN if lan.version == held.ip.version) else _Tier.OTHER


def _family(ip: IpAddress) -> int:
    """IPv4 first, then what is private to the site: most members may dial no other."""
    return 0 if ip.version == 4 else 1 if ip in _ULA else 2


def _is_overlay(ip: IpAddress, interface: Interface) -> bool:
    within = _OVERLAY_V6 if isinstance(ip, IPv6Address) else _SHARED
    return (
        interface.kind in _OVERLAY_KINDS
        or interface.point_to_point
        or (interface.kind is None and _OVERLAY_NAME.fullmatch(interface.name) is not None)
        or ip in within
    )


def _is_bridge_of_guests(interface: Interface, others: tuple[Interface, ...]) -> bool:
    """A bridge without a port that leads out of this host, or, where the kernel does not say, one named like that."""
    if interface.kind == "bridge":
        ports = [other for other in others if other.master == interface.name]
        return all(port.kind in _HANGERS_ON for port in ports)
    return interface.master is None and _CONTAINER_NAME.fullmatch(interface.name) is not None


class OwnAddresses:
    """The addresses of this host as of the last look; ``look`` first.

    ``ips`` are those that others can reach both ``mesh`` and ``ingress`` at, best first, at most eight; *in* it is
    every address that a dial would lead back to this node by. ``in_use`` tells which of them links run over.
    """

    def __init__(
        self,
        mesh: Listen,
        ingress: Listen,
        *,
        read: Callable[[], HostNetwork] = read_network,
        in_use: Callable[[], Collection[IpAddress]] = frozenset,
        look_s: float = LOOK_S,
    ) -> None:
        self._listens = (mesh, ingress)
        self._read = read
        self._in_use = in_use
        self._look_s = look_s
        self.ips: tuple[IpAddress, ...] = ()
        self.all: frozenset[IpAddress] = frozenset()
        """Every address of every interface that is up, those for nobody else included."""

    def __contains__(self, ip: object) -> bool:
        mesh = self._listens[0]
        return ip in self.all if mesh.source is None else ip == mesh.ip

    @property
    def missing(self) -> IpAddress | None:
        """The one address that a listener is bound to, if this host does not have it any more."""
        bound = [listen.ip for listen in self._listens if listen.source is not None and listen.ip is not None]
        return next((ip for ip in bound if not ip.is_loopback and ip not in self.all), None)

    def look(self) -> bool:
        """Read them anew; True if any came, went or changed its rank. Blocks for milliseconds."""
        return self._take(self._read())

    def _take(self, network: HostNetwork) -> bool:
        before = self.ips, self.all
        self.all = frozenset(each.ip for each in network.addresses)
        bound = [listen.ip for listen in self._listens if listen.ip is not None and listen.source is not None]
        found = bound[:1] or ranked(network, self._in_use())
        listened = [ip for ip in found if all(_covers(listen, ip) for listen in self._listens)]
        self.ips = tuple(listened[: limits.ADDRESSES])
        return before != (self.ips, self.all)

    async def follow(self, moved: Callable[[bool], None]) -> None:
        """Keep current until cancelled; ``moved`` is called after each change: False if only the ranks did."""
        told = asyncio.Event()
        with _listening(told):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(told.wait(), self._look_s)
                    await asyncio.sleep(SETTLE_S)
                told.clear()
                before = self.all
                if self._take(await asyncio.to_thread(self._read)):
                    moved(self.all != before)


@contextlib.contextmanager
def _listening(told: asyncio.Event) -> Iterator[None]:
    """Set ``told`` whenever the kernel tells of a change, as far as it does."""
    sock = changes()
    if sock is None:
        yield
        return

    def heard() -> None:
        told.set()
        with contextlib.suppress(OSError):  # more than fits is a change as well
            while sock.recv(1 << 16):
                pass

    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(sock, heard)
        yield
    finally:
        loop.remove_reader(sock)
        sock.close()


def _covers(listen: Listen, ip: IpAddress) -> bool:
    """True if a listener bound as ``listen`` says is reached at ``ip``."""
    if listen.ip is None:
        return True
    return ip.version == listen.ip.version if listen.ip.is_unspecified else ip == listen.ip
