"""What the relay reads of a request body: counts, sizes, flags and one name. Never text."""

from enum import Enum

from msgspec import Struct


class Facts(Struct, frozen=True, gc=False, kw_only=True):
    """One request in numbers. ``None`` means not told (or told in a form nobody understands).

    ``text_bytes`` is the size of prompt text as it stands in the JSON; data URLs are not text. ``items`` is the
    number of inputs of an embedding. ``hints`` is the raw JSON of the body's ``pairmesh`` member. ``unloads``: the
    request would take the model out of memory. ``model_key`` is the member that named the model.
    """

    model: str
    stream: bool = False
    max_tokens: int | None = None
    n: int | None = None
    text_bytes: int = 0
    images: int = 0
    audio_parts: int = 0
    items: int | None = None
    num_ctx: int | None = None
    tools: bool = False
    json_schema: bool = False
    logprobs: bool = False
    unloads: bool = False
    model_key: bytes = b"model"
    hints: bytes | None = None


class BodyFault(Enum):
    """Why a body is ours to refuse. Everything else odd goes to the engine as it is."""

    BAD_REQUEST = "bad_request"
    MODEL_MISSING = "model_missing"
    DUPLICATE_KEY = "duplicate_key"
