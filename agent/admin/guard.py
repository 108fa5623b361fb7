"""Which requests the admin listener answers at all: rules against web pages and against confused clients.

Judged in a fixed order before a body is read: the target's form, the Host, the Origin, the fetch metadata.
Refusals are codes; nothing the caller sent comes back. A browser page cannot choose its Host, and a page of
another site cannot hide its Origin, which is what rules 2 and 3 stand on.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final

from msgspec import Struct

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""On every answer, refusals included."""

_FOREIGN_SITES: Final = frozenset({"cross-site", "same-site"})
_NEVER_IN_TARGET: Final = ("..", "//", "%2f", "%5c", "%00", "\\")


class RequestRefusal(Enum):
    """Why a request is not answered, with the HTTP status it gets."""

    TARGET = ("target_refused", 400)
    HOST = ("host_refused", 403)
    ORIGIN = ("origin_refused", 403)
    PEER = ("peer_refused", 403)
    UNKNOWN = ("not_found", 404)
    METHOD = ("method_not_allowed", 405)
    TOO_LARGE = ("body_too_large", 413)
    MEDIA = ("json_wanted", 415)
    BODY = ("body_malformed", 400)
    QUERY = ("query_malformed", 400)

    @property
    def code(self) -> str:
        return self.value[0]

    @property
    def status(self) -> int:
        return self.value[1]


class RequestHead(Struct, frozen=True, kw_only=True):
    """The head of a request as far as the rules look: each header with all its values."""

    target: str
    hosts: Sequence[str]
    origins: Sequence[str]
    fetch_sites: Sequence[str]


def judge_target(target: str) -> RequestRefusal | None:
    """Origin form only; nothing in the path that another parser might read as a different one."""
    path = target.partition("?")[0].lower()
    if not path.startswith("/") or any(part in path for part in _NEVER_IN_TARGET):
        return RequestRefusal.TARGET
    return None


def judge(asked: RequestHead, hosts: frozenset[str], origins: frozenset[str]) -> RequestRefusal | None:
    """None if the request may be looked at. ``hosts`` are lower-case ``name:port``, ``origins`` exact."""
    if (refusal := judge_target(asked.target)) is not None:
        return refusal
    if len(asked.hosts) != 1 or _bare(asked.hosts[0]) not in hosts:
        return RequestRefusal.HOST
    allowed = len(asked.origins) == 1 and asked.origins[0] in origins and asked.origins[0] != "null"
    if asked.origins and not allowed:
        return RequestRefusal.ORIGIN
    if not allowed and any(site.strip().lower() in _FOREIGN_SITES for site in asked.fetch_sites):
        return RequestRefusal.ORIGIN
    return None


def hosts_for(literal: str, port: int, extra: Sequence[str] = ()) -> frozenset[str]:
    """The Host values of a listener: ``localhost``, its own literal, and ``extra`` (port optional)."""
    named = [entry.lower() for entry in extra]
    literal = f"[{literal}]" if ":" in literal else literal
    with_port = [entry if _has_port(entry) else f"{entry}:{port}" for entry in named]
    return frozenset({f"localhost:{port}", f"{literal.lower()}:{port}", *with_port})


def _bare(host: str) -> str:
    name, colon, port = host.lower().rpartition(":")
    return f"{name.removesuffix('.')}:{port}" if colon else host.lower()


def _has_port(entry: str) -> bool:
    return entry.rpartition(":")[2].isdigit() and not entry.endswith("]")
