"""The OpenAI dialects ``chat``, ``completion`` and ``embed``: reading a body, telling an error.

One typed decode per body whose fields are all raw, so that text is measured and never built, and so that an odd
field reads as "not told" and goes to the engine as it stands.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from agent.relay.dialects import raw as raws
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.raw import NONE, OFF, inputs_of, size_of, whole
from router_core.record.state import Dialect

_COMPLETION_DEFAULT = 16
_CHOICES_MOST = 1_024


class _Body(Struct, gc=False):
    model: Raw = NONE
    stream: Raw = NONE
    max_tokens: Raw = NONE
    max_completion_tokens: Raw = NONE
    messages: Raw = NONE
    prompt: Raw = NONE
    input: Raw = NONE
    tools: Raw = NONE
    response_format: Raw = NONE
    logprobs: Raw = NONE
    n: Raw = NONE
    pairmesh: Raw = NONE


class _Message(Struct, gc=False):
    content: Raw = NONE


class _Part(Struct, gc=False):
    type: str = ""
    text: Raw = NONE


class _Format(Struct, gc=False):
    type: str = ""


_body = msgspec.json.Decoder(_Body).decode
_messages = raws.decoder(list[_Message])
_parts = raws.decoder(list[_Part])
_format = raws.decoder(_Format)


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of ``body``, or why it is ours to refuse."""
    try:
        told = _body(body)
    except (msgspec.MsgspecError, RecursionError):
        return BodyFault.BAD_REQUEST
    model = raws.text(told.model)
    if model is None:
        return BodyFault.MODEL_MISSING
    common: dict[str, Any] = {
        "model": model,
        "hints": bytes(told.pairmesh) or None,
    }
    if dialect is Dialect.EMBED:
        size, items = inputs_of(told.input)
        return Facts(text_bytes=size, items=items, max_tokens=0, **common)
    common["stream"] = bytes(told.stream) == b"true"
    common["n"] = whole(told.n, _CHOICES_MOST)
    common["logprobs"] = bytes(told.logprobs) not in OFF
    common["json_schema"] = _has_schema(told.response_format)
    if dialect is Dialect.COMPLETION:
        size, _ = inputs_of(told.prompt)
        cap = whole(told.max_tokens)
        return Facts(text_bytes=size, max_tokens=_COMPLETION_DEFAULT if cap is None else cap, **common)
    cap = whole(told.max_completion_tokens)
    if cap is None:
        cap = whole(told.max_tokens)
    size, images, audio = _measure(told.messages)
    tools = bytes(told.tools) not in OFF
    return Facts(
        text_bytes=size + (len(bytes(told.tools)) if tools else 0),
        images=images,
        audio_parts=audio,
        max_tokens=cap,
        tools=tools,
        **common,
    )


def _has_schema(raw: Raw) -> bool:
    told = _format(raw)
    return told is not None and told.type == "json_schema"


def _measure(raw: Raw) -> tuple[int, int, int]:
    """Text bytes, pictures and audio parts of a list of messages."""
    messages = _messages(raw)
    if messages is None:
        return size_of(raw), 0, 0
    text = images = audio = 0
    for message in messages:
        parts = _parts(message.content) if raws.is_list(message.content) else None
        if parts is None:
            text += size_of(message.content)
            continue
        for part in parts:
            if part.type == "image_url":
                images += 1
            elif part.type == "input_audio":
                audio += 1
            else:
                text += size_of(part.text)
    return text, images, audio


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
