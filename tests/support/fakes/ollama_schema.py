"""The wire shapes of Ollama's replies, strict: a field that is not here, or of another type, is an error.

Fields that the real server leaves out when zero or unknown have a default; all others must be there. Used on the
fake and, where one is at hand, on a real server.
"""

import re
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")
_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


class Details(Struct, forbid_unknown_fields=True):
    parent_model: str
    format: str
    family: str
    families: list[str] | None
    parameter_size: str
    quantization_level: str
    context_length: int | UnsetType = UNSET
    embedding_length: int | UnsetType = UNSET


class Listed(Struct, forbid_unknown_fields=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    remote_model: str | UnsetType = UNSET
    remote_host: str | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET


class Tags(Struct, forbid_unknown_fields=True):
    models: list[Listed]


class Running(Struct, forbid_unknown_fields=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class Ps(Struct, forbid_unknown_fields=True):
    models: list[Running]


class Version(Struct, forbid_unknown_fields=True):
    version: str


class Show(Struct, forbid_unknown_fields=True):
    details: Details
    model_info: dict[str, Any]
    modified_at: str
    license: str | UnsetType = UNSET
    modelfile: str | UnsetType = UNSET
    parameters: str | UnsetType = UNSET
    template: str | UnsetType = UNSET
    system: str | UnsetType = UNSET
    renderer: str | UnsetType = UNSET
    parser: str | UnsetType = UNSET
    messages: list[Any] | UnsetType = UNSET
    tensors: list[Any] | UnsetType = UNSET
    projector_info: dict[str, Any] | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET
    requires: str | UnsetType = UNSET


class Figures(Struct, forbid_unknown_fields=True, kw_only=True):
    """Nanoseconds and counts, each left out where it is zero."""

    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Generated(Figures, forbid_unknown_fields=True, kw_only=True):
    model: str
    created_at: str
    response: str
    done: bool
    done_reason: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class Message(Struct, forbid_unknown_fields=True):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class Chatted(Figures, forbid_unknown_fields=True, kw_only=True):
    model: str
    created_at: str
    message: Message
    done: bool
    done_reason: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class Embedded(Figures, forbid_unknown_fields=True, kw_only=True):
    model: str
    embeddings: list[list[float]]


class EmbeddedOne(Struct, forbid_unknown_fields=True):
    embedding: list[float]


class Failed(Struct, forbid_unknown_fields=True):
    error: str


REPLIES: dict[str, type[Struct]] = {
    "/api/version": Version,
    "/api/tags": Tags,
    "/api/ps": Ps,
    "/api/show": Show,
    "/api/generate": Generated,
    "/api/chat": Chatted,
    "/api/embed": Embedded,
    "/api/embeddings": EmbeddedOne,
}


def check(path: str, raw: bytes) -> Any:
    """The reply (or the line of a stream) to ``path``, typed. Raises ``msgspec.ValidationError`` or AssertionError."""
    told: Any = msgspec.json.decode(raw, type=REPLIES[path])
    for name in ("created_at", "modified_at", "expires_at"):
        for place in (told, *getattr(told, "models", ())):
            if hasattr(place, name):
                assert _STAMP.fullmatch(getattr(place, name)), f"{name}: {getattr(place, name)}"
    if isinstance(told, Figures):
        assert 0 not in [getattr(told, name) for name in told.__struct_fields__ if name in _DURATIONS]
    return told
