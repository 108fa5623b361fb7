"""What the relay reads of a request body: counts, sizes, flags and one name. Never text."""

from enum import Enum

from msgspec import Struct


class Facts(Struct, frozen=True, gc=False, kw_only=True):
    """One request in numbers. ``None`` means not told (or told in a form nobody understands).

    ``text_bytes`` is the size of prompt text as it stands in the JSON; data URLs are not text. ``tokens`` counts token
    numbers that stand for text. ``item_bytes`` and ``item_tokens`` are of the longest of several prompts, each of which has
    to fit alone (None: it is one). ``sure_tokens`` is what the prompt takes of a context for certain, of the longest item
    where it is many. ``items`` is the number of inputs of an embedding. ``hints`` is the raw JSON of the body's ``pairmesh`` member. ``unloads``: the
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
    tokens: int = 0
    item_bytes: int | None = None
    item_tokens: int = 0
    sure_tokens: int = 0


class BodyFault(Enum):
    """Why a body is ours to refuse. Everything else odd goes to the engine as it is."""

    BAD_REQUEST = "bad_request"
    MODEL_MISSING = "model_missing"
    DUPLICATE_KEY = "duplicate_key"
