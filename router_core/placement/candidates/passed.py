"""The rows that passed the filters which neither clock nor load moves, and those that did not, with the reason."""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from router_core.placement.candidates.candidate import Row, RowKey
from router_core.placement.candidates.pace import Pace
from router_core.placement.reasons import Reason
from router_core.placement.request.request import Endpoint
from router_core.policy.placement import Match

Kind = tuple[str, int, int]
"""What ordinary requests of one kind share: the model asked for, the dialect and the inferred requirements."""


class StandIn(Struct, frozen=True, gc=False, kw_only=True):
    """A row of another model than the one asked for. ``cost`` is the level's penalty and what an alias charges."""

    row: Row
    match: Match
    cost: float


class Exclusion(Struct, frozen=True, gc=False, kw_only=True):
    """One row that is out. ``stand_in`` is set if it is of another model than the one asked for."""

    row: Row
    reason: Reason
    stand_in: StandIn | None = None
    detail: str | None = None


class Passed(Struct, frozen=True, gc=False, kw_only=True):
    """Rows after the filters up to pressure. ``open`` may serve; ``soft`` are among the ``excluded``, by a pressure that
    gives way if nothing else is left. ``ctx_least`` is the least context that a prompt must not exceed among rows that came
    as far as that filter, ``narrowest`` the least of the open rows."""

    open: tuple[Row, ...]
    soft: tuple[Row, ...]
    excluded: tuple[Exclusion, ...]
    ctx_least: float
    narrowest: float = math.inf


class Sifted(Struct, frozen=True, kw_only=True):
    """The rows of a model as one kind of request finds them, in the order of the fleet; ``resolved`` is None if it is no
    name at all.

    ``group`` is the model's name in the profiles. ``paces`` are those of the open rows, ``taken_ms`` is when the oldest
    picture of a peer among them and those of ``looser`` was taken. ``costs`` are what an alias charges, ``looser`` the rows
    of other models that may stand in. Of a large field, ``places`` tells where among the open rows an endpoint is, ``always``
    where those are that are scored however slow they look: the least pressed, and the own host's.
    """

    resolved: str | None
    group: str
    digest: bytes | None
    conflict: bool
    rows: tuple[Row, ...]
    passed: Passed
    paces: tuple[Pace, ...]
    taken_ms: int | None
    counts: Mapping[Reason, int]
    costs: Mapping[RowKey, float] | None
    looser: Mapping[RowKey, StandIn]
    always: Sequence[int]
    places: Mapping[Endpoint, Sequence[int]]
