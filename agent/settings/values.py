"""Parsers of single settings: from what a TOML reader returns to the typed value.

A parser reports everything wrong with its value through ``refuse`` and returns what it could read; the caller
uses the result only if nothing was refused. Nothing here opens a file or resolves a name.
"""

import difflib
import ipaddress
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, Protocol

from router_core.ids import NodeId, NodeName, parse_marked_name, parse_node_id, parse_node_name

LISTEN: Final = '"IP:PORT", "[IPV6]:PORT" or ":PORT" (all addresses)'
LOOPBACK_LISTEN: Final = '"127.X.X.X:PORT" or "[::1]:PORT"'
MESH_PORT: Final = 7433
LIST_MAX: Final = 256
WHOLE: Final = object()
"""Stands for the value as it was written, whole."""

_HOST = re.compile(r"(?=.{1,259}\Z)([a-z0-9]([a-z0-9.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{0,31}://([a-z0-9.-]{1,253}|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class Refuse(Protocol):
    """Where a parser reports. ``value`` is the offending part (None: nothing to show), ``allowed`` what the key
    takes unless given, ``at`` the place below the key, ``meant`` the known name a misspelt one resembles."""

    def __call__(
        self,
        problem: str,
        *,
        value: object = WHOLE,
        allowed: str | None = None,
        at: str = "",
        meant: str | None = None,
    ) -> None: ...


Parse = Callable[[object, Refuse], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a listener binds. ``ip`` None means every address of both families: one IPv4 socket, and one IPv6
    socket with ``IPV6_V6ONLY`` where the host has IPv6. Port 0 lets the system choose."""

    ip: IPv4Address | IPv6Address | None
    port: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """The literal addresses to bind, in order."""
        return ("0.0.0.0", "::") if self.ip is None else (str(self.ip),)

    @property
    def source(self) -> str | None:
        """The literal address to dial from; None unless the listener is bound to exactly one."""
        return None if self.ip is None or self.ip.is_unspecified else str(self.ip)

    @property
    def loopback(self) -> bool:
        return self.ip is not None and self.ip.is_loopback

    def __str__(self) -> str:
        if self.ip is None:
            return f":{self.port}"
        return f"[{self.ip}]:{self.port}" if self.ip.version == 6 else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHint:
    """One entry of ``mesh.peers``: a node id, or a name (``named``) with what its id begins with if that is told, and
    where to dial it."""

    ref: NodeId | NodeName
    named: bool
    mark: str = ""
    ip: IPv4Address | IPv6Address
    port: int


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The one of ``known`` that ``name`` is most likely a misspelling of."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), None)


def switch(written: object, refuse: Refuse) -> bool:
    """A boolean."""
    if not isinstance(written, bool):
        refuse("not a boolean")
    return written is True


def text(written: object, refuse: Refuse) -> str:
    """Any text."""
    if isinstance(written, str):
        return written
    refuse("not text")
    return ""


def choice(written: object, refuse: Refuse, *, names: Sequence[str]) -> str:
    """One of ``names``."""
    if written not in names:
        refuse("unknown choice")
    return str(written)


def whole(written: object, refuse: Refuse, *, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``."""
    if not isinstance(written, int) or isinstance(written, bool):
        refuse("not a whole number")
        return least
    if not least <= written <= most:
        refuse("out of range")
    return written


def same(value: object) -> object:
    """The value of a key that is written as it is kept."""
    return value


def real(written: object, refuse: Refuse, *, least: float, most: float) -> float:
    """A number, whole or not."""
    found = number(written)
    if found is None:
        refuse("not a number")
        return least
    if not least <= found <= most:
        refuse("out of range")
    return found


def milliseconds(written: object, refuse: Refuse, *, least_s: float, most_s: float) -> int:
    """Seconds as written, whole or not, in milliseconds."""
    seconds = number(written)
    if seconds is None:
        refuse("not a number")
        return 0
    if not least_s <= seconds <= most_s:
        refuse("out of range")
        return 0
    return round(seconds * 1000)


def number(written: object) -> float | None:
    """``written`` as a finite number, or None."""
    if isinstance(written, bool) or not isinstance(written, int | float):
        return None
    try:
        found = float(written)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def node_name(written: object, refuse: Refuse) -> NodeName:
    """The name of a node."""
    name = parse_node_name(written) if isinstance(written, str) else None
    if name is None:
        refuse("not a node name")
        return NodeName("node")
    return name


def name_of_host(host: str) -> NodeName:
    """A node name made of a host name: its first label, lower case, other characters as dashes."""
    label = re.sub(r"[^a-z0-9]+", "-", host.split(".")[0].lower()).strip("-")[:32].rstrip("-")
    return NodeName(label or "node")


def listen(written: object, refuse: Refuse) -> Listen:
    """An address and port to listen on."""
    found = _listen(written)
    if found is None:
        refuse("not a listening address")
        return Listen(ip=None, port=0)
    return found


def loopback_listen(written: object, refuse: Refuse) -> Listen:
    """A listener without authentication of its own: never reachable from another host."""
    found = listen(written, refuse)
    if _listen(written) is not None and not found.loopback:
        refuse(
            "listens beyond loopback, where callers would have to be authenticated; not available in this version"
        )
    return found


def _listen(written: object) -> Listen | None:
    if not isinstance(written, str):
        return None
    host, colon, digits = written.rpartition(":")
    port = _port(digits, least=0)
    if not colon or port is None:
        return None
    if not host:
        return Listen(ip=None, port=port)
    ip = _ip(host)
    return None if ip is None else Listen(ip=ip, port=port)


def _port(digits: str, least: int = 1) -> int | None:
    if not re.fullmatch(r"[0-9]{1,5}", digits):
        return None
    return int(digits) if least <= int(digits) <= 65_535 else None


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    """A literal address; IPv6 only in brackets, no zone."""
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return None
    return ip if (ip.version == 6) is bracketed and "%" not in host else None


def _texts(written: object, refuse: Refuse) -> list[str]:
    if not isinstance(written, list) or not all(isinstance(item, str) for item in written):
        refuse("not a list of text")
        return []
    if len(written) > LIST_MAX:
        refuse("too many entries", value=len(written), allowed=f"at most {LIST_MAX}")
        return []
    return written


def host_names(written: object, refuse: Refuse) -> tuple[str, ...]:
    """Host header values, lower case, without a trailing dot."""
    hosts = []
    for item in _texts(written, refuse):
        host = item.lower()
        match = _HOST.fullmatch(host)
        if match is None or (match["port"] and _port(match["port"]) is None):
            refuse("not a host", value=item)
        hosts.append(host)
    return tuple(hosts)


def origins(written: object, refuse: Refuse) -> tuple[str, ...]:
    """A list of web origins."""
    found = tuple(_texts(written, refuse))
    for item in found:
        if not _ORIGIN.fullmatch(item):
            refuse("not an origin", value=item)
    return found


def networks(written: object, refuse: Refuse) -> tuple[IPv4Network | IPv6Network, ...]:
    """A list of IP networks."""
    found = []
    for item in _texts(written, refuse):
        try:
            found.append(ipaddress.ip_network(item))
        except ValueError as error:
            refuse(f"not a network ({error})", value=item)
    return tuple(found)


def peers(written: object, refuse: Refuse) -> tuple[PeerHint, ...]:
    """A list of peers: where other nodes may be reached."""
    found = []
    for item in _texts(written, refuse):
        hint = _peer(item)
        if hint is None:
            refuse("not a peer", value=item)
        elif hint.ip.is_link_local:
            refuse(
                "a link-local address, which leads nowhere without its interface",
                value=item,
                allowed="an address that every host of the network can be reached at",
            )
        elif hint in found:
            refuse("listed twice", value=item)
        else:
            found.append(hint)
    return tuple(found)


def _peer(item: str) -> PeerHint | None:
    ref, equals, place = item.partition("=")
    named = ref.startswith("@")
    who, mark = (parse_marked_name(ref[1:]) or (None, "")) if named else (parse_node_id(ref), "")
    ip, port = _ip(place), MESH_PORT
    if ip is None:
        host, _, digits = place.rpartition(":")
        ip, port = _ip(host), _port(digits) or 0
    if not equals or who is None or ip is None or not port:
        return None
    return PeerHint(ref=who, named=named, mark=mark, ip=ip, port=port)
