"""A real member of a mesh of daemons that keeps every frame it is sent, decrypted, as the others meant it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_address, ip_network
from pathlib import Path
from random import Random
from typing import Any

from agent.effects.clock import SystemClock
from agent.identity.listener import Listener, bind
from agent.identity.routes import Port
from agent.mesh.addresses import AddressBook, AddressRules
from agent.mesh.door import Door
from agent.mesh.driver import Driver, DriverListeners
from agent.mesh.link import LinkConnection
from agent.mesh.shelf import MeshShelf
from agent.settings.values import PeerHint
from agent.store.marks import MarkFiles
from agent.store.members import PeerFiles
from router_core.ids import NodeId
from router_core.mesh.machine import Mesh
from router_core.mesh.records.publisher import Me
from router_core.policy.mesh import MeshPolicy
from tests.support.cluster import Node
from tests.support.members import start_node
from tests.support.meshpeer import NodeCrypto


class Overhearing(Driver):
    """The shipped driver; ``frames`` holds each message it was handed, in order, ``speakers`` who sent any."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.frames: list[bytes] = []
        self.speakers: set[NodeId] = set()

    def heard(self, link: LinkConnection, data: bytes) -> None:
        self.frames.append(data)
        self.speakers.add(self._members[link.peer].node_id)
        super().heard(link, data)


@contextlib.asynccontextmanager
async def overhearing(base: Path, ip: str, nodes: Sequence[Node]) -> AsyncIterator[Overhearing]:
    """Join the mesh of running ``nodes`` from ``ip`` for the length of the block."""
    state = base / "overhearing"
    member = await start_node(state, "overhearing")
    sock = bind(ip, 0)
    port = sock.getsockname()[1]
    file = base / "overhearing.trust"
    file.write_bytes(member.file(ip, port, port))
    hints = []
    for node in nodes:
        status, exported, err = await node.cli("trust", "export")
        assert status == 0, err
        await member.membership.add(exported.encode(), node.node_id)
        status, _, err = await node.cli("trust", "add", str(file), "--id", member.own.node_id)
        assert status == 0, err
        hints.append(
            PeerHint(ref=NodeId(node.node_id), named=False, ip=ip_address(node.ip), port=node.ports["mesh"])
        )
    members = member.membership.members
    clock = SystemClock()
    shelf = MeshShelf(MarkFiles(state), PeerFiles(state))
    rules = AddressRules(allow=(ip_network("127.0.0.0/8"),), own=frozenset({ip_address(ip)}))
    driver = Overhearing(
        Mesh(
            Me(id16=member.own.id16, key32=member.own.key.key32),
            MeshPolicy(backoff_max_s=1),
            NodeCrypto(member.own.key),
            Random(1),
            shelf.load(member.membership.mesh_id, tuple(members.values())),
            clock.boot_ms(),
        ),
        clock=clock,
        tls=lambda: member.contexts.client,
        source=ip_address(ip),
        book=AddressBook(rules, hints),
        shelf=shelf,
        told=DriverListeners(
            on_view=lambda changes: None,
            notify=lambda code, fields: None,
            failed=lambda name, exc: member.failures.append(exc),
        ),
    )
    door = Door(lambda: member.membership.by_der, driver.serve).server()
    listener = Listener(
        Port.LINK,
        [sock],
        door,
        context=member.contexts.server,
        by_der=lambda: member.membership.by_der,
        admittance=member.admittance,
        tasks=member.tasks,
        refused=member.refused,
    )
    listener.start()
    driver.roster_changed(members, member.membership.mesh_id)
    running = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        await listener.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await door.shutdown(0.1)
        await member.tasks.aclose()
    assert member.failures == []
