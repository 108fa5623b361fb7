"""Lists and signs of life, answered from the current picture alone: nobody else is asked, so nobody can delay them.

A list names exactly what a request of that family could reach within the mesh; never a node.
"""

from urllib.parse import unquote_to_bytes

import msgspec

from agent.relay.front import Answer
from agent.relay.headers import Headers
from agent.relay.ports import Listing, Phase
from router_core.record.state import Dialect

OPENAI = (
    Dialect.CHAT | Dialect.COMPLETION | Dialect.RESPONSES | Dialect.EMBED | Dialect.MESSAGES | Dialect.RERANK
)
JSON: Headers = [(b"content-type", b"application/json")]
_TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]


class Lists:
    """Answers, made once per generation of the picture."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._entries: dict[str, bytes] = {}
        self._all = b""

    def models(self, listing: Listing) -> Answer:
        """``/v1/models``."""
        self._refresh(listing)
        return Answer(status=200, headers=JSON, body=self._all)

    def model(self, listing: Listing, raw_id: bytes) -> Answer | None:
        """``/v1/models/{id}`` for an id as it stands in the path; None if there is none such."""
        self._refresh(listing)
        try:
            name = unquote_to_bytes(raw_id).decode("utf-8")
        except UnicodeDecodeError:
            return None
        entry = self._entries.get(name)
        return None if entry is None else Answer(status=200, headers=JSON, body=entry)

    def _refresh(self, listing: Listing) -> None:
        if listing.generation == self._generation:
            return
        names = {name for name, dialects in listing.models() if dialects & OPENAI}
        names.update(listing.aliases())
        self._entries = {name: _entry(name) for name in sorted(names)}
        self._all = b'{"object":"list","data":[' + b",".join(self._entries.values()) + b"]}"
        self._generation = listing.generation


def health(phase: Phase) -> Answer:
    """``/health``."""
    status = 200 if phase is Phase.SERVING else 503
    told = "ok" if phase is Phase.SERVING else phase.value
    return Answer(status=status, headers=JSON, body=msgspec.json.encode({"status": told}))


def greeting() -> Answer:
    """``/``."""
    return Answer(status=200, headers=_TEXT, body=b"pairmesh is running")


def _entry(name: str) -> bytes:
    return msgspec.json.encode({"id": name, "object": "model", "created": 0, "owned_by": "pairmesh"})
