"""This node's belief, kept current: changes of the mesh and own statements folded into one view and one fleet.

The only writer of the board. The fleet (rows ready to be scored) is rebuilt with each view, never per request.
"""

from collections.abc import Collection, Iterable, Mapping

from agent.board import Board
from agent.effects.clock import Clock
from router_core.ids import Id16, MeshId
from router_core.policy.placement import PlacementPolicy
from router_core.record.membership import Liveness, Member, ViewChange
from router_core.record.state import Static, Volatile
from router_core.router.router import Router
from router_core.view.fold import fold


class Viewing:
    """Folds and publishes, for the board and for the router. ``unreachable`` are the nodes that take no requests from
    here."""

    def __init__(
        self,
        board: Board,
        *,
        own: Member,
        router: Router,
        clock: Clock,
    ) -> None:
        self._board = board
        self._own = own
        self._members: dict[Id16, Member] = {own.id16: own}
        self._router = router
        self._clock = clock
        self._said = 0
        self.unreachable: Collection[Id16] = frozenset()

    @property
    def members(self) -> Mapping[Id16, Member]:
        """Everybody who may speak, this node included."""
        return self._members

    def heard(self, changes: Iterable[ViewChange]) -> None:
        """The mesh's picture of other nodes changed."""
        changes = tuple(changes)
        before = self._board.current.nodes
        self._publish(changes)
        for change in changes:
            node, old = self._board.current.nodes.get(change.origin), before.get(change.origin)
            if node is not None and change.confirmed and (old is None or old.epoch < node.epoch):
                self._router.reborn(node.node_id)

    def said(self, static: Static, volatile: Volatile, due_ms: int) -> None:
        """This node's own newest statement; it is true here before anybody else hears it."""
        self._said += 1
        own = ViewChange(
            origin=self._own.id16,
            state=Liveness.FRESH,
            confirmed=True,
            epoch=0,
            inst=0,
            seq=self._said,
            mono_ms=self._clock.boot_ms(),
            base_ms=0,
            due_ms=due_ms,
            volatile=volatile,
            static=static,
        )
        self._publish((own,))

    def adopt(self, policy: PlacementPolicy) -> None:
        """Another policy is in force: from the next fleet on, which is made now."""
        self._router.adopt(policy)
        self._publish(())

    def learned(self) -> None:
        """Something was learned that the next choice should know."""
        self._publish((), news=True)

    def reach_changed(self, unreachable: Collection[Id16]) -> None:
        """Other nodes than before take no requests from here."""
        if unreachable == self.unreachable:
            return
        before, self.unreachable = self.unreachable, unreachable
        self._publish(())
        for id16 in before:
            if id16 not in unreachable and (node := self._board.current.nodes.get(id16)) is not None:
                self._router.reborn(node.node_id)

    def members_changed(self, members: Mapping[Id16, Member], _mesh_id: MeshId) -> None:
        """The roster changed: nodes that left it are gone from the view at once."""
        self._members = {**members, self._own.id16: self._own}
        self._publish(())

    def _publish(self, changes: Iterable[ViewChange], *, news: bool = False) -> None:
        now = self._clock.boot_ms()
        view = fold(self._board.current, changes, self._members, now, self.unreachable)
        self._router.see(view, now, news=news)
        self._board.publish(view)
