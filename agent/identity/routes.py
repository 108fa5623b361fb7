"""Who may do what on the two ports that peers reach: one literal table, deny by default.

Judged from the roles of the connection's certificate, before anything is read or forwarded. A stranger never gets
here: the handshake refuses it. Paths are raw and compared whole, query cut off by the caller.
"""

from enum import Enum
from typing import Final

from router_core.record.state import Role


class Port(Enum):
    """The listeners that demand a member's certificate."""

    LINK = "link"
    INGRESS = "ingress"


class RouteVerdict(Enum):
    """What the table says; the value is the HTTP status of a refusal."""

    ALLOWED = 0
    FORBIDDEN = 403
    NOT_FOUND = 404


_TABLE: Final[dict[tuple[Port, str, str], Role]] = {
    (Port.LINK, "GET", "/mesh/v1/link"): Role.NODE | Role.ROUTER,
    (Port.INGRESS, "POST", "/v1/chat/completions"): Role.ROUTER,
    (Port.INGRESS, "POST", "/v1/completions"): Role.ROUTER,
    (Port.INGRESS, "POST", "/v1/embeddings"): Role.ROUTER,
    (Port.INGRESS, "POST", "/api/generate"): Role.ROUTER,
    (Port.INGRESS, "POST", "/api/chat"): Role.ROUTER,
    (Port.INGRESS, "POST", "/api/embed"): Role.ROUTER,
    (Port.INGRESS, "POST", "/api/embeddings"): Role.ROUTER,
    (Port.INGRESS, "POST", "/api/show"): Role.ROUTER,
}
"""Route -> the roles of which one is enough."""

ROUTES: Final = tuple(_TABLE)
"""Every route there is."""


def allowed(port: Port, method: str, path: str, roles: int) -> RouteVerdict:
    """The answer to a member with ``roles`` (bits of ``Role``): what is no route here does not exist for anybody."""
    enough = _TABLE.get((port, method, path))
    if enough is None:
        return RouteVerdict.NOT_FOUND
    return RouteVerdict.ALLOWED if roles & enough else RouteVerdict.FORBIDDEN
