"""What the kernel tells of this host's interfaces: their kinds, their addresses, and where the default routes lead.

Asked over rtnetlink, which needs no privilege and answers for the network this process is in. Where there is none,
psutil tells names and addresses, and everything else is unknown. Reads only; refuses to know what an address is
good for.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

import psutil

IpAddress = IPv4Address | IPv6Address

ANSWER_S: Final = 1.0
ROUTES_BYTES: Final = 1 << 20
"""As much of the routes is read: default routes come first."""

_REQUEST, _DUMP, _INTERRUPTED = 0x1, 0x300, 0x10
_ERROR, _DONE = 2, 3
_GET_LINK, _GET_ADDRESS, _GET_ROUTE = 18, 22, 26
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ROUTE = struct.Struct("=BBBBBBBBI")
_HOP = struct.Struct("=HBBi")
_ATTRIBUTE = struct.Struct("=HH")
_U32 = struct.Struct("=I")
_IFLA_NAME, _IFLA_MASTER, _IFLA_INFO, _INFO_KIND = 3, 10, 18, 1
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_RTA_OIF, _RTA_PRIORITY, _RTA_MULTIPATH, _RTA_TABLE = 4, 6, 9, 15
_UP, _POINT_TO_POINT, _RUNNING = 0x1, 0x10, 0x40
_TEMPORARY, _DUPLICATE, _DEPRECATED, _TENTATIVE, _OPTIMISTIC = 0x01, 0x08, 0x20, 0x40, 0x04
_MAIN_TABLE, _UNICAST = 254, 1
_CHANGES: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""Multicast groups: links, addresses and routes of both families."""
_FAMILY = getattr(socket, "AF_NETLINK", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """``kind`` is the kernel's word for what it is made of, "" for hardware, None if untold. ``running``: up, with a
    carrier. ``metric`` is that of the best default route over it, None without one."""

    name: str
    kind: str | None = None
    running: bool = True
    point_to_point: bool = False
    master: str | None = None
    metric: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceAddress:
    """One address of an interface. ``temporary`` ones are meant to be given up soon; ``usable`` tells whether the kernel
    uses it for new connections: not if it is a duplicate, not yet proven, or given up."""

    ip: IpAddress
    interface: str
    temporary: bool = False
    usable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNetwork:
    """All interfaces that are up, and their addresses in the kernel's order."""

    interfaces: tuple[Interface, ...] = ()
    addresses: tuple[InterfaceAddress, ...] = ()


def read_network() -> HostNetwork:
    """This host's interfaces and addresses now. Blocks for milliseconds."""
    if _FAMILY is not None:
        with contextlib.suppress(OSError, struct.error, ValueError):
            return _asked_kernel()
    return _asked_psutil()


def changes() -> socket.socket | None:
    """A socket that becomes readable when links, addresses or routes change; None if the kernel reports none."""
    if _FAMILY is None:
        return None
    sock = None
    try:
        sock = socket.socket(_FAMILY, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        sock.bind((0, _CHANGES))
    except OSError:
        if sock is not None:
            sock.close()
        return None
    return sock


def _asked_kernel() -> HostNetwork:
    assert _FAMILY is not None
    with socket.socket(_FAMILY, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(ANSWER_S)
        links = dict(map(_link, _dump(sock, _GET_LINK, _LINK.pack(0, 0, 0, 0, 0))))
        held = [
            found
            for body in _dump(sock, _GET_ADDRESS, _ADDRESS.pack(0, 0, 0, 0, 0))
            if (found := _held(body))
        ]
        metrics = dict[int, int]()
        for family in (socket.AF_INET, socket.AF_INET6):
            asked = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
            for body in _dump(sock, _GET_ROUTE, asked, most=ROUTES_BYTES):
                for index, metric in _defaults(body):
                    metrics[index] = min(metric, metrics.get(index, metric))
    names = {index: name for index, (_, name, _, _) in links.items()}
    up = {
        index: Interface(
            name=name,
            kind=kind,
            running=bool(flags & _RUNNING),
            point_to_point=bool(flags & _POINT_TO_POINT),
            master=names.get(master or 0),
            metric=metrics.get(index),
        )
        for index, (flags, name, kind, master) in links.items()
        if flags & _UP
    }
    return HostNetwork(
        interfaces=tuple(up.values()),
        addresses=tuple(
            InterfaceAddress(
                ip=ip,
                interface=up[index].name,
                temporary=ip.version == 6 and bool(flags & _TEMPORARY),
                usable=not flags & (_DUPLICATE | _DEPRECATED)
                and (not flags & _TENTATIVE or bool(flags & _OPTIMISTIC)),
            )
            for index, ip, flags in held
            if index in up
        ),
    )


def _dump(sock: socket.socket, kind: int, body: bytes, most: int | None = None) -> list[bytes]:
    """The bodies of everything of one kind; once more if something changed meanwhile. ``most``: bytes to read."""
    found: list[bytes] = []
    for number in (1, 2):
        sock.send(_HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _DUMP, number, 0) + body)
        found, whole = _answer(sock, number, most)
        if whole:
            break
    return found


def _answer(sock: socket.socket, number: int, most: int | None) -> tuple[list[bytes], bool]:
    found: list[bytes] = []
    whole, read = True, 0
    while True:
        data = sock.recv(1 << 18)
        read += len(data)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            if length < _HEADER.size:
                raise ValueError("a netlink message shorter than its header")
            if sequence == number:
                whole = whole and not flags & _INTERRUPTED
                if kind == _DONE:
                    return found, whole
                if kind == _ERROR:
                    raise OSError(f"netlink: {data[at : at + 20].hex()}")
                found.append(data[at + _HEADER.size : at + length])
            at += (length + 3) & ~3
        if most is not None and read >= most:
            return found, True


def _attributes(body: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, at)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, body[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "replace")


def _link(body: bytes) -> tuple[int, tuple[int, str, str, int | None]]:
    """Index; flags, name, kind, master."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    told = dict(_attributes(body, _LINK.size))
    kind = dict(_attributes(told.get(_IFLA_INFO, b""), 0)).get(_INFO_KIND, b"")
    master = told.get(_IFLA_MASTER)
    return index, (
        flags,
        _text(told.get(_IFLA_NAME, b"")),
        _text(kind),
        None if master is None else int(_U32.unpack(master)[0]),
    )


def _held(body: bytes) -> tuple[int, IpAddress, int] | None:
    """Index of the interface, address, flags."""
    family, _, flags, _, index = _ADDRESS.unpack_from(body)
    told = dict(_attributes(body, _ADDRESS.size))
    packed = told.get(_IFA_LOCAL) or told.get(_IFA_ADDRESS)
    if packed is None or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    if (more := told.get(_IFA_FLAGS)) is not None:
        (flags,) = _U32.unpack(more)
    return index, ip_address(packed), flags


def _defaults(body: bytes) -> Iterator[tuple[int, int]]:
    """The interfaces, with the metric, that a route leads over, if it is a default route of the main table."""
    _, bits, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(body)
    told = dict(_attributes(body, _ROUTE.size))
    if (named := told.get(_RTA_TABLE)) is not None:
        (table,) = _U32.unpack(named)
    if bits or kind != _UNICAST or table != _MAIN_TABLE:
        return
    metric = int(_U32.unpack(told.get(_RTA_PRIORITY, b"\0\0\0\0"))[0])
    if (index := told.get(_RTA_OIF)) is not None:
        yield int(_U32.unpack(index)[0]), metric
    hops, at = told.get(_RTA_MULTIPATH, b""), 0
    while at + _HOP.size <= len(hops):
        length, _, _, hop = _HOP.unpack_from(hops, at)
        if length < _HOP.size:
            return
        yield hop, metric
        at += (length + 3) & ~3


def _asked_psutil() -> HostNetwork:
    stats = psutil.net_if_stats()
    names = [name for name in psutil.net_if_addrs() if name not in stats or stats[name].isup]
    held = []
    for name in names:
        for address in psutil.net_if_addrs().get(name, ()):
            with contextlib.suppress(ValueError):
                held.append(InterfaceAddress(ip=ip_address(address.address), interface=name))
    return HostNetwork(interfaces=tuple(Interface(name=name) for name in names), addresses=tuple(held))
