"""Metrics read from the current view at scrape time: members, ages of their state, own pressure."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from agent.observe.metrics import Family, Labels, Number, gauge_family
from router_core.record.membership import Liveness
from router_core.record.state import ResourceCode
from router_core.view.cluster import ClusterView, NodeView

_PRESSURE: Final = ("resource", "gpu")


class ViewMetrics:
    """``view`` gives the current snapshot, ``now`` boot milliseconds."""

    def __init__(self, view: Callable[[], ClusterView], now: Callable[[], int]) -> None:
        self._view = view
        self._now = now

    def collect(self) -> Iterable[Family]:
        view, now = self._view(), self._now()
        others = [node for node in view.nodes.values() if not node.is_self]
        states = Counter(node.liveness for node in others)
        yield gauge_family(
            "pairmesh_mesh_members",
            "Other members by this node's verdict.",
            ("state",),
            {(state.value,): states[state] for state in Liveness},
        )
        yield gauge_family(
            "pairmesh_mesh_record_age_seconds",
            "Age of the newest state held of a member.",
            ("node", "name"),
            {(n.node_id, n.name): None if n.volatile is None else n.age_ms(now) / 1_000 for n in others},
        )
        levels: dict[Labels, Number | None] = {}
        scores: dict[Labels, Number | None] = {}
        if view.own is not None:
            _pressure(view.own, levels, scores)
        yield gauge_family("pairmesh_pressure_level", "0 none to 3 critical.", _PRESSURE, levels)
        yield gauge_family("pairmesh_pressure_score", "0 idle to 1 at the limit.", _PRESSURE, scores)


def _pressure(
    own: NodeView, levels: dict[Labels, Number | None], scores: dict[Labels, Number | None]
) -> None:
    volatile, static = own.volatile, own.static
    if volatile is None:
        return
    codes = set(ResourceCode)
    for row in volatile.resources:
        name = ResourceCode(row.code).name.lower() if row.code in codes else "unknown"
        levels[name, ""] = row.level
        scores[name, ""] = None if row.score_c is None else row.score_c / 100
    for load, facts in zip(volatile.gpus, () if static is None else static.gpus, strict=False):
        levels["gpu", facts.uuid8.hex()] = load.level
        scores["gpu", facts.uuid8.hex()] = None if load.score_c is None else load.score_c / 100
