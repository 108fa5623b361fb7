"""Nodes with real keys, certificates and contexts, but no daemon around them."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.effects.tasks import Tasks
from agent.identity.admittance import Admittance, Refusal
from agent.identity.member_file import addresses_of
from agent.identity.membership import Membership
from agent.identity.own import OwnIdentity, load_identity
from agent.identity.routes import Port
from agent.identity.tls import OwnFiles, TlsContexts
from agent.store.members import PeerFiles, RosterFiles
from router_core.ids import Id16, MeshId, NodeName
from router_core.record.membership import Member


@dataclass(kw_only=True)
class Node:
    """One node's standing. ``changes`` and ``refusals`` are what its subscribers were told."""

    own: OwnIdentity
    membership: Membership
    contexts: TlsContexts
    admittance: Admittance
    tasks: Tasks
    failures: list[BaseException] = field(default_factory=list)
    changes: list[tuple[Mapping[Id16, Member], MeshId]] = field(default_factory=list)
    refusals: list[tuple[Port, Refusal]] = field(default_factory=list)

    def refused(self, port: Port, refusal: Refusal) -> None:
        self.refusals.append((port, refusal))

    def file(self, host: str = "127.0.0.1", mesh_port: int = 7433, ingress_port: int = 7434) -> bytes:
        return self.membership.export(addresses_of([host], mesh_port, ingress_port))


async def start_node(
    state: Path,
    name: str = "node",
    *,
    limit: int = 64,
    retry_s: float = 10.0,
    admittance: Admittance | None = None,
) -> Node:
    """A node below ``state``, minted if there is none yet, its roster loaded."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = await asyncio.to_thread(load_identity, state, b"machine")
    contexts = await asyncio.to_thread(TlsContexts, OwnFiles(own.cert_path, own.key_path))
    admittance = admittance or Admittance(most=200)
    failures: list[BaseException] = []
    tasks = Tasks(lambda _name, exc: failures.append(exc))
    membership = Membership(
        own,
        NodeName(name),
        roster_files=RosterFiles(state),
        peer_files=PeerFiles(state),
        contexts=contexts,
        admittance=admittance,
        tasks=tasks,
        limit=limit,
        flush_s=0.0,
        retry_s=retry_s,
    )
    node = Node(
        own=own,
        membership=membership,
        contexts=contexts,
        admittance=admittance,
        tasks=tasks,
        failures=failures,
    )
    membership.subscribe(lambda members, mesh_id: node.changes.append((members, mesh_id)))
    await membership.load()
    return node


async def introduce(left: Node, right: Node, roles: int | None = None) -> None:
    """Exchange member files both ways, until both are in one mesh; ``roles`` are what ``left`` grants."""
    for _ in range(2):
        grants = {} if roles is None else {"roles": roles}
        await left.membership.add(right.file(), right.own.node_id, **grants)
        await right.membership.add(left.file(), left.own.node_id)
