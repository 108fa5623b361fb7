"""What is asked of one router, by model, and how often all routers together are asked for a model.

A model is known by its digest, or where no engine tells one by its name, as a hash, so that rows are small and alike.
Rules: the table is bounded and forgets what was asked longest ago; a request counts once, served or not. It
knows nothing of what a request contains.
"""

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct

from router_core import limits
from router_core.ids import Id8
from router_core.placement.candidates.candidate import ALIVE, Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.filters.model_match import offer_of
from router_core.placement.record import Choice
from router_core.placement.request.request import Endpoint
from router_core.record.state import U32_MAX, ModelDemand

_TAU_MS = 300_000.0
_LATEST = ":latest"
_KEPT = 64


class _Asked(Struct, gc=False, kw_only=True):
    per_s: float
    work: float
    at_ms: int


class Demand:
    """Requests/s and work-seconds/s of each model, smoothed over ``tau_ms``."""

    def __init__(self, tau_ms: float = _TAU_MS) -> None:
        self._tau_ms = tau_ms
        self._asked: dict[Id8, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def note(self, key8: Id8, work_s: float, now: int) -> None:
        """One request for a model; ``work_s`` is what it will take, 0 if nobody serves it."""
        asked = self._asked.pop(key8, None) or _Asked(per_s=0.0, work=0.0, at_ms=now)
        kept = self._kept(asked, now)
        asked.per_s = asked.per_s * kept + 1000.0 / self._tau_ms
        asked.work = asked.work * kept + work_s * 1000.0 / self._tau_ms
        asked.at_ms = now
        self._asked[key8] = asked
        if len(self._asked) > limits.DEMAND_MODELS:
            del self._asked[next(iter(self._asked))]

    def rows(self, now: int) -> tuple[ModelDemand, ...]:
        """The models asked for most, as this node's record tells them; what rounds to nothing is left out."""
        rows = []
        for key8, asked in self._asked.items():
            kept = self._kept(asked, now)
            rpm, work_c = round(60.0 * asked.per_s * kept), round(100.0 * asked.work * kept)
            if rpm:
                rows.append(ModelDemand(key8=key8, rpm=min(rpm, U32_MAX), work_c=min(work_c, U32_MAX)))
        return tuple(sorted(rows, key=lambda row: (-row.rpm, row.key8))[: limits.DEMAND])

    def _kept(self, asked: _Asked, now: int) -> float:
        return math.exp(-max(0, now - asked.at_ms) / self._tau_ms)


@lru_cache(maxsize=1024)
def demand_key(digest: bytes | None, name: str) -> Id8:
    """How ``demand`` names a model."""
    return Id8(hashlib.sha256(digest if digest is not None else name.encode()).digest()[:8])


class Counted:
    """Under which key a request counts in one snapshot, kept for those like it."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._keys: dict[tuple[str, Endpoint | None, str | None], Id8 | None] = {}

    def key_of(self, asked: str, choice: Choice | None) -> Id8 | None:
        """That of the row that serves it, if that goes by the name ``asked`` for, else of the first that does; None if
        nobody offers it."""
        slot = (asked, choice.endpoint, choice.model) if choice is not None else (asked, None, None)
        if slot in self._keys:
            return self._keys[slot]
        key8 = self._found(asked, choice)
        if len(self._keys) < _KEPT:
            self._keys[slot] = key8
        return key8

    def _found(self, asked: str, choice: Choice | None) -> Id8 | None:
        fleet = self.fleet
        offer = offer_of(asked, fleet, fleet.policy)
        if offer is None or not offer.rows:
            return None
        served = fleet.row(choice.endpoint, choice.model) if choice is not None else None
        row = served if served is not None and served in offer.rows else offer.rows[0]
        return demand_key(row.digest, row.names[0])


def keys_of(row: Row) -> frozenset[Id8]:
    """Every key under which routers may count requests for the model of ``row``."""
    names = {*row.names, *(name.removesuffix(_LATEST) for name in row.names)}
    keys = {demand_key(None, name) for name in names}
    return frozenset(keys if row.digest is None else keys | {demand_key(row.digest, "")})


def rates_of(fleet: Fleet) -> Mapping[Id8, float]:
    """Requests/s by key, summed over the routers that are there."""
    rates: dict[Id8, float] = {}
    for part in fleet.parts.values():
        node = part.node
        if node.volatile is None or not (node.is_self or node.liveness in ALIVE):
            continue
        for row in node.volatile.demand:
            key8 = Id8(row.key8)
            rates[key8] = rates.get(key8, 0.0) + row.rpm / 60.0
    return rates


def rate_of(row: Row, rates: Mapping[Id8, float]) -> float:
    """Requests/s for the model of ``row``."""
    return sum(rates.get(key8, 0.0) for key8 in keys_of(row))
