"""Ollama's own dialect: reading bodies of its native routes, telling errors its way.

Ollama reads keys in any letter case and takes the last of equal ones, so a second spelling could name another model
or unload one behind our back: a key that is one of its own but for the case is refused. An empty prompt loads the
model, and with a ``keep_alive`` below one second unloads it; both have no output.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from agent.relay.dialects import raw as raws
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.raw import NONE, OFF, inputs_of, size_of, whole
from router_core.record.state import Dialect

NATIVE: Final = Dialect.OLLAMA_CHAT | Dialect.OLLAMA_GENERATE | Dialect.OLLAMA_EMBED
"""Any of Ollama's dialects; also how a question about a model (``/api/show``) is told from work."""

SENSITIVE: Final = frozenset({"model", "name", "prompt", "messages", "keep_alive"})
_DURATION = re.compile(r"([+-]?)((?:(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:ns|us|µs|μs|ms|s|m|h))++|0)")
_PART = re.compile(r"([0-9.]+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION_MOST: Final = 128
"""Characters; a longer one is none that a client means to wait for."""
_SECONDS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}


class _Message(Struct, gc=False):
    content: Raw = NONE
    images: Raw = NONE


class _Options(Struct, gc=False):
    num_predict: Raw = NONE
    num_ctx: Raw = NONE


_body = msgspec.json.Decoder(dict[str, Raw]).decode
_message = raws.decoder(_Message)
_messages = raws.decoder(list[_Message])
_options = raws.decoder(_Options)
_number = raws.decoder(float)


def read(dialect: Dialect, body: bytes | bytearray) -> Facts | BodyFault:
    """The facts of ``body``, or why it is ours to refuse. ``dialect`` ``NATIVE`` reads the model's name alone."""
    try:
        told = _body(body)
    except (msgspec.MsgspecError, RecursionError):
        return BodyFault.BAD_REQUEST
    if any(is_disguised(key) for key in told):
        return BodyFault.BAD_REQUEST
    model, key = raws.text(told.get("model", NONE)), b"model"
    if not model and dialect == NATIVE:
        model, key = raws.text(told.get("name", NONE)), b"name"
    if model is None:
        return BodyFault.MODEL_MISSING
    hints = bytes(told.get("pairmesh", NONE)) or None
    options = _options(told.get("options", NONE)) or _Options()
    num_ctx = whole(options.num_ctx)
    if dialect == NATIVE:
        return Facts(model=model, model_key=key, max_tokens=0, hints=hints)
    if dialect is Dialect.OLLAMA_EMBED:
        given = inputs_of(told.get("input", told.get("prompt", NONE)))
        return Facts(
            model=model,
            text_bytes=given.text_bytes,
            tokens=given.tokens,
            item_bytes=given.longest_bytes,
            item_tokens=given.longest_tokens,
            items=given.items,
            max_tokens=0,
            num_ctx=num_ctx,
            hints=hints,
        )
    size, images, asks = _measure(dialect, told)
    tools = bytes(told.get("tools", NONE))
    if not asks:
        unloads = is_brief(told.get("keep_alive", NONE))
        return Facts(model=model, max_tokens=0, num_ctx=num_ctx, unloads=unloads, hints=hints)
    return Facts(
        model=model,
        stream=bytes(told.get("stream", NONE)) != b"false",
        max_tokens=whole(options.num_predict),
        text_bytes=size + (len(tools) if tools not in OFF else 0),
        images=images,
        num_ctx=num_ctx,
        tools=tools not in OFF,
        json_schema=raws.opening(told.get("format", NONE)) == 0x7B,
        hints=hints,
    )


def _measure(dialect: Dialect, told: dict[str, Raw]) -> tuple[int, int, bool]:
    """Text bytes, pictures, and whether there is a prompt at all."""
    if dialect is Dialect.OLLAMA_GENERATE:
        prompt = size_of(told.get("prompt", NONE))
        return prompt + size_of(told.get("system", NONE)), _count(told.get("images", NONE)), prompt > 0
    raw = told.get("messages", NONE)
    messages = _messages(raw)
    if messages is None and raws.is_list(raw):
        messages = [message_of(each) for each in raws.items(raw) or ()]
    if messages is None:
        size = size_of(raw)
        return size, 0, size > 0
    text, images = measure(messages)
    return text, images, bool(messages)


def message_of(raw: Raw) -> _Message:
    """One message; what is none says nothing."""
    return _message(raw) or _Message()


def measure(messages: Iterable[_Message]) -> tuple[int, int]:
    """Text bytes and pictures."""
    text = images = 0
    for message in messages:
        text += size_of(message.content)
        images += _count(message.images)
    return text, images


def is_disguised(key: str) -> bool:
    """True for a key that is one of those that matter but for the case of its letters."""
    return key not in SENSITIVE and key.casefold() in SENSITIVE


def _count(raw: Raw) -> int:
    found = raws.items(raw)
    return 0 if found is None else len(found)


def is_brief(raw: Raw) -> bool:
    """True for a ``keep_alive`` that Ollama rounds to no seconds at all: a number, or a Go duration in text."""
    number = _number(raw)
    if number is not None:
        return 0 <= number < 1
    text = raws.text(raw)
    told = _DURATION.fullmatch(text) if text is not None else None
    if told is None or text is None:
        return False
    if len(text) > _DURATION_MOST:
        return True
    seconds = sum(float(count) * _SECONDS[unit] for count, unit in _PART.findall(told[2]))
    return seconds < 1 and (told[1] != "-" or seconds == 0)


def error(status: int, code: str, message: str) -> bytes:
    """The body of an error of our own."""
    return msgspec.json.encode({"error": message})


def stream_error(code: str, message: str, *, mid_event: bool) -> bytes:
    """The last line of a stream that broke."""
    return (b"\n" if mid_event else b"") + error(500, code, message) + b"\n"
