"""Where the models of one host stand, for people: what is in memory, on its way in or out, due, or failed.

A reading of what the machine remembers; it decides nothing.
"""

from msgspec import Struct

from router_core.placement.residency.events import Key, ModelStage
from router_core.placement.residency.known import ModelHistory
from router_core.policy.residency import ResidencyPolicy


class ModelStanding(Struct, frozen=True, kw_only=True):
    """One model, ``for_ms`` in its ``state`` already. ``left_ms`` is how long it is not unloaded by us if it is RESIDENT,
    before it is tried again if its load FAILED, before it is loaded if it is PRESENT, at most if we drain or load it;
    None where that is open. ``room_for`` is what it has to make room for."""

    key: Key
    state: ModelStage
    for_ms: int
    left_ms: int | None = None
    room_for: Key | None = None


class Standings(Struct, frozen=True, kw_only=True):
    """All of one host. ``loads_left`` may still begin before the oldest of the last hour is an hour old; ``movable`` models
    are there at all, in memory or not, of engines that can be told what to hold."""

    models: tuple[ModelStanding, ...]
    loads_left: int
    movable: int


def ends_ms(known: ModelHistory, policy: ResidencyPolicy) -> int | None:
    """When, by its own rules, a model's state may end or has to; None where no rule says."""
    match known.state:
        case ModelStage.RESIDENT:
            return known.since_ms + policy.resident_least_ms
        case ModelStage.FAILED:
            return known.retry_ms
        case ModelStage.DRAINING:
            return known.since_ms + policy.drain_ms
        case ModelStage.PRESENT:
            return known.turn_ms
        case _:
            return None
