"""Lists and signs of life, answered from the current picture alone: nobody else is asked, so nobody can delay them.

A list names exactly what a request of that family could reach within the mesh; never a node.
"""

from urllib.parse import unquote_to_bytes

import msgspec

from agent.relay.dialects.ollama import NATIVE
from agent.relay.frontends.native_lists import least_version, ps_of, tags_of
from agent.relay.http.frontend import Answer
from agent.relay.http.headers import Headers
from agent.relay.ports import Listing, Phase
from router_core.record.state import Dialect

OPENAI = (
    Dialect.CHAT | Dialect.COMPLETION | Dialect.RESPONSES | Dialect.EMBED | Dialect.MESSAGES | Dialect.RERANK
)
JSON: Headers = [(b"content-type", b"application/json")]
_TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
_GREETING = b"Ollama is running"
"""What an Ollama server says at its root, byte for byte: clients compare it."""
_API_VERSION = "0.13.0"
"""The version of Ollama whose API is spoken here where no Ollama server tells its own. From 0.13.4 on clients expect
``/v1/responses``."""


class Lists:
    """Answers, made once per generation of the picture."""

    def __init__(self) -> None:
        self._generation: int | None = None
        self._entries: dict[str, bytes] = {}
        self._all = b""
        self._tags = b""

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

    def tags(self, listing: Listing) -> Answer:
        """``/api/tags``: one entry per name and digest."""
        self._refresh(listing)
        return Answer(status=200, headers=JSON, body=self._tags)

    def _refresh(self, listing: Listing) -> None:
        if listing.generation == self._generation:
            return
        offered = list(listing.offered())
        names = {each.name for each in offered if each.dialects & OPENAI}
        names.update(alias for alias, dialects in listing.aliases() if dialects & OPENAI)
        self._entries = {name: _entry(name) for name in sorted(names)}
        self._all = b'{"object":"list","data":[' + b",".join(self._entries.values()) + b"]}"
        self._tags = tags_of(each for each in offered if each.dialects & NATIVE)
        self._generation = listing.generation


def running(listing: Listing, wall_ms: int) -> Answer:
    """``/api/ps``: one entry per node and model in memory."""
    return Answer(status=200, headers=JSON, body=ps_of(listing.held(), wall_ms))


def version(listing: Listing) -> Answer:
    """``/api/version``: the least version of the Ollama servers, else that of the API that is spoken here."""
    least = least_version(listing.versions()) or _API_VERSION
    return Answer(status=200, headers=JSON, body=msgspec.json.encode({"version": least}))


def health(phase: Phase) -> Answer:
    """``/health``."""
    status = 200 if phase is Phase.SERVING else 503
    told = "ok" if phase is Phase.SERVING else phase.value
    return Answer(status=status, headers=JSON, body=msgspec.json.encode({"status": told}))


def greeting() -> Answer:
    """``/``."""
    return Answer(status=200, headers=_TEXT, body=_GREETING)


def _entry(name: str) -> bytes:
    return msgspec.json.encode({"id": name, "object": "model", "created": 0, "owned_by": "pairmesh"})
