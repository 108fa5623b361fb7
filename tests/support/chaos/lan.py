"""Hosts on one bridge: a namespace each, ``10.99.0.k``, no default route, and cuts that heal at once.

Cuts are rules at the receiving host; a cut without ``oneway`` is two of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.chaos import namespaces
from tests.support.chaos.namespaces import sh

NETWORK = "10.99.0"
MDNS = ("ip daddr 224.0.0.251 drop", "ip6 daddr ff02::fb drop")


@dataclass(kw_only=True)
class Lan:
    """Make it by ``Lan.made``; ``close`` removes every namespace with what is in it."""

    name: str
    switch: str
    hosts: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def made(cls, name: str, hosts: Sequence[str]) -> "Lan":
        """A bridge and ``hosts`` on it."""
        lan = cls(name=name, switch=namespaces.make_namespace(f"{name}-sw"))
        try:
            sh("ip", "-n", lan.switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
            sh("ip", "-n", lan.switch, "link", "set", "br0", "up")
            for host in hosts:
                lan.add(host)
        except BaseException:
            lan.close()
            raise
        return lan

    def add(self, host: str, first: Callable[[str], None] = lambda _: None) -> str:
        """One more host; its namespace, which ``first`` gets before there is an interface in it."""
        place = len(self.hosts) + 1
        inside = self.hosts[host] = namespaces.make_namespace(f"{self.name}-{host}")
        first(inside)
        port = f"p{place}"
        peer = ("type", "veth", "peer", "name", port, "netns", self.switch)
        sh("ip", "link", "add", "eth0", "netns", inside, *peer)
        sh("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        sh("ip", "-n", inside, "addr", "add", f"{self.ip(host)}/24", "dev", "eth0")
        sh("ip", "-n", inside, "link", "set", "eth0", "up")
        return inside

    def ip(self, host: str) -> str:
        return f"{NETWORK}.{list(self.hosts).index(host) + 1}"

    def cut(self, a: str, b: str, *, oneway: bool = False) -> None:
        """Drop what ``a`` sends to ``b``; without ``oneway`` also what ``b`` sends to ``a``."""
        self._drop(b, f"ip saddr {self.ip(a)} drop")
        if not oneway:
            self._drop(a, f"ip saddr {self.ip(b)} drop")

    def part(self, side: Sequence[str]) -> None:
        """Cut every host of ``side`` from every other."""
        for a in side:
            for b in self.hosts:
                if b not in side:
                    self.cut(a, b)

    def no_multicast(self) -> None:
        """Drop multicast DNS at every host."""
        for host in self.hosts:
            for rule in MDNS:
                self._drop(host, rule)

    def heal(self) -> None:
        """Take every rule away."""
        for host in list(self.faults):
            sh("nft", "-f", "-", ns=self.hosts[host], stdin="add table inet chaos\ndelete table inet chaos\n")
            del self.faults[host]

    def close(self) -> None:
        for inside in (*self.hosts.values(), self.switch):
            namespaces.remove_namespace(inside)

    def _drop(self, host: str, rule: str) -> None:
        rules = self.faults.setdefault(host, [])
        rules.append(rule)
        chain = "add chain inet chaos inp { type filter hook input priority 0; }"
        script = ["add table inet chaos", "delete table inet chaos", "add table inet chaos", chain]
        script += [f"add rule inet chaos inp {each}" for each in rules]
        sh("nft", "-f", "-", ns=self.hosts[host], stdin="\n".join(script) + "\n")
