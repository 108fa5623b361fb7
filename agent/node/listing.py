"""What a list may name: the models that an endpoint of a routable node offers, by the current view."""

from collections.abc import Iterable

from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Dialect, EngineState
from router_core.view.cluster import ClusterView

_UP = frozenset({EngineState.READY, EngineState.FAILING})


class ViewListing:
    """Satisfies the relay's ``Listing`` for one view."""

    def __init__(self, view: ClusterView, policy: PlacementPolicy) -> None:
        self._view = view
        self._policy = policy

    @property
    def generation(self) -> int:
        return self._view.gen

    def models(self) -> Iterable[tuple[str, Dialect]]:
        """(name, dialects) of every model on offer, aliases included, repetitions allowed."""
        for node in self._view.nodes.values():
            static, volatile = node.static, node.volatile
            if not node.routable or static is None or volatile is None:
                continue
            if len(volatile.engines) != len(static.engines):
                continue
            for model in static.models:
                if model.engine < len(static.engines) and volatile.engines[model.engine].state in _UP:
                    dialects = Dialect(static.engines[model.engine].dialects)
                    for name in (model.name, *model.aliases):
                        yield name, dialects

    def aliases(self) -> Iterable[str]:
        """The operator's aliases."""
        return (alias for alias, _ in self._policy.aliases)
