"""Members with real keys and certificates, and one mesh listener with its driver, on loopback."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.effects.clock import SystemClock
from agent.effects.tasks import Tasks
from agent.identity.admittance import Admittance, Refusal
from agent.identity.certificate import build_certificate, certificate_pem
from agent.identity.keys import NodeKey
from agent.identity.listener import Listener, bind
from agent.identity.routes import Port
from agent.identity.tls import OwnFiles, TlsContexts
from agent.mesh.addresses import AddressBook, AddressRules, IpNetwork
from agent.mesh.door import Door
from agent.mesh.driver import Driver, DriverListeners, Machine
from agent.mesh.links import DIAL_S
from agent.settings.values import PeerHint
from router_core.ids import Id16, MeshId, NodeName, id32_of_key
from router_core.mesh.protocol.actions import Action
from router_core.mesh.protocol.events import SavedKey
from router_core.record.membership import Member, ViewChange
from router_core.record.state import Role
from tests.support.scripted_machine import ScriptedMachine

E = TypeVar("E")
MESH = MeshId(bytes(range(16)))
SERVING = Role.NODE | Role.ROUTER | Role.INTRODUCER


@dataclass(frozen=True)
class Person:
    """A key, its certificate, the files TLS reads, and the roster entry of it."""

    key: NodeKey
    member: Member
    files: OwnFiles

    @property
    def id16(self) -> Id16:
        return self.member.id16


def person(folder: Path, number: int, roles: int = SERVING) -> Person:
    """The ``number``-th person; the same number is the same key. Files go below ``folder``."""
    from cryptography.hazmat.primitives import serialization as pem

    private = Ed25519PrivateKey.from_private_bytes(Random(number).randbytes(32))
    key = NodeKey(private)
    der = build_certificate(private)
    files = OwnFiles(folder / f"cert-{number}.pem", folder / f"key-{number}.pem")
    files.cert_path.write_bytes(certificate_pem(der))
    files.key_path.write_bytes(
        private.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption())
    )
    name = NodeName(f"node-{number}")
    return Person(
        key, Member(id32=id32_of_key(key.key32), der=der, roles=roles, admission=1, name=name), files
    )


@dataclass
class MemoryShelf:
    """Keeps what a machine persists; ``broken`` makes the disk refuse."""

    kept: dict[SavedKey, bytes] = field(default_factory=dict)
    broken: bool = False

    def save(self, key: SavedKey, data: bytes, members: object) -> None:
        if self.broken:
            raise OSError(28, "no space left")
        self.kept[key] = data


class Node:
    """A driver, its door and its listener at ``host``; ``async with`` runs them."""

    def __init__(
        self,
        who: Person,
        machine: Machine,
        *,
        host: str,
        roster: Sequence[Member],
        shelf: Any = None,
        peers: Sequence[PeerHint] = (),
        allow: tuple[IpNetwork, ...] = (),
        on_view: Callable[[Sequence[ViewChange]], None] = lambda changes: None,
        dial_s: float = DIAL_S,
    ) -> None:
        self.who = who
        self.machine = machine
        self.host = host
        self.port = 0
        self.alarms: list[tuple[str, dict[str, Any]]] = []
        self.failures: list[tuple[str, BaseException]] = []
        self.roster = {member.der: member for member in roster}
        self.refused: list[Refusal] = []
        self.admittance = Admittance()
        self.tasks = Tasks(lambda name, exc: self.failures.append((name, exc)))
        self.contexts = TlsContexts(who.files)
        self.driver = Driver(
            machine,
            clock=SystemClock(),
            tls=lambda: self.contexts.client,
            source=ip_address(host),
            book=AddressBook(AddressRules(allow=allow, own=frozenset({ip_address(host)})), peers),
            shelf=MemoryShelf() if shelf is None else shelf,
            told=DriverListeners(
                on_view=on_view,
                notify=lambda code, fields: self.alarms.append((code, fields)),
                failed=lambda name, exc: self.failures.append((name, exc)),
            ),
            dial_s=dial_s,
        )
        self.door = Door(lambda: self.roster, self.driver.serve)
        self._web = self.door.server()

    async def __aenter__(self) -> Self:
        await self.contexts.rebuild(der for der in self.roster if der != self.who.member.der)
        self.listener = Listener(
            Port.LINK,
            [bind(self.host, 0)],
            self._web,
            context=self.contexts.server,
            by_der=lambda: self.roster,
            admittance=self.admittance,
            tasks=self.tasks,
            refused=lambda port, why: self.refused.append(why),
        )
        self.listener.start()
        self.port = self.listener.addresses[0][1]
        self._tell_driver()
        self._running = asyncio.create_task(self.driver.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()
        assert self.failures == [], self.failures

    async def kill(self) -> None:
        """Stop without a goodbye: listener and links just end."""
        await self.listener.aclose()
        self._running.cancel()
        (ended,) = await asyncio.gather(self._running, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            self.failures.append(("driver", ended or AssertionError("the driver ended by itself")))
        await self._web.shutdown(0.1)
        await self.tasks.aclose()

    async def set_roster(self, members: Sequence[Member]) -> None:
        """A new roster: door first, then TLS, then the machine."""
        self.roster.clear()
        self.roster.update((member.der, member) for member in members)
        await self.contexts.rebuild(der for der in self.roster if der != self.who.member.der)
        self._tell_driver()

    def _tell_driver(self) -> None:
        others = {member.id16: member for member in self.roster.values() if member.id16 != self.who.id16}
        self.driver.roster_changed(others, MESH)

    @property
    def script(self) -> ScriptedMachine:
        assert isinstance(self.machine, ScriptedMachine)
        return self.machine

    def act(self, *actions: Action) -> None:
        """Have a scripted machine return ``actions`` at its next step, which comes now."""
        self.script.queued.extend(actions)
        self.driver.record_heard(b"", b"")

    def told(self, kind: type[E]) -> list[E]:
        """What a scripted machine was told of one kind."""
        return [event for event in self.script.told if isinstance(event, kind)]

    @property
    def steps_done(self) -> bool:
        """True when a scripted machine has taken up everything it was to return."""
        return not self.script.queued

    @property
    def hint(self) -> PeerHint:
        """How another node finds this one."""
        return PeerHint(ref=self.who.member.node_id, named=False, ip=ip_address(self.host), port=self.port)
