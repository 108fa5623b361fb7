"""Trying members' ingresses before requests need them: to whom a link leads, a connection is kept in the pool, made anew
when it was idle for too long or died, as it does within seconds behind a firewall; what cannot be reached is tried again
and again."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.node.routing.reachability import Reach
from agent.node.routing.targets import NodeTargets
from agent.relay.upstream.pool import ConnectFailed, Pool
from agent.relay.upstream.targets import place_of_peer
from router_core.ids import Id16, NodeId
from router_core.record.membership import Liveness, Member
from router_core.record.state import Role
from router_core.router.failure import Cause

TICK_S: Final = 1.0
AGAIN_MS: Final = 5_000
"""How often one member is tried at most."""
AT_ONCE: Final = 4

_ALIVE: Final = frozenset({Liveness.FRESH, Liveness.LATE, Liveness.SUSPECT})


class Probing:
    """``run`` is its task. ``is_linked`` tells whether a link leads to a member now."""

    def __init__(
        self,
        *,
        reach: Reach,
        targets: NodeTargets,
        pool: Pool,
        members: Callable[[], Mapping[Id16, Member]],
        is_linked: Callable[[Id16], bool],
        connect_ms: int,
        clock: Clock,
        tasks: Tasks,
    ) -> None:
        self._reach = reach
        self._targets = targets
        self._pool = pool
        self._members = members
        self._is_linked = is_linked
        self._connect_ms = connect_ms
        self._clock = clock
        self._tasks = tasks
        self._tried_ms: dict[NodeId, int] = {}
        self._under_way: set[NodeId] = set()
        self._soon = asyncio.Event()

    def linked(self, peer: Id16, opened: bool) -> None:
        """A link was made or lost. With the last one went what connections to the peer ran over."""
        member = self._members().get(peer)
        if member is None:
            return
        if opened:
            self._reach.forget(member.node_id)
            self._tried_ms.pop(member.node_id, None)
            self._soon.set()
        elif not self._is_linked(peer):
            self._pool.drop(lambda owner: owner == member.node_id)
        self._targets.moved(member.node_id)

    def moved(self) -> None:
        """This host has other addresses: every way is another one."""
        nodes = {member.node_id for member in self._members().values()}
        self._pool.drop(nodes.__contains__)
        for node in nodes:
            self._reach.forget(node)
            self._targets.moved(node)
        self._tried_ms.clear()
        self._soon.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), TICK_S)
            self._soon.clear()
            self._look()

    def _look(self) -> None:
        members = {member.node_id: member for member in self._members().values()}
        self._reach.keep(members)
        self._tried_ms = {node: at for node, at in self._tried_ms.items() if node in members}
        now = self._clock.boot_ms()
        for node, member in members.items():
            if len(self._under_way) >= AT_ONCE:
                return
            if node not in self._under_way and self._is_due(node, member, now):
                self._tried_ms[node] = now
                self._try(node)

    def _is_due(self, node: NodeId, member: Member, now: int) -> bool:
        tried_ms = self._tried_ms.get(node)
        if not member.roles & Role.NODE or (tried_ms is not None and now - tried_ms < AGAIN_MS):
            return False
        if self._reach.of(node) is not None:
            return self._targets.liveness(node) in _ALIVE
        return self._is_linked(member.id16) and not self._pool.open_to(node)

    def _try(self, node: NodeId) -> None:
        if not self._targets.has_told(node):
            self._tried_ms.pop(node, None)
        elif self._targets.peer(node) is None:
            self._reach.no_address(node)
        else:
            self._under_way.add(node)
            self._tasks.spawn(self._connect(node), f"probe {node[:8]}")

    async def _connect(self, node: NodeId) -> None:
        try:
            route = self._targets.peer(node)
            if route is None:
                return
            place = place_of_peer(route)
            try:
                async with asyncio.timeout(self._connect_ms / 1_000):
                    connection = await self._pool.connect(place.target, place.options)
            except ConnectFailed as failed:
                self._targets.unreached(node, failed.cause)
            except TimeoutError:
                self._targets.unreached(node, Cause.CONNECT_TIMEOUT)
            else:
                self._pool.keep(connection, place.options.idle_ms)
        finally:
            self._under_way.discard(node)
