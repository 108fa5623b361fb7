"""Speeds and token counts of one finished response, read from the bytes the relay kept of it.

The relay hands over the first bytes and the last bytes of the body and its own marks; nothing is injected
into a request to learn more. Sources, best first: the ``timings`` object of llama.cpp, the figures on Ollama's
last object, any ``usage`` object (OpenAI and Anthropic spellings), and content events counted on the way. Text
of prompts and answers is skipped, never kept.
"""

import re
from typing import Any, Final, NamedTuple

import msgspec

from agent.engines.contract import FinishReason, ResponseMarks, Timings, TimingSource

HEAD_BYTES = 4 * 1024
TAIL_BYTES = 16 * 1024

_FINISHES: Final[dict[str, FinishReason]] = {
    "stop": FinishReason.STOP,
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "completed": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "incomplete": FinishReason.LENGTH,
    "tool_calls": FinishReason.TOOL,
    "function_call": FinishReason.TOOL,
    "tool_use": FinishReason.TOOL,
}
_NS_PER_MS = 1e6
_NUMBERS: Final = frozenset({int, float})
_ENGINE: Final = TimingSource.ENGINE
_TOLD = re.compile(
    rb'"(?:t(?:imings"|otal_duration")|usage"|error"|done_reason"|finish_reason"\s*:\s*"|s(?:top_reason|tatus)"\s*:\s*")'
)
"""One branch per first letter: most keys are told apart by that alone."""
_LINE_END = re.compile(rb"[\r\n]")
_OBJECT = re.compile(rb'"(timings|usage)"\s*:\s*(?=\{)')
_FINISHED = re.compile(rb'"(?:finish_reason|stop_reason|done_reason)"\s*:\s*"([a-z_]{1,32})"')
_NATIVE = re.compile(
    rb'"((?:total|load|prompt_eval|eval)_duration|(?:prompt_)?eval_count)"\s*:\s*(\d{1,18})\s*[,}]'
)


def read_timings(head: bytes, tail: bytes, marks: ResponseMarks) -> Timings | None:
    """What a complete response taught, or None if it taught nothing.

    ``head`` and ``tail`` are the first and last bytes of the body (equal for a short one). Never raises.
    """
    told = _collect(head, tail)
    finish, streamed = told.finish, marks.content_events is not None
    if told.timings:
        return _from_engine(told.timings, marks, finish, streamed)
    if told.native:
        return _from_native(told.native, finish)
    if told.usage:
        return _from_usage(told.usage, marks, finish, streamed)
    if not marks.content_events:
        return None
    return Timings(
        source=TimingSource.COUNTED,
        gen_tokens=marks.content_events,
        gen_ms=_between(marks.first_content_ms, marks.last_byte_ms),
        finish=finish,
    )


def _from_engine(
    timings: dict[str, Any], marks: ResponseMarks, finish: FinishReason | None, streamed: bool
) -> Timings:
    generated = _count(timings.get("predicted_n"))
    per_second = _positive(timings.get("predicted_per_second"))
    gen_ms = None
    if generated is not None and generated > 1 and per_second is not None:
        gen_ms = 1_000 * (generated - 1) / per_second
    return Timings(
        source=_ENGINE,
        prompt_tokens=_count(timings.get("prompt_n")),
        cached_tokens=_count(timings.get("cache_n")),
        prompt_ms=_positive(timings.get("prompt_ms")),
        gen_tokens=generated,
        gen_ms=gen_ms,
        queue_ms=_between(marks.sent_ms, marks.head_ms) if streamed else None,
        finish=finish,
    )


def _from_native(told: dict[str, Any], finish: FinishReason | None) -> Timings:
    """Ollama's figures. Durations are ns and left out where they are zero."""
    generated = _count(told.get("eval_count"))
    took = _positive(told.get("eval_duration"))
    prompt, load = _positive(told.get("prompt_eval_duration")), _positive(told.get("load_duration"))
    gaps = took * (generated - 1) / generated if took is not None and generated else None
    return Timings(
        source=_ENGINE,
        prompt_tokens=_count(told.get("prompt_eval_count")),
        prompt_ms=prompt / _NS_PER_MS if prompt is not None else None,
        gen_tokens=generated,
        gen_ms=gaps / _NS_PER_MS if gaps else None,
        load_ms=load / _NS_PER_MS if load is not None else None,
        finish=finish,
    )


def _from_usage(
    usage: dict[str, Any], marks: ResponseMarks, finish: FinishReason | None, streamed: bool
) -> Timings:
    prompt, cached = _prompt_of(usage)
    generated = _count(usage.get("completion_tokens", usage.get("output_tokens")))
    return Timings(
        source=_ENGINE,
        prompt_tokens=prompt,
        cached_tokens=cached,
        prompt_ms=_prompt_ms(marks) if streamed else None,
        gen_tokens=generated,
        gen_ms=_between(marks.first_content_ms, marks.last_byte_ms) if streamed else None,
        finish=finish,
    )


def _prompt_ms(marks: ResponseMarks) -> float | None:
    """The time from the head of a stream to its first content, if the engine sends the head when it begins: where most of
    the wait was before the head, that came with the first token, and the time says nothing."""
    computing = _between(marks.head_ms, marks.first_content_ms)
    waited = _between(marks.sent_ms, marks.first_content_ms)
    return computing if computing is not None and waited is not None and 2 * computing >= waited else None


def _prompt_of(usage: dict[str, Any]) -> tuple[int | None, int | None]:
    """(uncached, cached) prompt tokens. OpenAI counts cached tokens in, Anthropic leaves them out."""
    total = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
    apart = _count(usage.get("cache_read_input_tokens"))
    if apart is not None:
        return total, apart
    details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    if total is None or cached is None:
        return total, cached
    return max(0, total - cached), cached


class _Told(NamedTuple):
    """The last ``timings``, the merged ``usage``, Ollama's figures and the last finish reason of a body."""

    timings: dict[str, Any]
    usage: dict[str, Any]
    native: dict[str, Any]
    finish: FinishReason | None


def _collect(head: bytes, tail: bytes) -> _Told:
    timings: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    native: dict[str, Any] = {}
    finish: FinishReason | None = None
    objects = _objects(head, tail)
    if not objects:
        return _search(head, tail)
    for told in objects:
        if isinstance(figures := told.get("timings"), dict):
            timings = figures
        if told.get("done") is True or "total_duration" in told:
            native = told
        for place in (told, told.get("message"), told.get("response")):
            if isinstance(place, dict) and isinstance(used := place.get("usage"), dict):
                if None in used.values():
                    used = {key: value for key, value in used.items() if value is not None}
                usage = {**usage, **used} if usage else used
        finish = _finish_of(told) or finish
    return _Told(timings, usage, native, finish)


def _objects(head: bytes, tail: bytes) -> list[dict[str, Any]]:
    """The JSON objects that hold figures: the body itself if it is one and whole, or events of a stream."""
    is_whole = tail.startswith(head)
    if is_whole and head.startswith(b"{") and (told := _object(tail)) is not None:
        return [told]
    objects = []
    for piece in (tail,) if is_whole else (head, tail):
        done = 0
        while (found := _TOLD.search(piece, done)) is not None:
            start = max(piece.rfind(b"\n", 0, found.start()), piece.rfind(b"\r", 0, found.start())) + 1
            end = _LINE_END.search(piece, found.end())
            done = len(piece) if end is None else end.start()
            raw = piece[start:done].removeprefix(b"data:").strip()
            if raw.startswith(b"{") and (told := _object(raw)) is not None:
                objects.append(told)
    return objects


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _search(head: bytes, tail: bytes) -> _Told:
    """Figures near the ends of a body whose middle is cut out. Quotes inside strings are escaped, so a key
    found this way is a key."""
    found: dict[bytes, dict[str, Any]] = {}
    for match in _OBJECT.finditer(tail):
        end = _end_of_object(tail, match.end())
        if end is not None:
            try:
                found[match[1]] = msgspec.json.decode(tail[match.end() : end])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
    reasons = _FINISHED.findall(tail) or _FINISHED.findall(head)
    finish = _FINISHES.get(reasons[-1].decode("ascii")) if reasons else None
    native: dict[str, Any] = {key.decode("ascii"): int(value) for key, value in _NATIVE.findall(tail)}
    return _Told(found.get(b"timings", {}), found.get(b"usage", {}), native, finish)


def _end_of_object(text: bytes, start: int) -> int | None:
    """End of the flat object of figures at ``start``; one level of nesting, as in token details."""
    depth = 0
    for index in range(start, min(len(text), start + 2_048)):
        depth += (text[index] == ord("{")) - (text[index] == ord("}"))
        if depth == 0:
            return index + 1
    return None


def _finish_of(told: dict[str, Any]) -> FinishReason | None:
    if told.get("error"):
        return FinishReason.ERROR
    choices, delta, response = told.get("choices"), told.get("delta"), told.get("response")
    reason: Any = told.get("stop_reason") or told.get("done_reason")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        reason = choices[0].get("finish_reason")
    elif isinstance(delta, dict):
        reason = delta.get("stop_reason")
    elif isinstance(response, dict):
        reason = response.get("status")
    elif told.get("object") == "response":
        reason = told.get("status")
    return _FINISHES.get(reason) if isinstance(reason, str) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _positive(value: Any) -> float | None:
    return float(value) if type(value) in _NUMBERS and 0 < value < 1e12 else None


def _between(start_ms: float | None, end_ms: float | None) -> float | None:
    return end_ms - start_ms if start_ms is not None and end_ms is not None and end_ms >= start_ms else None
