"""The OpenAI dialects ``chat``, ``completion`` and ``embed``: reading a body, telling an error.

One typed decode per body in which text stays raw, so that it is measured and never built. A body with a field of an
odd type is decoded once more with all fields raw: what is odd reads as "not told" and goes to the engine as it stands.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from agent.relay.dialects import raw as raws
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.raw import NONE, OFF, TOKENS_MOST, Inputs, inputs_of, size_of, whole
from router_core.record.state import Dialect

READ: Final = (Dialect.CHAT, Dialect.COMPLETION, Dialect.EMBED)
COMPLETION_DEFAULT = 16
CHOICES_MOST = 1_024
SPEAKING = b'"assistant"'
"""The role of what the model said."""


class _Message(Struct, gc=False):
    content: Raw = NONE
    role: Raw = NONE


class _Anything(Struct, gc=False):
    prompt: Raw = NONE
    input: Raw = NONE
    tools: Raw = NONE
    response_format: Raw = NONE
    logprobs: Raw = NONE
    truncate_prompt_tokens: Raw = NONE
    truncate: Raw = NONE
    pairmesh: Raw = NONE


class _Body(_Anything, gc=False, kw_only=True):
    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: list[_Message] | None = None
    n: int | None = None


class _OddBody(_Anything, gc=False, kw_only=True):
    model: Raw = NONE
    stream: Raw = NONE
    max_tokens: Raw = NONE
    max_completion_tokens: Raw = NONE
    messages: Raw = NONE
    n: Raw = NONE


class _Part(Struct, gc=False):
    type: str = ""
    text: Raw = NONE


class _Format(Struct, gc=False):
    type: str = ""


_body = msgspec.json.Decoder(_Body).decode
_odd_body = msgspec.json.Decoder(_OddBody).decode
_message = raws.decoder(_Message)
_messages = raws.decoder(list[_Message])
_part = raws.decoder(_Part)
_parts = raws.decoder(list[_Part])
_format = raws.decoder(_Format)


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of ``body``, or why it is ours to refuse."""
    unread = 0
    try:
        try:
            told = _body(body)
        except msgspec.ValidationError:
            read = _read_odd(body)
            if read is None:
                return BodyFault.MODEL_MISSING
            told, unread = read
    except (msgspec.MsgspecError, RecursionError):
        return BodyFault.BAD_REQUEST
    hints = None if told.pairmesh is NONE else bytes(told.pairmesh)
    cuts = (told.truncate_prompt_tokens is not NONE and bytes(told.truncate_prompt_tokens) not in OFF) or (
        told.truncate is not NONE and bytes(told.truncate) not in OFF
    )
    given: Inputs | None = None
    if dialect is Dialect.EMBED:
        given = inputs_of(told.input)
        return Facts(
            model=told.model,
            hints=hints,
            text_bytes=given.text_bytes,
            items=given.items,
            max_tokens=0,
            tokens=given.tokens,
            item_bytes=given.longest_bytes,
            item_tokens=given.longest_tokens,
            sure_tokens=0 if cuts else given.sure,
        )
    images = audio = 0
    cap = _within(told.max_tokens)
    tools = False
    if dialect is Dialect.COMPLETION:
        given = inputs_of(told.prompt)
        size, sure = given.text_bytes, given.sure
        cap = COMPLETION_DEFAULT if cap is None else cap
    else:
        most = _within(told.max_completion_tokens)
        cap = cap if most is None else most
        size, images, audio, sure = measure(told.messages)
        tools = told.tools is not NONE and bytes(told.tools) not in OFF
        size += unread + (len(bytes(told.tools)) if tools else 0)
    return Facts(
        model=told.model,
        hints=hints,
        stream=told.stream is True,
        n=_within(told.n, CHOICES_MOST),
        logprobs=told.logprobs is not NONE and bytes(told.logprobs) not in OFF,
        json_schema=told.response_format is not NONE and _has_schema(told.response_format),
        text_bytes=size,
        images=images,
        audio_parts=audio,
        max_tokens=cap,
        tools=tools,
        tokens=0 if given is None else given.tokens,
        item_bytes=None if given is None else given.longest_bytes,
        item_tokens=0 if given is None else given.longest_tokens,
        sure_tokens=0 if cuts else sure,
    )


def _read_odd(body: bytes | bytearray) -> tuple[_Body, int] | None:
    """A body in which some field is not of its type, without what is odd, and the size of messages that are no list;
    None without a model. Raises what a decoder raises."""
    told = _odd_body(body)
    model = raws.text(told.model)
    if model is None:
        return None
    messages = _messages(told.messages)
    if messages is None and raws.is_list(told.messages):
        messages = [message_of(each) for each in raws.items(told.messages) or ()]
    known = _Body(
        model=model,
        stream=bytes(told.stream) == b"true",
        max_tokens=whole(told.max_tokens),
        max_completion_tokens=whole(told.max_completion_tokens),
        messages=messages,
        n=whole(told.n),
        prompt=told.prompt,
        input=told.input,
        tools=told.tools,
        response_format=told.response_format,
        logprobs=told.logprobs,
        truncate_prompt_tokens=told.truncate_prompt_tokens,
        truncate=told.truncate,
        pairmesh=told.pairmesh,
    )
    return known, size_of(told.messages) if messages is None else 0


def _within(value: int | None, most: int = TOKENS_MOST) -> int | None:
    return value if value is not None and 1 <= value <= most else None


def _has_schema(raw: Raw) -> bool:
    told = _format(raw)
    return told is not None and told.type == "json_schema"


def message_of(raw: Raw) -> _Message:
    """One message; of what is none, only a string is text."""
    return _message(raw) or _Message(content=_if_text(raw))


def measure(messages: Iterable[_Message] | None) -> tuple[int, int, int, int]:
    """Text bytes, pictures, audio parts and certain tokens of a list of messages. What the model said before may be
    shortened by its template, and so may what it was told of tools: these are no certain ones."""
    text = images = audio = sure = 0
    for message in messages or ():
        if not raws.is_list(message.content):
            size = size_of(message.content)
            text += size
            if size >= raws.SURE_FROM - 2 and bytes(message.role) != SPEAKING:
                sure += raws.sure_of(message.content)
            continue
        counts = bytes(message.role) != SPEAKING
        for part in _parts(message.content) or _odd_parts(message.content):
            if part.type == "image_url":
                images += 1
            elif part.type == "input_audio":
                audio += 1
            else:
                text += size_of(part.text)
                sure += raws.sure_of(part.text) if counts else 0
    return text, images, audio, sure


def _odd_parts(raw: Raw) -> list[_Part]:
    """Parts of which some are no parts: of those only a string is text, whatever else they hold may be a picture."""
    return [_part(each) or _Part(text=_if_text(each)) for each in raws.items(raw) or ()]


def _if_text(raw: Raw) -> Raw:
    return NONE if raws.text(raw) is None else raw


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
