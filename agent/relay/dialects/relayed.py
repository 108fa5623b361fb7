"""The paths of requests that are relayed: what each is read as, and in whose words errors on it are told."""

import re
from typing import Final, Protocol

import msgspec

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

_READ_AGAIN: Final = 256 * 1024
_WHERE: Final = re.compile(r"\(byte (\d+)\)")
_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Tongue(Protocol):
    """How one family of dialects tells errors."""

    def error(self, status: int, code: str, message: str) -> bytes:
        """The body of an error of our own."""

    def stream_error(self, code: str, message: str, *, mid_event: bool) -> bytes:
        """What ends a stream that broke."""


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of a body in ``dialect``, or why it is ours to refuse."""
    return openai.read(dialect, body) if dialect in openai.READ else ollama.read(dialect, body)


def why(dialect: Dialect, fault: BodyFault, body: bytes | bytearray) -> str | None:
    """What is wrong with a body that was refused for ``fault``, in our own words and numbers; None if the fault's text
    says it all. A large body is not read again for that."""
    if fault is not BodyFault.BAD_REQUEST or len(body) > _READ_AGAIN:
        return None
    try:
        told = _object(body)
    except msgspec.ValidationError:
        return "the body is JSON, but no object"
    except (msgspec.DecodeError, UnicodeDecodeError) as fault_:
        found = _WHERE.search(str(fault_))
        at = (
            f" at byte {found[1]}"
            if found is not None
            else f" within its {len(body)} bytes"
            if body
            else ": it is empty"
        )
        return f"the body is not valid JSON{at}"
    except RecursionError:
        return "the body is nested too deeply"
    if dialect not in openai.READ and any(ollama.is_disguised(key) for key in told):
        return f"a key of the body is one of {' '.join(sorted(ollama.SENSITIVE))} but for the case of its letters"
    return None


def tongue_of(path: bytes) -> Tongue:
    """In whose words an error on a raw path is told."""
    return ollama if path.startswith(NATIVE_PREFIX) or path == NATIVE_PREFIX[:-1] else openai
