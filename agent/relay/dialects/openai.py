"""The OpenAI dialects ``chat``, ``completion`` and ``embed``: reading a body, telling an error.

One typed decode per body whose fields are all raw, so that text is measured and never built, and so that an odd
field reads as "not told" and goes to the engine as it stands.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from agent.relay.dialects.facts import BodyFault, Facts
from router_core.record.state import Dialect

_NONE = Raw()
_T = TypeVar("_T")
_COMPLETION_DEFAULT = 16
_TOKENS_MOST = 10**9
_CHOICES_MOST = 1_024
_OFF = (b"", b"null", b"false", b"[]", b"{}", b"0")


class _Body(Struct, gc=False):
    model: Raw = _NONE
    stream: Raw = _NONE
    max_tokens: Raw = _NONE
    max_completion_tokens: Raw = _NONE
    messages: Raw = _NONE
    prompt: Raw = _NONE
    input: Raw = _NONE
    tools: Raw = _NONE
    response_format: Raw = _NONE
    logprobs: Raw = _NONE
    n: Raw = _NONE
    pairmesh: Raw = _NONE


class _Message(Struct, gc=False):
    content: Raw = _NONE


class _Part(Struct, gc=False):
    type: str = ""
    text: Raw = _NONE


class _Format(Struct, gc=False):
    type: str = ""


def _decoder(kind: type[_T]) -> Callable[[Raw], _T | None]:
    decode = msgspec.json.Decoder(kind).decode

    def read(raw: Raw) -> _T | None:
        if raw is _NONE:
            return None
        try:
            return decode(raw)
        except (msgspec.MsgspecError, RecursionError):
            return None

    return read


_body = msgspec.json.Decoder(_Body).decode
_text = _decoder(str)
_int = _decoder(int)
_items = _decoder(list[Raw])
_messages = _decoder(list[_Message])
_parts = _decoder(list[_Part])
_format = _decoder(_Format)


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of ``body``, or why it is ours to refuse."""
    try:
        told = _body(body)
    except (msgspec.MsgspecError, RecursionError):
        return BodyFault.BAD_REQUEST
    model = _text(told.model)
    if model is None:
        return BodyFault.MODEL_MISSING
    common: dict[str, Any] = {
        "model": model,
        "hints": bytes(told.pairmesh) or None,
    }
    if dialect is Dialect.EMBED:
        size, items = _inputs(told.input)
        return Facts(text_bytes=size, items=items, max_tokens=0, **common)
    common["stream"] = bytes(told.stream) == b"true"
    common["n"] = _whole(told.n, _CHOICES_MOST)
    common["logprobs"] = bytes(told.logprobs) not in _OFF
    common["json_schema"] = _has_schema(told.response_format)
    if dialect is Dialect.COMPLETION:
        size, _ = _inputs(told.prompt)
        cap = _whole(told.max_tokens, _TOKENS_MOST)
        return Facts(text_bytes=size, max_tokens=_COMPLETION_DEFAULT if cap is None else cap, **common)
    cap = _whole(told.max_completion_tokens, _TOKENS_MOST)
    if cap is None:
        cap = _whole(told.max_tokens, _TOKENS_MOST)
    size, images, audio = _measure(told.messages)
    tools = bytes(told.tools) not in _OFF
    return Facts(
        text_bytes=size + (len(bytes(told.tools)) if tools else 0),
        images=images,
        audio_parts=audio,
        max_tokens=cap,
        tools=tools,
        **common,
    )


def _whole(raw: Raw, most: int) -> int | None:
    """A whole number from 1 to ``most``, else None."""
    value = _int(raw)
    return value if value is not None and 1 <= value <= most else None


def _has_schema(raw: Raw) -> bool:
    told = _format(raw)
    return told is not None and told.type == "json_schema"


def _size(raw: Raw) -> int:
    """Bytes between the quotes of a JSON string, of the whole value for anything else, 0 if absent or null."""
    size = len(memoryview(raw))
    opening = _opening(raw)
    if opening in (None, 0x6E):
        return 0
    return size - 2 if opening == 0x22 else size


def _opening(raw: Raw) -> int | None:
    """The first byte of a value."""
    view = memoryview(raw)
    return view[0] if len(view) else None


def _measure(raw: Raw) -> tuple[int, int, int]:
    """Text bytes, pictures and audio parts of a list of messages."""
    messages = _messages(raw)
    if messages is None:
        return _size(raw), 0, 0
    text = images = audio = 0
    for message in messages:
        parts = _parts(message.content) if _opening(message.content) == 0x5B else None
        if parts is None:
            text += _size(message.content)
            continue
        for part in parts:
            if part.type == "image_url":
                images += 1
            elif part.type == "input_audio":
                audio += 1
            else:
                text += _size(part.text)
    return text, images, audio


def _inputs(raw: Raw) -> tuple[int, int | None]:
    """Text bytes and number of inputs: one string, a list of them, or token numbers."""
    items = _items(raw)
    if items is None:
        return _size(raw), None if _text(raw) is None else 1
    if items and _opening(items[0]) not in (0x22, 0x5B):
        return _size(raw), 1
    return sum(_size(item) for item in items), len(items)


# --- errors --------------------------------------------------------------------------------------------------


def error_type(status: int) -> str:
    """The ``type`` of an error envelope."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error(status: int, code: str, message: str) -> bytes:
    """The body of an error of our own."""
    told = {"message": message, "type": error_type(status), "param": None, "code": code}
    return msgspec.json.encode({"error": told})


def stream_error(code: str, message: str, *, mid_event: bool) -> bytes:
    """The last event of a stream that broke; never followed by ``[DONE]``."""
    told = error(500, code, message)
    return (b"\n\n" if mid_event else b"") + b"data: " + told + b"\n\n"
