"""This node for people: the admin API's status and view, put together on demand from what the rooms know."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from agent import __version__
from agent.admin.documents import (
    BlockedDoc,
    DrainDoc,
    HeldDoc,
    HostDoc,
    LinkDoc,
    OwnDoc,
    PolicyDoc,
    RequestsDoc,
    ResidencyDoc,
    StatusDoc,
    members_of,
    names_of,
    view_doc,
)
from agent.board import Board
from agent.effects.clock import Clock
from agent.engines.contract import EndpointStatus
from agent.identity.membership import Membership
from agent.mesh.addresses import PeerAddress, Unfit
from agent.node.routing.reachability import Reach
from agent.node.routing.targets import NodeTargets
from router_core.ids import Id16, NodeId, id16_of, id32_of
from router_core.mesh.status import MemberStatus, MeshStatus
from router_core.placement.residency.standing import Standings
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Role
from router_core.view.cluster import ClusterView


class NodePicture:
    """Satisfies the admin API's ``Status``."""

    def __init__(
        self,
        *,
        membership: Membership,
        board: Board,
        mesh: Callable[[], MeshStatus],
        dial_faults: Callable[[], Mapping[Id16, str]],
        addresses: Callable[[], Mapping[str, str]],
        told: Callable[[], Sequence[str]],
        reach: Reach,
        targets: NodeTargets,
        unlinked: Callable[[Id16], Sequence[tuple[PeerAddress, Unfit]]],
        faults: Callable[[], tuple[str, ...]],
        policy: Callable[[], PlacementPolicy],
        drains: Callable[[], tuple[DrainDoc, ...]],
        endpoints: Callable[[], Mapping[str, EndpointStatus]],
        residency: Callable[[], Standings | None],
        log_lines_lost: Callable[[], int],
        waits_for_restart: Callable[[], tuple[str, ...]],
        host: Callable[[], HostDoc],
        clock: Clock,
    ) -> None:
        self._membership = membership
        self._board = board
        self._mesh = mesh
        self._dial_faults = dial_faults
        self._addresses = addresses
        self._told = told
        self._reach = reach
        self._targets = targets
        self._unlinked = unlinked
        self._faults = faults
        self._policy = policy
        self._drains = drains
        self._endpoints = endpoints
        self._residency = residency
        self._log_lines_lost = log_lines_lost
        self._waits_for_restart = waits_for_restart
        self._host = host
        self._clock = clock
        self._began_ms = clock.boot_ms()

    def status(self) -> StatusDoc:
        """This node, its members, its engines, now."""
        now = self._clock.boot_ms()
        membership, mesh, policy = self._membership, self._mesh(), self._policy()
        dial_faults = self._dial_faults()
        links = {member.id16: _link_doc(member, dial_faults.get(member.id16)) for member in mesh.members}
        return StatusDoc(
            at_ms=self._clock.wall_ms(),
            own=OwnDoc(
                name=membership.name,
                id=membership.own.node_id,
                mesh=membership.mesh_id.hex(),
                version=__version__,
                pid=os.getpid(),
                uptime_ms=now - self._began_ms,
                epoch=mesh.epoch,
                roles=names_of(Role, membership.own.mesh.roles),
                addresses=dict(self._addresses()),
                faults=(*self._faults(), *_identity_faults(mesh)),
                isolated=mesh.lonely,
                policy=PolicyDoc(preset=policy.name, hash=policy.hash),
                drains=self._drains(),
                unfit_names={
                    name: status.unfit_names
                    for name, status in self._endpoints().items()
                    if status.unfit_names
                },
                more_models={
                    name: status.more_models
                    for name, status in self._endpoints().items()
                    if status.more_models
                },
                hidden_models=_hidden(self._board.current),
                engine_errors={
                    name: status.reason
                    for name, status in self._endpoints().items()
                    if status.reason is not None
                },
                withdrawn={
                    name: status.lacking for name, status in self._endpoints().items() if status.lacking
                },
                residency=_residency_doc(self._residency()),
                label=self._board.current.labels[membership.own.node_id],
                log_lines_lost=self._log_lines_lost(),
                waits_for_restart=self._waits_for_restart(),
                host=self._host(),
                told=tuple(self._told()),
            ),
            members=members_of(
                self._board.current,
                tuple(membership.members.values()),
                links,
                now,
                {member.id16: found for member in mesh.members if (found := _blocked(member)) is not None},
                {member.id16: self._requests(member.node_id, now) for member in membership.members.values()},
            ),
        )

    def _requests(self, node: NodeId, now: int) -> RequestsDoc:
        reach, targets = self._reach, self._targets
        unreached, route = reach.of(node), targets.peer(node)
        left_out: dict[str, tuple[str, ...]] = {}
        found = [
            (each.ip, why) for each, why in (*targets.left_out(node), *self._unlinked(id16_of(id32_of(node))))
        ]
        for ip, why in dict.fromkeys(found):
            if route is None or str(ip) not in dict(route.addresses):
                left_out[why.value] = (*left_out.get(why.value, ()), str(ip))
        at = () if route is None else tuple(ip for ip, _ in route.addresses)
        port = None if route is None else route.addresses[0][1]
        if unreached is not None:
            return RequestsDoc(
                state="unreachable",
                why=unreached.why,
                for_ms=max(0, now - unreached.since_ms),
                at=at,
                port=port,
                left_out=left_out,
            )
        state = "unknown" if reach.reached_ms(node) is None else "ok"
        return RequestsDoc(state=state, at=at, port=port, left_out=left_out)

    def view(self) -> dict[str, Any]:
        """The current view, records spelled out."""
        return view_doc(self._board.current, self._clock.boot_ms())


def _hidden(view: ClusterView) -> int:
    static = view.own.static if view.own is not None else None
    return 0 if static is None else max(0, static.models_total - len(static.models))


def _residency_doc(standings: Standings | None) -> ResidencyDoc | None:
    if standings is None:
        return None
    models = (
        HeldDoc(
            endpoint=each.key[0],
            model=each.key[1],
            state=each.state.value,
            for_ms=each.for_ms,
            left_ms=each.left_ms,
            room_for=None if each.room_for is None else "/".join(each.room_for),
        )
        for each in standings.models
    )
    return ResidencyDoc(loads_left=standings.loads_left, movable=standings.movable, models=tuple(models))


def _blocked(member: MemberStatus) -> BlockedDoc | None:
    why, left_ms = max(
        ("restarts", member.conflict_ms),
        ("behind", member.behind_ms),
        ("malformed", member.quarantine_ms),
        key=itemgetter(1),
    )
    return BlockedDoc(why=why, left_ms=left_ms) if left_ms else None


def _identity_faults(mesh: MeshStatus) -> Iterator[str]:
    if mesh.conflicted:
        yield (
            "this node's identity is used by another process, too (a copied disk or state folder): stop that one, or "
            "start it with --new-identity and pair it; this one tries again each 20 s"
        )
    if mesh.exhausted:
        yield (
            "records of this identity reached the last epoch there is, so that nobody takes newer ones: run once with "
            "--new-identity, pair again and remove the old id"
        )


def _link_doc(member: MemberStatus, dial_fault: str | None) -> LinkDoc:
    """A failed dial is newer than whatever ended the link before it."""
    if member.link_up:
        return LinkDoc(state="up", rtt_ms=member.rtt_ms)
    return LinkDoc(state="down", fault=dial_fault or member.link_fault)
