"""What a client connection and the code behind its listener say to each other.

A ``Front`` judges heads and starts the ``Work`` that answers; the work replies through its ``Client``, which frames
and writes. Types only, and the one counter that all listeners share.
"""

from typing import Any, Protocol

from msgspec import Struct

from agent.relay.http.headers import Headers
from agent.relay.http.parser import Request
from router_core import limits


class Answer(Struct, frozen=True, kw_only=True):
    """A whole reply made here. ``keep`` False closes after it."""

    status: int
    headers: Headers
    body: bytes
    code: str | None = None
    keep: bool = True


class Client(Protocol):
    """One client connection, as the code behind it sees it. Everything replies to the current request."""

    caller: Any
    """What the front knows of the caller."""

    @property
    def idle_since(self) -> int | None:
        """Since when there is no request, boot ms; None if there is one."""

    def make_way(self) -> None:
        """Close an idle connection, so that another can be had."""

    def reply(self, answer: Answer) -> None:
        """End the request with a whole reply."""

    def begin(self, status: int, lines: bytes, length: int | None) -> None:
        """Start a passed-on reply with these header lines; ``length`` None frames it by chunks, or by closing toward
        HTTP/1.0."""

    def push(self, data: bytes) -> None:
        """Body bytes of the reply."""

    def flush(self) -> None:
        """Write what was begun and pushed, at once."""

    def end(self) -> None:
        """The reply is complete: on to the next request, or close."""

    def cut(self, last: bytes) -> None:
        """The reply broke: write ``last`` if it can still be told, then close without a clean end."""

    def abort(self) -> None:
        """Drop the connection; nothing more is written."""

    def release_body(self) -> None:
        """The request's body is not needed any more: its memory counts no longer."""

    def close_when_idle(self) -> None:
        """No further request on this connection."""

    def tick(self, now: int) -> None:
        """Called about once a second: enforce what is late."""

    def peer_certificate(self) -> bytes | None:
        """DER of the caller's certificate on a TLS listener."""


class Work(Protocol):
    """What answers one request; the connection tells it about the client."""

    def client_gone(self) -> None: ...

    def client_stalled(self) -> None: ...

    def pause(self) -> None:
        """The client reads too slowly: take no more from upstream."""

    def resume(self) -> None: ...


class Front(Protocol):
    """What stands behind one listener."""

    def opened(self, connection: "Client") -> None: ...

    def closed(self, connection: "Client") -> None: ...

    def judge(self, connection: "Client", request: Request) -> Answer | None:
        """The head is there, the body is not. None to read on."""

    def serve(self, connection: "Client", request: Request, body: bytes | bytearray) -> Answer | Work:
        """The request is complete."""

    def fault(self, connection: "Client", request: Request | None, code: str) -> Answer:
        """The reply to a request that broke a limit or the protocol; the connection ends with it."""

    def answered(self, connection: "Client", request: Request | None, answer: Answer) -> None:
        """An ``Answer`` was written."""


class Buffered:
    """Bytes of all request bodies in memory, shared by the listeners. ``take`` says no at the ceiling."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int = limits.BODIES_BUFFERED) -> None:
        self.held = 0
        self.limit = limit

    def take(self, size: int) -> bool:
        if self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size
