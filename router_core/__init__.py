"""The pure half of pairmesh: records, mesh, view, pressure, profiles, placement, router, exchange.

Nothing here awaits, reads a clock, rolls dice, opens a file or logs. Time comes in as ``now`` (integer
milliseconds of the boot clock unless a name says otherwise), randomness as an injected ``random.Random``,
cryptography as small Protocols. Every protocol is a machine with two members::

    handle(event, now) -> list[Action]
    deadline           -> int | None

What is named in ``__all__`` is for whoever embeds a router; everything else is private to the project. A name is loaded
when it is first asked for: a part that needs ids alone loads no router.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from router_core.placement.decision.decision import Decision
    from router_core.placement.record import Choice, DecisionRecord
    from router_core.placement.request.hints import parse_hints
    from router_core.placement.request.request import Hints, PlacementRequest
    from router_core.policy.exchange import ExchangePolicy
    from router_core.policy.placement import PlacementPolicy
    from router_core.record.membership import Liveness, Member, ViewChange
    from router_core.record.state import Static, Volatile
    from router_core.router.failure import Cause, FailureClass
    from router_core.router.outcome import Outcome, Result
    from router_core.router.router import Placement, Router
    from router_core.view.cluster import ClusterView
    from router_core.view.fold import empty, fold

__all__ = [
    "Cause",
    "Choice",
    "ClusterView",
    "Decision",
    "DecisionRecord",
    "ExchangePolicy",
    "FailureClass",
    "Hints",
    "Liveness",
    "Member",
    "Outcome",
    "Placement",
    "PlacementPolicy",
    "PlacementRequest",
    "Result",
    "Router",
    "Static",
    "ViewChange",
    "Volatile",
    "empty",
    "fold",
    "parse_hints",
]

_MODULES: Final = {
    "Cause": "router.failure",
    "Choice": "placement.record",
    "ClusterView": "view.cluster",
    "Decision": "placement.decision.decision",
    "DecisionRecord": "placement.record",
    "ExchangePolicy": "policy.exchange",
    "FailureClass": "router.failure",
    "Hints": "placement.request.request",
    "Liveness": "record.membership",
    "Member": "record.membership",
    "Outcome": "router.outcome",
    "Placement": "router.router",
    "PlacementPolicy": "policy.placement",
    "PlacementRequest": "placement.request.request",
    "Result": "router.outcome",
    "Router": "router.router",
    "Static": "record.state",
    "ViewChange": "record.membership",
    "Volatile": "record.state",
    "empty": "view.fold",
    "fold": "view.fold",
    "parse_hints": "placement.request.hints",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"router_core has no public name {name!r}, it has {', '.join(__all__)}")
    return getattr(import_module(f"router_core.{_MODULES[name]}"), name)
