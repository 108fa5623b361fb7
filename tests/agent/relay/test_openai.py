"""What is read of a body: counts and flags. What is odd reads as not told."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.dialects import openai
from agent.relay.dialects.facts import BodyFault, Facts
from router_core.record.state import Dialect


def chat(**told: Any) -> Facts:
    facts = openai.read(Dialect.CHAT, json.dumps({"model": "m"} | told, separators=(",", ":")).encode())
    assert isinstance(facts, Facts)
    return facts


def test_text_is_measured_and_pictures_are_counted() -> None:
    facts = chat(
        messages=[
            {"role": "system", "content": "x" * 10},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "y" * 20},
                    {"type": "image_url", "image_url": {"url": "data:" + "z" * 10_000}},
                    {"type": "input_audio", "input_audio": {"data": "z" * 10_000}},
                ],
            },
            {"role": "assistant", "content": None},
        ]
    )
    assert (facts.text_bytes, facts.images, facts.audio_parts) == (30, 1, 1)


@pytest.mark.parametrize("odd", ["said", None, 7, {"type": 7, "image_url": {"url": "data:" + "z" * 10_000}}])
def test_a_picture_is_no_text_beside_whatever_is_odd(odd: Any) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:" + "z" * 10_000}}
    said = 4 if odd == "said" else 0
    for facts in (
        chat(messages=[{"content": [picture, odd]}]),
        chat(messages=[{"content": [picture]}, odd]),
    ):
        assert (facts.text_bytes, facts.images) == (said, 1)


def test_tools_count_as_text_and_as_a_need() -> None:
    tools = [{"type": "function"}]
    facts = chat(tools=tools)
    assert facts.tools
    assert facts.text_bytes == len(json.dumps(tools, separators=(",", ":")))
    assert not chat(tools=[]).tools
    assert not chat(tools=None).tools


@pytest.mark.parametrize(
    ("told", "cap"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_tokens": 0}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": "5"}, None),
        ({"max_tokens": -1}, None),
        ({"max_tokens": 10**30}, None),
        ({}, None),
    ],
)
def test_an_output_cap_is_a_whole_number_or_not_told(told: dict[str, Any], cap: int | None) -> None:
    assert chat(**told).max_tokens == cap


def test_a_completion_ends_after_sixteen_tokens_unless_told() -> None:
    def cap(body: bytes) -> int | None:
        facts = openai.read(Dialect.COMPLETION, body)
        assert isinstance(facts, Facts)
        return facts.max_tokens

    assert cap(b'{"model":"m","prompt":"p"}') == 16
    assert cap(b'{"model":"m","prompt":"p","max_tokens":3}') == 3


@pytest.mark.parametrize(
    ("stream", "expected"), [(True, True), (False, False), (None, False), ("true", False), (1, False)]
)
def test_only_true_streams(stream: object, expected: bool) -> None:
    assert chat(stream=stream).stream is expected


def test_flags_need_a_value_that_says_yes() -> None:
    assert chat(logprobs=True).logprobs
    assert not chat(logprobs=False).logprobs
    assert chat(response_format={"type": "json_schema", "json_schema": {}}).json_schema
    assert not chat(response_format={"type": "json_object"}).json_schema
    assert not chat(response_format="json_schema").json_schema
    assert (chat(n=3).n, chat(n=0).n, chat(n="2").n) == (3, None, None)


@pytest.mark.parametrize(
    ("given_input", "size", "items"),
    [
        ("hello", 5, 1),
        (["a", "bcd"], 4, 2),
        ([1, 2, 3], 0, 1),
        ([[1, 2], [3]], 0, 2),
        (["a", [1, 2]], 1, 2),
        ([{"text": "a"}], 14, 1),
        ([], 0, 0),
        (None, 0, None),
    ],
)
def test_inputs_of_embeddings_are_counted(given_input: object, size: int, items: int | None) -> None:
    body = json.dumps({"model": "m", "input": given_input}, separators=(",", ":")).encode()
    facts = openai.read(Dialect.EMBED, body)
    assert isinstance(facts, Facts)
    assert (facts.text_bytes, facts.items, facts.max_tokens, facts.stream) == (size, items, 0, False)


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "messages",
        "prompt",
        "input",
        "tools",
        "response_format",
        "logprobs",
        "n",
        "pairmesh",
    ]
)


@given(
    st.dictionaries(FIELDS, ODD, max_size=8),
    st.sampled_from((Dialect.CHAT, Dialect.COMPLETION, Dialect.EMBED)),
)
@settings(max_examples=100, deadline=None)
def test_no_oddity_but_the_models_is_ours_to_refuse(told: dict[str, Any], dialect: Dialect) -> None:
    facts = openai.read(dialect, json.dumps({"model": "m"} | told).encode())
    assert isinstance(facts, Facts)
    assert facts.model == "m"


@given(
    st.dictionaries(FIELDS, ODD, max_size=8),
    st.sampled_from((Dialect.CHAT, Dialect.COMPLETION, Dialect.EMBED)),
)
@settings(max_examples=100, deadline=None)
def test_one_odd_field_changes_nothing_of_what_the_others_tell(
    told: dict[str, Any], dialect: Dialect
) -> None:
    plain = json.dumps({"model": "m"} | told | {"n": None}).encode()
    odd = json.dumps({"model": "m"} | told | {"n": "many"}).encode()
    assert openai.read(dialect, odd) == openai.read(dialect, plain)


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_facts_or_a_fault(body: bytes) -> None:
    assert isinstance(openai.read(Dialect.CHAT, body), Facts | BodyFault)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_the_envelope_names_the_kind_of_error(status: int, kind: str) -> None:
    told = json.loads(openai.error(status, "some_code", "words"))
    assert told == {"error": {"message": "words", "type": kind, "param": None, "code": "some_code"}}


# --- what a prompt takes of a context for certain -------------------------------------------------------------


def facts_of(dialect: Dialect, **members: Any) -> Facts:
    facts = openai.read(dialect, json.dumps({"model": "m"} | members).encode())
    assert isinstance(facts, Facts)
    return facts


def test_of_many_items_the_longest_is_told_and_token_numbers_are_counted() -> None:
    texts = facts_of(Dialect.EMBED, input=["x" * 200] * 64)
    assert (texts.text_bytes, texts.tokens, texts.item_bytes, texts.sure_tokens) == (12_800, 0, 200, 0)
    numbers = facts_of(Dialect.EMBED, input=[list(range(300))] * 7 + [[1, 2]])
    assert (numbers.text_bytes, numbers.tokens, numbers.items) == (0, 2_102, 8)
    assert (numbers.item_bytes, numbers.item_tokens, numbers.sure_tokens) == (0, 300, 300)
    one = facts_of(Dialect.EMBED, input=list(range(513)))
    assert (one.tokens, one.item_tokens, one.sure_tokens) == (513, 513, 513)
    prompts = facts_of(Dialect.COMPLETION, prompt=["x" * 32_000, "y" * 16])
    assert (prompts.item_bytes, prompts.sure_tokens) == (32_000, 2_000)
    long = facts_of(Dialect.EMBED, input=["a", "x" * 32_000])
    assert (long.item_bytes, long.sure_tokens) == (32_000, 2_000)


@pytest.mark.parametrize(
    "text",
    ["x" * 2_000, " " * 100_000, "-" * 100_000, "\u4f60" * 2_000, "\n" * 9_000, "|---" * 9_000],
    ids=["short", "spaces", "dashes", "escapes", "lines", "table"],
)
def test_what_few_tokens_may_stand_for_is_no_certain_length(text: str) -> None:
    assert facts_of(Dialect.COMPLETION, prompt=text).sure_tokens <= 625


def test_what_a_template_may_leave_out_is_not_counted_for_certain() -> None:
    said = {"role": "assistant", "content": "x" * 32_000}
    asks = {"role": "user", "content": [{"type": "text", "text": "x" * 16_000}, {"type": "image_url"}]}
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 32_000}}]
    facts = facts_of(Dialect.CHAT, messages=[said, asks], tools=tools)
    assert facts.sure_tokens == 1_000
    assert facts.text_bytes > 80_000


@pytest.mark.parametrize("member", [{"truncate_prompt_tokens": 512}, {"truncate": True}])
def test_a_prompt_that_is_to_be_cut_has_no_certain_length(member: dict[str, Any]) -> None:
    """vLLM and embedding servers cut a prompt where the request says so."""
    assert facts_of(Dialect.EMBED, input="x" * 32_000, **member).sure_tokens == 0
    assert facts_of(Dialect.COMPLETION, prompt="x" * 32_000, **member).sure_tokens == 0
    off = dict.fromkeys(member)
    assert facts_of(Dialect.EMBED, input="x" * 32_000, **off).sure_tokens == 2_000
