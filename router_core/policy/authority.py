"""Whether somebody outside may say where requests go, and whom to ask. Validated on construction.

Rules: only this host is asked, by a loopback literal or a unix socket, so that no name is resolved and nothing about
a request leaves the host. It knows nothing of how it is asked.
"""

from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from urllib.parse import urlsplit

from router_core.errors import LocalMisuse

_UNIX_PATH_MOST = 107


class AuthorityMode(Enum):
    """What an answer is worth: nothing is asked, a ranked hint, or the order to follow."""

    OFF = "off"
    ADVISORY = "advisory"
    AUTHORITATIVE = "authoritative"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityPolicy:
    """``url`` is ``http://LITERAL:PORT[/PATH]`` on loopback or ``unix:/PATH``; ``credential`` names the file that
    holds the bearer token, None to send none. ``failures`` in a row stop the asking for ``open_ms``."""

    mode: AuthorityMode = AuthorityMode.OFF
    url: str = ""
    credential: str | None = None
    budget_ms: int = 50
    in_flight: int = 32
    failures: int = 5
    open_ms: int = 30_000
    answers_kept: int = 256

    def __post_init__(self) -> None:
        if self.url and (problem := _problem_of(self.url)) is not None:
            raise LocalMisuse(f"authority url {problem}")
        if self.mode is not AuthorityMode.OFF and not self.url:
            raise LocalMisuse(f"authority mode {self.mode.value!r} needs a url")
        for name in ("budget_ms", "in_flight", "failures", "open_ms", "answers_kept"):
            if getattr(self, name) < 1:
                raise LocalMisuse(f"authority {name} is {getattr(self, name)}, must be 1 or more")

    @property
    def socket(self) -> str | None:
        """The path of the unix socket, None if the authority is asked over TCP."""
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else None


def _problem_of(url: str) -> str | None:
    if not url.isascii() or not url.isprintable() or " " in url:
        return "holds characters that must be escaped"
    if url.startswith("unix:"):
        path = url.removeprefix("unix:")
        if not path.startswith("/"):
            return "must name an absolute path"
        return f"is longer than {_UNIX_PATH_MOST} bytes" if len(path) > _UNIX_PATH_MOST else None
    try:
        parts = urlsplit(url)
        host, port = ip_address(parts.hostname or ""), parts.port
    except ValueError:
        return "is neither http:// with an address of loopback nor unix:/PATH"
    if parts.scheme != "http":
        return f"has scheme {parts.scheme!r}, allowed are http and unix"
    if parts.username is not None or parts.password is not None:
        return "must not hold a user or a password: use credential"
    if not host.is_loopback:
        return "is not on loopback"
    if not port:
        return "needs a port"
    return "must end after the path" if parts.query or parts.fragment else None
