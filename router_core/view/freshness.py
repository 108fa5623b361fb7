"""When a node counts as routable, and when its picture is too old to rank by.

Rules: verdicts come from liveness, flags and roles as the mesh gives them; a node's own service goes on whatever
its links do, so loneliness and conflict never make the own node unroutable. It knows nothing of endpoints.
"""

from router_core.record.membership import Liveness
from router_core.record.state import Flag, Role, Static, Volatile

_ROUTED = frozenset({Liveness.FRESH, Liveness.LATE})
_UNSERVING = Flag.DRAINING | Flag.LONELY | Flag.CONFLICT
STALE_PERIODS = 5


def is_routable(
    *,
    is_self: bool,
    roles: int,
    liveness: Liveness,
    volatile: Volatile | None,
    static: Static | None,
    quarantined: bool,
) -> bool:
    """True if requests may go to the node: fresh or late, S present, may serve, no flag against it."""
    if volatile is None or static is None:
        return False
    if is_self:
        return not volatile.flags & Flag.DRAINING
    return (
        liveness in _ROUTED
        and bool(roles & Role.NODE)
        and not volatile.flags & _UNSERVING
        and not quarantined
    )


def is_stale(age_ms: int, period_ms: int) -> bool:
    """True if a picture is older than five publish periods: good as a backup only."""
    return age_ms > STALE_PERIODS * period_ms
