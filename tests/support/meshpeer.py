"""A node with the real mesh machine and real files, for tests and benches of whole meshes in one process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from random import Random
from typing import Any

from agent.effects.clock import SystemClock
from agent.identity.keys import Ed25519Verifier, NodeKey
from agent.mesh.shelf import MeshShelf
from agent.settings.values import PeerHint
from agent.store.marks import MarkFiles
from agent.store.members import PeerFiles
from router_core.ids import Id16
from router_core.mesh.machine import Mesh
from router_core.mesh.records.publisher import Me
from router_core.policy.mesh import MeshPolicy
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import Address, Static, Volatile
from tests.support.meshnode import MESH, Node, Person

ALIVE = (Liveness.FRESH, Liveness.LATE)


@dataclass(frozen=True)
class NodeCrypto:
    key: NodeKey
    verifier: Ed25519Verifier = field(default_factory=Ed25519Verifier)

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)

    def verify(self, key32: bytes, sig: bytes, message: bytes) -> bool:
        return self.verifier.verify(key32, sig, message)


class Peer(Node):
    """A node with the real machine; ``seen`` is its newest picture of each other member."""

    def __init__(
        self,
        who: Person,
        number: int,
        state: Path,
        roster: Sequence[Member],
        peers: Sequence[PeerHint],
        **more: Any,
    ) -> None:
        clock = SystemClock()
        state.mkdir(exist_ok=True)
        more.setdefault("allow", (ip_network("127.0.0.0/8"),))
        shelf = MeshShelf(MarkFiles(state), PeerFiles(state))
        self.seen: dict[Id16, ViewChange] = {}
        others = tuple(member for member in roster if member.id16 != who.id16)
        machine = Mesh(
            Me(id16=who.id16, key32=who.key.key32),
            MeshPolicy(backoff_max_s=1),
            NodeCrypto(who.key),
            Random(number),
            shelf.load(MESH, others),
            clock.boot_ms(),
        )
        super().__init__(
            who,
            machine,
            host=f"127.0.0.{number + 1}",
            roster=roster,
            shelf=shelf,
            peers=peers,
            on_view=self._fold,
            **more,
        )
        self.number = number

    def _fold(self, changes: Sequence[ViewChange]) -> None:
        self.seen.update((change.origin, change) for change in changes)

    def say(self) -> None:
        """Publish bodies that name this node."""
        here = Address(ip=ip_address(self.host).packed, mesh_port=self.port, ingress_port=self.port)
        static = Static(addrs=(here,), models_total=self.number)
        self.driver.body_changed(Volatile(), static, urgent=True)

    def sees(self, *others: Person) -> bool:
        """True if it routes to all ``others`` and holds their own S."""
        found = [self.seen.get(other.id16) for other in others]
        return all(
            c is not None and c.state in ALIVE and c.static is not None and c.volatile is not None
            for c in found
        )

    def state_of(self, other: Person) -> Liveness | None:
        change = self.seen.get(other.id16)
        return None if change is None else change.state

    @property
    def links_up(self) -> int:
        return sum(link.phase == "up" for link in self.driver.picture().links)
