"""The paths of requests that are relayed: what each is read as, and in whose words errors on it are told."""

from typing import Final, Protocol

from agent.relay.dialects import ollama, openai
from agent.relay.dialects.facts import BodyFault, Facts
from router_core.record.state import Dialect

SHOW: Final = b"/api/show"
"""A question about a model: answered by any node that has it, nothing is worked."""

NATIVE_PREFIX: Final = b"/api/"

RELAYED: Final[dict[bytes, Dialect]] = {
    b"/v1/chat/completions": Dialect.CHAT,
    b"/v1/completions": Dialect.COMPLETION,
    b"/v1/embeddings": Dialect.EMBED,
    b"/api/generate": Dialect.OLLAMA_GENERATE,
    b"/api/chat": Dialect.OLLAMA_CHAT,
    b"/api/embed": Dialect.OLLAMA_EMBED,
    b"/api/embeddings": Dialect.OLLAMA_EMBED,
    SHOW: ollama.NATIVE,
}
"""POST paths on which a peer may be asked too."""


class Tongue(Protocol):
    """How one family of dialects tells errors."""

    def error(self, status: int, code: str, message: str) -> bytes:
        """The body of an error of our own."""

    def stream_error(self, code: str, message: str, *, mid_event: bool) -> bytes:
        """What ends a stream that broke."""


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of a body in ``dialect``, or why it is ours to refuse."""
    return openai.read(dialect, body) if dialect in openai.READ else ollama.read(dialect, body)


def tongue_of(path: bytes) -> Tongue:
    """In whose words an error on a raw path is told."""
    return ollama if path.startswith(NATIVE_PREFIX) else openai
