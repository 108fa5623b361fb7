"""The routes of the local API: one literal table, and what answers each."""

from enum import Enum
from typing import Final

from msgspec import Struct

from agent.relay.dialects.relayed import RELAYED
from router_core.record.state import Dialect

MODEL: Final = b"/v1/models/"
_BLOBS: Final = b"/api/blobs/"


class View(Enum):
    """Answers that need no endpoint."""

    MODELS = "models"
    MODEL = "model"
    TAGS = "tags"
    PS = "ps"
    VERSION = "version"
    HEALTH = "health"
    GREETING = "greeting"


class Closed(Enum):
    """What is known and never done; the value is the code of the refusal."""

    ENGINE_ADMIN = "engine_admin_disabled"


class Route(Struct, frozen=True):
    """One path: its methods, and the dialect of its body, or what answers instead. ``template`` is logged."""

    template: str
    methods: tuple[bytes, ...]
    what: Dialect | View | Closed


_POST: Final = (b"POST",)
_GET: Final = (b"GET", b"HEAD")
_VIEWS: Final = {
    "/v1/models": View.MODELS,
    "/api/tags": View.TAGS,
    "/api/ps": View.PS,
    "/api/version": View.VERSION,
    "/health": View.HEALTH,
    "/": View.GREETING,
}
_ADMINISTRATION: Final = {
    "/api/pull": _POST,
    "/api/push": _POST,
    "/api/create": _POST,
    "/api/copy": _POST,
    "/api/delete": (b"DELETE",),
}
ROUTES: Final[dict[bytes, Route]] = (
    {path: Route(path.decode("ascii"), _POST, dialect) for path, dialect in RELAYED.items()}
    | {path.encode("ascii"): Route(path, _GET, view) for path, view in _VIEWS.items()}
    | {
        path.encode("ascii"): Route(path, methods, Closed.ENGINE_ADMIN)
        for path, methods in _ADMINISTRATION.items()
    }
)
_ONE_MODEL: Final = Route("/v1/models/{id}", _GET, View.MODEL)
_ONE_BLOB: Final = Route("/api/blobs/{digest}", (b"POST", b"HEAD"), Closed.ENGINE_ADMIN)


def route_for(path: bytes) -> Route | None:
    """The route of a raw path."""
    route = ROUTES.get(path)
    if route is not None:
        return route
    if path.startswith(MODEL) and len(path) > len(MODEL):
        return _ONE_MODEL
    return _ONE_BLOB if path.startswith(_BLOBS) and len(path) > len(_BLOBS) else None
