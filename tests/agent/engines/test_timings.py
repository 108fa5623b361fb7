"""Token counts and speeds out of recorded answers."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.engines.contract import FinishReason, ResponseMarks, Timings, TimingSource
from agent.engines.timings import HEAD_BYTES, TAIL_BYTES, read_timings
from tests.support.fakes.replay import Sample

GetSample = Callable[[str], Sample]
WHOLE = ResponseMarks(sent_ms=1_000, head_ms=1_100, first_byte_ms=1_100, last_byte_ms=1_900)
STREAMED = replace(WHOLE, first_content_ms=1_200, content_events=4)


def taught(body: bytes, marks: ResponseMarks) -> Timings | None:
    return read_timings(body[:HEAD_BYTES], body[-TAIL_BYTES:], marks)


def test_llama_timings_of_a_stream(sample: GetSample) -> None:
    told = taught(sample("llama-single-chat-stream-usage").body, STREAMED)
    assert told is not None
    assert (told.source, told.finish, told.gen_tokens) == (TimingSource.ENGINE, FinishReason.LENGTH, 4)
    assert told.prompt_tokens == 1
    assert told.cached_tokens == 27
    assert told.queue_ms == 100


def test_generation_time_is_that_of_the_gaps_whatever_the_build_divides_by(sample: GetSample) -> None:
    now = taught(sample("llama-single-chat").body, WHOLE)
    older = taught(sample("llama-2026-04-chat").body, WHOLE)
    assert now is not None
    assert older is not None
    assert now.gen_ms == pytest.approx(1_000 * 5 / 1644.736842105263)
    assert older.gen_ms == pytest.approx(1_000 * 5 / 1824.2626938279113)
    assert now.queue_ms is None, "without a stream the head comes at the end"


@pytest.mark.parametrize(
    ("name", "prompt", "cached", "generated"),
    [
        ("dynamo-1.6.1-mocker-chat-stream-usage", 22, 0, 4),
        ("vllm-0.32.0-cpu-chat-stream-usage", 22, 0, 4),
        ("transformers-5.19.0-serve-chat-stream-plain", 22, None, 2),
        ("vllm-0.32.0-cpu-messages-stream", 22, 0, 3),
        ("dynamo-1.6.1-mocker-messages-stream", 22, None, 3),
        ("llama-single-messages-stream", 1, 27, 3),
        ("llama-router-messages-stream", 1, 27, 3),
    ],
)
def test_usage_of_every_spelling(
    sample: GetSample, name: str, prompt: int, cached: int | None, generated: int
) -> None:
    told = taught(sample(name).body, STREAMED)
    assert told is not None
    assert (told.prompt_tokens, told.cached_tokens, told.gen_tokens) == (prompt, cached, generated)
    assert (told.prompt_ms, told.gen_ms) == (100, 700)
    assert (told.source, told.finish) == (TimingSource.ENGINE, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("head_ms", "prompt_ms"), [(5.0, 995.0), (500.0, 500.0), (990.0, None), (1_000.0, None)]
)
def test_a_head_that_comes_with_the_first_token_tells_no_prompt_time(
    head_ms: float, prompt_ms: float | None
) -> None:
    """Servers that send the head with the first token would be read as ones that compute a prompt in no time."""
    body = b'data: {"choices":[],"usage":{"prompt_tokens":900,"completion_tokens":20}}\n\n'
    marks = ResponseMarks(
        sent_ms=0.0,
        head_ms=head_ms,
        first_byte_ms=1_000.0,
        first_content_ms=1_000.0,
        last_byte_ms=2_000.0,
        content_events=20,
    )
    told = read_timings(body, body, marks)
    assert told is not None
    assert told.prompt_ms == prompt_ms


def test_usage_alone_gives_no_times_without_a_stream(sample: GetSample) -> None:
    told = taught(sample("llama-cpp-python-0.3.36-chat").body, WHOLE)
    assert told == Timings(
        source=TimingSource.ENGINE, prompt_tokens=27, gen_tokens=6, finish=FinishReason.LENGTH
    )


OLLAMA_WORD = b'{"model":"m","created_at":"t","response":"a ","done":false}\n'
OLLAMA_LAST = (
    b'{"model":"m","created_at":"t","response":"","done":true,"done_reason":"length","context":[%s],'
    b'"total_duration":5000000000,"load_duration":3000000000,"prompt_eval_count":26,'
    b'"prompt_eval_duration":130000000,"eval_count":101,"eval_duration":1010000000}'
)


LONG_CONTEXT = b",".join([b"128000"] * 4_000)


@pytest.mark.parametrize(
    ("before", "context", "finish"),
    [
        (OLLAMA_WORD * 900, b"1,2,3", FinishReason.LENGTH),
        (b"", b"1,2,3", FinishReason.LENGTH),
        (OLLAMA_WORD * 900, LONG_CONTEXT, None),
        (b"", LONG_CONTEXT, FinishReason.LENGTH),
    ],
)
def test_ollamas_last_object_tells_nanoseconds(
    before: bytes, context: bytes, finish: FinishReason | None
) -> None:
    told = taught(before + OLLAMA_LAST % context, STREAMED)
    assert told is not None
    assert (told.source, told.finish) == (TimingSource.ENGINE, finish)
    assert (told.prompt_tokens, told.prompt_ms, told.load_ms) == (26, 130, 3_000)
    assert told.gen_tokens == 101
    assert told.gen_ms == pytest.approx(1_000), "the gaps, not the first token"


def test_what_ollama_leaves_out_for_being_zero_stays_unknown() -> None:
    told = taught(b'{"model":"m","response":"","done":true,"done_reason":"load"}', WHOLE)
    assert told == Timings(source=TimingSource.ENGINE)
    cached = b'{"message":{"content":"a"},"done":true,"done_reason":"stop","eval_count":1,"eval_duration":9}'
    assert taught(cached, WHOLE) == Timings(
        source=TimingSource.ENGINE, gen_tokens=1, finish=FinishReason.STOP
    )
    embedded = b'{"model":"m","embeddings":[[0.5]],"total_duration":14,"load_duration":1000000,"prompt_eval_count":8}'
    assert taught(embedded, WHOLE) == Timings(source=TimingSource.ENGINE, prompt_tokens=8, load_ms=1)


def test_an_error_line_in_an_ollama_stream_is_the_finish() -> None:
    told = taught(OLLAMA_WORD + b'{"error":"the runner has stopped"}\n', replace(STREAMED, content_events=1))
    assert told is not None
    assert (told.finish, told.source) == (FinishReason.ERROR, TimingSource.COUNTED)


def test_with_nothing_told_the_content_events_are_counted(sample: GetSample) -> None:
    told = taught(
        sample("llama-cpp-python-0.3.36-chat-stream-plain").body, replace(STREAMED, content_events=2)
    )
    assert told == Timings(source=TimingSource.COUNTED, gen_tokens=2, gen_ms=700, finish=FinishReason.LENGTH)


def test_nothing_at_all_teaches_nothing() -> None:
    assert taught(b"", WHOLE) is None
    assert taught(b"data: [DONE]\n\n", replace(STREAMED, content_events=0)) is None


def test_figures_are_found_behind_a_body_that_is_too_long_to_keep(sample: GetSample) -> None:
    short = sample("llama-single-chat").body
    start = short.index(b'"content":"') + len(b'"content":"')
    padding = b'\\"timings\\":{\\"predicted_n\\":999} ' * 2_000
    long = short[:start] + padding + short[start:]
    told = taught(long, WHOLE)
    assert told is not None
    assert told.gen_tokens == 6
    assert told.finish is FinishReason.LENGTH


def test_text_that_quotes_figures_is_not_taken_for_them() -> None:
    body = b'{"choices":[{"finish_reason":"stop","message":{"content":"\\"usage\\":{\\"completion_tokens\\":9}"}}]}'
    assert taught(body, WHOLE) is None


def test_an_error_inside_a_stream_is_the_finish() -> None:
    body = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"error":{"message":"gone"}}\n\n'
    told = taught(body, STREAMED)
    assert told is not None
    assert told.finish is FinishReason.ERROR


@pytest.mark.parametrize(
    ("tokens", "ms", "speed"),
    [(127, 10.0, None), (128, 10.0, 12_800.0), (128, None, None), (None, 10.0, None)],
)
def test_a_prompt_speed_needs_enough_uncached_tokens(
    tokens: int | None, ms: float | None, speed: float | None
) -> None:
    told = Timings(source=TimingSource.ENGINE, prompt_tokens=tokens, cached_tokens=5_000, prompt_ms=ms)
    assert told.pp_tps == speed


@pytest.mark.parametrize(("tokens", "ms", "speed"), [(31, 10.0, None), (33, 32.0, 1_000.0), (33, 0.0, None)])
def test_a_generation_speed_needs_enough_tokens(tokens: int, ms: float, speed: float | None) -> None:
    assert Timings(source=TimingSource.ENGINE, gen_tokens=tokens, gen_ms=ms).tg_tps == speed


Foreign = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(
            ["timings", "usage", "choices", "delta", "message", "response", "error", "stop_reason", "done"]
        ),
        Foreign
        | st.dictionaries(
            st.sampled_from(["prompt_n", "predicted_n", "predicted_per_second", "prompt_tokens", "usage"]),
            Foreign,
        ),
    )
)
def test_no_answer_however_strange_breaks_the_reader(tree: dict[str, Any]) -> None:
    body = msgspec.json.encode(tree)
    for raw in (body, b"data: " + body + b"\n\n", body[3:], body[:-2]):
        told = taught(raw, STREAMED)
        for figure in (told.gen_ms, told.prompt_ms, told.gen_tokens, told.prompt_tokens) if told else ():
            assert figure is None or figure >= 0
