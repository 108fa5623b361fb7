"""The facts of a body that is too large, or too intricate, for one typed decode: the same facts, read in short steps.

All keys of the top level are found first, whatever that costs; then the values are looked at, until ``over`` says that
the time of this body is up. From there on sizes come from bytes and the rest reads as not told. Values up to one slice
are read by the very decoders that small bodies are read with.
"""

from collections.abc import Callable, Generator
from typing import Final, TypeVar

from msgspec import Raw, Struct

from agent.relay.dialects import ollama, openai, spans, walk
from agent.relay.dialects import raw as raws
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.raw import NONE, OFF, Inputs, whole
from agent.relay.dialects.walk import SLICE, Broken, JsonMember, Span, Text
from router_core import limits
from router_core.record.state import Dialect

_T = TypeVar("_T")
Steps = Generator[None, None, _T]
"""Reads in short steps, and returns what was read."""

_NAME_MOST: Final = 1_024
"""Bytes of a model's name; a longer one is nobody's, and read so far it is nobody's either."""
_NUMBER_MOST: Final = 64
_OBJECT, _LIST, _TEXT, _NULL = b"{"[0], b"["[0], b'"'[0], b"n"[0]


class Large(Struct, frozen=True, kw_only=True):
    """What was read of a large body: its facts, and where the two spans are that may change."""

    facts: Facts
    model_at: Span
    member_at: Span | None


def read(dialect: Dialect, body: Text, over: Callable[[], bool]) -> Steps[Large | BodyFault]:
    """The facts of ``body``, or why it is ours to refuse."""
    told: list[JsonMember] = []
    try:
        for member in walk.top(body):
            if member is None:
                yield
                continue
            told.append(member)
            if len(told) > limits.BODY_KEYS:
                return BodyFault.BAD_REQUEST
    except Broken:
        return BodyFault.BAD_REQUEST
    native = dialect not in openai.READ
    if native and any(ollama.is_disguised(each.key.decode("utf-8", "replace")) for each in told):
        return BodyFault.BAD_REQUEST
    values = _Values(body, {each.key: each.value for each in told}, over)
    model, key = values.text(b"model"), b"model"
    if not model and dialect == ollama.NATIVE:
        model, key = values.text(b"name"), b"name"
    if model is None:
        return BodyFault.MODEL_MISSING
    located = spans.among(body, told, key)
    if isinstance(located, BodyFault):
        return located
    try:
        facts = yield from (_ollama if native else _openai)(dialect, values, model, key)
    except Broken:
        return BodyFault.BAD_REQUEST
    return Large(facts=facts, model_at=located[0], member_at=located[1])


class _Values:
    """The members of the top level, by key: the last of equal ones counts."""

    def __init__(self, body: Text, told: dict[bytes, Span], over: Callable[[], bool]) -> None:
        self.body = body
        self.told = told
        self.over = over

    def span(self, *keys: bytes) -> Span | None:
        """Where the value of the first of ``keys`` that is there lies."""
        return next((self.told[key] for key in keys if key in self.told), None)

    def raw(self, key: bytes, most: int = SLICE) -> Raw:
        """A value as it stands, as if it were not there if it is longer than ``most``."""
        return self.cut(self.told.get(key), most)

    def cut(self, span: Span | None, most: int = SLICE) -> Raw:
        if span is None or span[1] - span[0] > most:
            return NONE
        return Raw(bytes(self.body[span[0] : span[1]]))

    def text(self, key: bytes) -> str | None:
        """A string; of a very long one the beginning."""
        span = self.told.get(key)
        if span is None or self.body[span[0]] != _TEXT:
            return None
        if span[1] - span[0] <= SLICE:
            return raws.text(self.cut(span))
        return bytes(self.body[span[0] + 1 : span[0] + _NAME_MOST]).decode("utf-8", "replace")

    def begin(self, key: bytes, most: int) -> bytes | None:
        """The first bytes of a value, None if it is not there."""
        span = self.told.get(key)
        return None if span is None else bytes(self.body[span[0] : min(span[1], span[0] + most)])

    def asks(self, key: bytes) -> bool:
        """True if a value is there and asks for something."""
        span = self.told.get(key)
        if span is None:
            return False
        return span[1] - span[0] > 8 or bytes(self.body[span[0] : span[1]]) not in OFF

    def size(self, span: Span | None) -> int:
        """Bytes between the quotes of a string, of the whole value for anything else, 0 if absent or null."""
        if span is None:
            return 0
        start, end = span
        first = self.body[start]
        return end - start - 2 if first == _TEXT else 0 if first == _NULL else end - start

    def is_list(self, span: Span | None) -> bool:
        return span is not None and self.body[span[0]] == _LIST

    def is_object(self, span: Span | None) -> bool:
        return span is not None and self.body[span[0]] == _OBJECT

    def pick(self, span: Span, *keys: bytes) -> Steps[dict[bytes, Span]]:
        """The spans of ``keys`` in the object at ``span``, as far as there is time; none if it is no object."""
        found: dict[bytes, Span] = {}
        if self.is_object(span):
            for member in walk.members(self.body, span[0]):
                if member is not None:
                    if member.key in keys:
                        found[member.key] = member.value
                    continue
                yield
                if self.over():
                    break
        return found

    def count(self, span: Span | None) -> Steps[int]:
        """How many elements a list has; 0 for anything else, and for one that there was no time to count."""
        found = 0
        if span is not None and self.is_list(span) and not self.over():
            for element in walk.elements(self.body, span[0]):
                if element is not None:
                    found += 1
                    continue
                yield
                if self.over():
                    return 0
        return found


def _openai(dialect: Dialect, values: _Values, model: str, key: bytes) -> Steps[Facts]:
    hints = values.begin(b"pairmesh", limits.HINT_HEADERS + 1)
    cuts = values.asks(b"truncate_prompt_tokens") or values.asks(b"truncate")
    if dialect is Dialect.EMBED:
        embedded = yield from _inputs(values, values.span(b"input"))
        return Facts(
            model=model,
            hints=hints,
            text_bytes=embedded.text_bytes,
            items=embedded.items,
            max_tokens=0,
            tokens=embedded.tokens,
            item_bytes=embedded.longest_bytes,
            item_tokens=embedded.longest_tokens,
            sure_tokens=0 if cuts else embedded.sure,
        )
    given: Inputs | None = None
    images = audio = 0
    cap = whole(values.raw(b"max_tokens", _NUMBER_MOST))
    tools = False
    if dialect is Dialect.COMPLETION:
        given = yield from _inputs(values, values.span(b"prompt"))
        size, sure = given.text_bytes, given.sure
        cap = openai.COMPLETION_DEFAULT if cap is None else cap
    else:
        most = whole(values.raw(b"max_completion_tokens", _NUMBER_MOST))
        cap = cap if most is None else most
        size, images, audio, sure = yield from _messages(values, values.span(b"messages"))
        tools = values.asks(b"tools")
        if tools:
            start, end = values.told[b"tools"]
            size += end - start
    return Facts(
        model=model,
        hints=hints,
        stream=bytes(values.raw(b"stream", _NUMBER_MOST)) == b"true",
        n=whole(values.raw(b"n", _NUMBER_MOST), openai.CHOICES_MOST),
        logprobs=values.asks(b"logprobs"),
        json_schema=(yield from _has_schema(values)),
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


def _has_schema(values: _Values) -> Steps[bool]:
    span = values.span(b"response_format")
    if span is None:
        return False
    found = yield from values.pick(span, b"type")
    return raws.text(values.cut(found.get(b"type"), _NUMBER_MOST)) == "json_schema"


def _messages(values: _Values, span: Span | None) -> Steps[tuple[int, int, int, int]]:
    """Text bytes, pictures, audio parts and certain tokens of a list of messages."""
    text = images = audio = sure = 0
    if span is None or not values.is_list(span):
        return values.size(span), 0, 0, 0
    done = span[0]
    for element in walk.elements(values.body, span[0]):
        if element is None:
            yield
            if values.over():
                return text + span[1] - done, images, audio, sure
            continue
        done = element[1]
        if element[1] - element[0] <= SLICE:
            more = openai.measure((openai.message_of(values.cut(element)),))
        else:
            more = yield from _message(values, element)
        text, images, audio, sure = text + more[0], images + more[1], audio + more[2], sure + more[3]
    return text, images, audio, sure


def _message(values: _Values, span: Span) -> Steps[tuple[int, int, int, int]]:
    """Text bytes, pictures, audio parts and certain tokens of one long message."""
    content: Span | None = span
    counts = True
    if values.body[span[0]] != _TEXT:
        found = yield from values.pick(span, b"content", b"role")
        content = found.get(b"content")
        counts = bytes(values.cut(found.get(b"role"), _NUMBER_MOST)) != openai.SPEAKING
    if content is None or not values.is_list(content):
        sure = (yield from _sure(values, content)) if counts else 0
        return values.size(content), 0, 0, sure
    text, images, audio, sure = yield from _parts(values, content)
    return text, images, audio, sure if counts else 0


def _sure(values: _Values, span: Span | None) -> Steps[int]:
    """Tokens that a text has for certain, as far as there is time to look."""
    if span is None or values.body[span[0]] != _TEXT or span[1] - span[0] < raws.SURE_FROM:
        return 0
    dense = 0
    for start in range(span[0] + 1, span[1] - 1, SLICE):
        dense += raws.dense(bytes(values.body[start : min(start + SLICE, span[1] - 1)]))
        yield
        if values.over():
            break
    return raws.sure_tokens(dense)


def _numbers(values: _Values, span: Span) -> Steps[int]:
    """How many token numbers a list has; 0 if it has anything else, or there was no time to count."""
    if span[1] - span[0] <= SLICE:
        return raws.numbers_in(bytes(values.body[span[0] : span[1]]))
    found = 1
    for start in range(span[0] + 1, span[1] - 1, SLICE):
        piece = bytes(values.body[start : min(start + SLICE, span[1] - 1)])
        if not raws.is_numbers(piece) or values.over():
            return 0
        found += piece.count(b",")
        yield
    return found


def _parts(values: _Values, span: Span) -> Steps[tuple[int, int, int, int]]:
    """Text bytes, pictures, audio parts and certain tokens of the parts of one message."""
    text = images = audio = sure = 0
    done = span[0]
    for part in walk.elements(values.body, span[0]):
        if part is None:
            yield
            if values.over():
                return text + span[1] - done, images, audio, sure
            continue
        done = part[1]
        if not values.is_object(part):
            text += values.size(part) if values.body[part[0]] == _TEXT else 0
            continue
        found = yield from values.pick(part, b"type", b"text")
        kind = raws.text(values.cut(found[b"type"], _NUMBER_MOST)) if b"type" in found else ""
        if kind == "image_url":
            images += 1
        elif kind == "input_audio":
            audio += 1
        elif kind is not None:
            text += values.size(found.get(b"text"))
            sure += yield from _sure(values, found.get(b"text"))
    return text, images, audio, sure


def _inputs(values: _Values, span: Span | None) -> Steps[Inputs]:
    """One string, a list of them, token numbers, or a list of such lists."""
    if span is None or not values.is_list(span):
        size = values.size(span)
        if span is None or values.body[span[0]] != _TEXT:
            return Inputs(text_bytes=size, longest_bytes=size)
        return Inputs(text_bytes=size, items=1, longest_bytes=size, sure=(yield from _sure(values, span)))
    size = tokens = count = most = most_tokens = sure = 0
    done = span[0]
    for item in walk.elements(values.body, span[0]):
        if item is None:
            yield
            if values.over():
                size += span[1] - done
                return Inputs(text_bytes=size, tokens=tokens, longest_bytes=most, longest_tokens=most_tokens)
            continue
        done = item[1]
        is_one = not count and values.body[item[0]] not in (_TEXT, _LIST)
        if is_one:
            item = span
        count += 1
        numbers = (yield from _numbers(values, item)) if values.is_list(item) else 0
        tokens, most_tokens = tokens + numbers, max(most_tokens, numbers)
        if not numbers:
            length = values.size(item)
            size += length
            if length > most:
                most, sure = length, max(sure, (yield from _sure(values, item)))
        if is_one:
            break
    return Inputs(
        text_bytes=size,
        tokens=tokens,
        items=count,
        longest_bytes=most,
        longest_tokens=most_tokens,
        sure=max(sure, most_tokens),
    )


def _ollama(dialect: Dialect, values: _Values, model: str, key: bytes) -> Steps[Facts]:
    hints = values.begin(b"pairmesh", limits.HINT_HEADERS + 1)
    if dialect == ollama.NATIVE:
        return Facts(model=model, model_key=key, max_tokens=0, hints=hints)
    options = values.span(b"options")
    told = {} if options is None else (yield from values.pick(options, b"num_predict", b"num_ctx"))
    num_ctx = whole(values.cut(told.get(b"num_ctx"), _NUMBER_MOST))
    if dialect is Dialect.OLLAMA_EMBED:
        given = yield from _inputs(values, values.span(b"input", b"prompt"))
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
    if dialect is Dialect.OLLAMA_GENERATE:
        prompt = values.size(values.span(b"prompt"))
        size, asks = prompt + values.size(values.span(b"system")), prompt > 0
        images = yield from values.count(values.span(b"images"))
    else:
        size, images, asks = yield from _native_messages(values, values.span(b"messages"))
    if not asks:
        unloads = ollama.is_brief(values.raw(b"keep_alive"))
        return Facts(model=model, max_tokens=0, num_ctx=num_ctx, unloads=unloads, hints=hints)
    tools = values.asks(b"tools")
    start, end = values.told[b"tools"] if tools else (0, 0)
    return Facts(
        model=model,
        stream=bytes(values.raw(b"stream", _NUMBER_MOST)) != b"false",
        max_tokens=whole(values.cut(told.get(b"num_predict"), _NUMBER_MOST)),
        text_bytes=size + end - start,
        images=images,
        num_ctx=num_ctx,
        tools=tools,
        json_schema=values.is_object(values.span(b"format")),
        hints=hints,
    )


def _native_messages(values: _Values, span: Span | None) -> Steps[tuple[int, int, bool]]:
    """Text bytes and pictures of Ollama's messages, and whether there are any."""
    if span is None or not values.is_list(span):
        size = values.size(span)
        return size, 0, size > 0
    text = images = 0
    asks = False
    done = span[0]
    for element in walk.elements(values.body, span[0]):
        if element is None:
            yield
            if values.over():
                return text + span[1] - done, images, True
            continue
        asks, done = True, element[1]
        if element[1] - element[0] <= SLICE:
            more = ollama.measure((ollama.message_of(values.cut(element)),))
            text, images = text + more[0], images + more[1]
            continue
        found = yield from values.pick(element, b"content", b"images")
        text += values.size(found.get(b"content"))
        images += yield from values.count(found.get(b"images"))
    return text, images, asks
