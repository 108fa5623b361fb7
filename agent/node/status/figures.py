"""Figures of this node that are read when somebody asks for them: work in hand, who waits, breakers, connections,
held bytes."""

from collections.abc import Callable, Iterable, Mapping

from agent.observe.metrics import Family, gauge_family
from router_core.placement.candidates.candidate import Row
from router_core.placement.request.request import RequestClass
from router_core.router.breaker import BreakerState
from router_core.router.router import Router

_ENDPOINT = ("endpoint", "node", "name")
"""Nodes may share a name; the series of an endpoint is that of its node's id."""
_CODES = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}


class LiveFigures:
    """A collector. ``connections`` are counts by side, ``held_bytes`` those of bodies being received."""

    def __init__(
        self,
        *,
        router: Router,
        connections: Callable[[], Mapping[str, int]],
        held_bytes: Callable[[], int],
        now: Callable[[], int],
    ) -> None:
        self._router = router
        self._connections = connections
        self._held_bytes = held_bytes
        self._now = now

    def collect(self) -> Iterable[Family]:
        now, fleet = self._now(), self._router.fleet
        rows = {row.key: row for row in fleet.rows}
        yield gauge_family(
            "pairmesh_policy_info",
            "The placement policy in force.",
            ("preset", "hash"),
            {(fleet.policy.name, fleet.policy.hash): 1},
        )
        yield gauge_family(
            "pairmesh_in_flight",
            "Requests under way at this node's endpoints, whoever sent them.",
            _ENDPOINT,
            {
                _labels(row): self._router.ledger.local.in_flight(row.endpoint)
                for row in rows.values()
                if row.is_self
            },
        )
        yield gauge_family(
            "pairmesh_breaker_state",
            "0 closed, 1 open, 2 half open, by endpoint.",
            _ENDPOINT,
            {_labels(row): _CODES[self._router.breakers.state(key, now)] for key, row in rows.items()},
        )
        yield gauge_family(
            "pairmesh_queue_depth",
            "Requests that wait in the router for room.",
            ("class",),
            {(each.value,): self._router.queue.depth(each) for each in RequestClass},
        )
        yield gauge_family(
            "pairmesh_relay_connections",
            "Open connections.",
            ("side",),
            {(side,): count for side, count in self._connections().items()},
        )
        yield gauge_family(
            "pairmesh_relay_buffered_bytes", "Bytes of bodies held now.", (), {(): self._held_bytes()}
        )


def _labels(row: Row) -> tuple[str, str, str]:
    return row.endpoint, row.node_id, row.node_name
