"""What is read of bodies of Ollama's native routes, and how errors are told there."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.dialects import ollama, openai
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.dialects.ollama import NATIVE
from agent.relay.dialects.relayed import RELAYED, read, tongue_of
from agent.relay.forwarding.body import Parcel
from agent.relay.frontends.codes import CODES, message_of, status_of
from router_core.record.state import Dialect

FOREIGN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SENSITIVE = ("model", "name", "prompt", "messages", "keep_alive", "pairmesh")
CHAT, GENERATE, EMBED = Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE, Dialect.OLLAMA_EMBED


def facts(dialect: Dialect, **told: Any) -> Facts:
    found = ollama.read(dialect, json.dumps({"model": "m"} | told, separators=(",", ":")).encode())
    assert isinstance(found, Facts)
    return found


def say(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("stream", "streams"),
    [({}, True), ({"stream": None}, True), ({"stream": True}, True), ({"stream": False}, False)],
)
def test_a_stream_is_the_default(stream: dict[str, Any], streams: bool) -> None:
    assert facts(GENERATE, prompt="x", **stream).stream is streams
    assert facts(CHAT, messages=[say("x")], **stream).stream is streams
    assert not facts(EMBED, input="x").stream


@pytest.mark.parametrize(
    ("num_predict", "cap"),
    [(7, 7), (-1, None), (-2, None), (0, None), ("7", None), (None, None), (1.5, None)],
)
def test_the_cap_is_num_predict(num_predict: Any, cap: int | None) -> None:
    told = facts(GENERATE, prompt="x", options={"num_predict": num_predict, "num_ctx": 8_192})
    assert (told.max_tokens, told.num_ctx) == (cap, 8_192)


@pytest.mark.parametrize("options", [None, 7, [], "x", {}])
def test_options_that_are_none_read_as_not_told(options: Any) -> None:
    told = facts(CHAT, messages=[say("x")], options=options)
    assert (told.max_tokens, told.num_ctx) == (None, None)


def test_text_is_prompt_system_messages_and_tools() -> None:
    assert facts(GENERATE, prompt="12345", system="123").text_bytes == 8
    tools = [{"type": "function"}]
    told = facts(CHAT, messages=[say("12345"), say("123")], tools=tools)
    assert told.text_bytes == 8 + len(json.dumps(tools, separators=(",", ":")))
    assert told.tools
    assert not facts(CHAT, messages=[say("x")], tools=[]).tools
    assert (facts(EMBED, input=["ab", "c"]).text_bytes, facts(EMBED, input=["ab", "c"]).items) == (3, 2)
    assert (facts(EMBED, prompt="abc").text_bytes, facts(EMBED, prompt="abc").items) == (3, 1)


def test_pictures_are_counted_and_are_no_text() -> None:
    picture = "A" * 1_000
    assert facts(GENERATE, prompt="x", images=[picture, picture]).images == 2
    told = facts(CHAT, messages=[say("x", images=[picture]), say("y"), say("z", images=[picture])])
    assert (told.images, told.text_bytes) == (2, 3)
    odd = facts(CHAT, messages=[say("x", images=[picture]), None, 7])
    assert (odd.images, odd.text_bytes) == (1, 1)


@pytest.mark.parametrize(
    ("wanted", "schema"), [({"type": "object"}, True), ("json", False), ("", False), (None, False)]
)
def test_a_format_that_is_an_object_is_a_schema(wanted: Any, schema: bool) -> None:
    assert facts(GENERATE, prompt="x", format=wanted).json_schema is schema


@pytest.mark.parametrize(
    ("dialect", "told"),
    [
        (GENERATE, {}),
        (GENERATE, {"prompt": ""}),
        (GENERATE, {"prompt": None, "system": "s"}),
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": None}),
    ],
)
def test_an_empty_prompt_is_a_load_without_output(dialect: Dialect, told: dict[str, Any]) -> None:
    found = facts(dialect, options={"num_ctx": 9, "num_predict": 100}, **told)
    assert (found.max_tokens, found.stream, found.num_ctx, found.unloads) == (0, False, 9, False)


BRIEF = [0, 0.0, 0.99, "0", "-0", "+0s", "0s", "999ms", "1us", "5µs", "0.5s", ".5s", "0h0m0s", "0" * 40 + "s"]
LONG = [
    1,
    300,
    -1,
    -0.5,
    1e300,
    "1s",
    "5m",
    "1h30m",
    "-1s",
    "-1ms",
    "1000ms",
    None,
    True,
    "5",
    "soon",
    "",
    [],
    {},
]


@pytest.mark.threat("T44")
@pytest.mark.parametrize(
    ("keep_alive", "unloads"),
    [
        ("1" * 2**20, False),
        ("1" * 2**20 + "x", False),
        ("1h" * 2**19 + "x", False),
        ("0" * 2**20 + "s", True),
        ("1h" * 2**19, True),
        (".1s" * 2**19, True),
    ],
    ids=lambda value: str(value)[:6],
)
def test_a_time_to_stay_of_a_mebibyte_costs_no_more_than_reading_it(keep_alive: str, unloads: bool) -> None:
    """What would be no time at all, or cannot be meant, is refused like any unloading."""
    assert facts(GENERATE, prompt="", keep_alive=keep_alive).unloads is unloads


@pytest.mark.parametrize(
    ("keep_alive", "unloads"), [*((k, True) for k in BRIEF), *((k, False) for k in LONG)]
)
def test_an_empty_prompt_with_less_than_a_second_to_stay_unloads(keep_alive: Any, unloads: bool) -> None:
    assert facts(GENERATE, prompt="", keep_alive=keep_alive).unloads is unloads
    assert facts(CHAT, messages=[], keep_alive=keep_alive).unloads is unloads
    assert not facts(GENERATE, prompt="x", keep_alive=keep_alive).unloads, "it answers first"


@pytest.mark.parametrize(
    "key",
    ["Model", "MODEL", "Prompt", "mEssages", "KEEP_alive", "NAME", "\u212aeep_alive", "me\u017f\u017fages"],
)
@pytest.mark.parametrize("dialect", [CHAT, GENERATE, EMBED, NATIVE])
def test_a_key_that_ollama_would_take_for_another_spelling_is_refused(dialect: Dialect, key: str) -> None:
    body = json.dumps({"model": "m", "prompt": "x", key: ""}).encode()
    assert ollama.read(dialect, body) is BodyFault.BAD_REQUEST


@pytest.mark.parametrize(
    ("body", "key", "model"),
    [
        (b'{"model":"a","name":"b"}', b"model", "a"),
        (b'{"name":"b"}', b"name", "b"),
        (b'{"model":"","name":"b"}', b"name", "b"),
        (b'{"model":null,"name":"b"}', b"name", "b"),
    ],
)
def test_a_question_names_its_model_in_either_member(body: bytes, key: bytes, model: str) -> None:
    found = ollama.read(NATIVE, body)
    assert isinstance(found, Facts)
    assert (found.model_key, found.model) == (key, model)
    parcel = Parcel.read(read, NATIVE, body)
    assert isinstance(parcel, Parcel)
    renamed = json.loads(parcel.as_model("c:latest"))
    assert renamed == json.loads(body) | {key.decode(): "c:latest"}
    assert ollama.read(CHAT, b'{"name":"b"}') is BodyFault.MODEL_MISSING


@given(
    st.dictionaries(
        st.text(max_size=9).filter(lambda key: key.casefold() not in SENSITIVE), FOREIGN, max_size=4
    ),
    st.text(max_size=9),
    st.text(max_size=9),
    st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_only_the_name_changes_of_a_question(
    others: dict[str, Any], name: str, renamed: str, place: int
) -> None:
    members = list(others.items())
    members.insert(place, ("name", name))
    body = msgspec.json.encode(dict(members))
    parcel = Parcel.read(read, NATIVE, body)
    assert isinstance(parcel, Parcel)
    expected = msgspec.json.decode(body) | {"name": renamed}
    assert msgspec.json.decode(parcel.as_model(renamed)) == expected


def test_a_model_named_twice_is_refused() -> None:
    for body in (b'{"name":"a","name":"b"}', b'{"name":"a","na\\u006de":"b"}'):
        assert Parcel.read(read, NATIVE, body) is BodyFault.DUPLICATE_KEY
    assert Parcel.read(read, CHAT, b'{"model":"a","model":"b"}') is BodyFault.DUPLICATE_KEY


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"7", b"{", b"[" * 100_000, b'{"model":7}', b"{}", b'{"model":null}']
)
def test_only_what_is_no_object_or_names_no_model_is_ours_to_refuse(body: bytes) -> None:
    expected = BodyFault.MODEL_MISSING if body.endswith(b"}") else BodyFault.BAD_REQUEST
    for dialect in (CHAT, GENERATE, EMBED, NATIVE):
        assert ollama.read(dialect, body) is expected


FIELDS = (
    "prompt",
    "messages",
    "input",
    "options",
    "keep_alive",
    "stream",
    "images",
    "tools",
    "format",
    "system",
)


@given(st.sampled_from((CHAT, GENERATE, EMBED, NATIVE)), st.dictionaries(st.sampled_from(FIELDS), FOREIGN))
@settings(max_examples=100, deadline=None)
def test_any_odd_value_reads_as_not_told(dialect: Dialect, told: dict[str, Any]) -> None:
    body = msgspec.json.encode({"model": "m"} | told)
    found = ollama.read(dialect, body)
    assert isinstance(found, Facts)
    assert 0 <= found.text_bytes <= len(body)
    assert found.max_tokens is None or found.max_tokens >= 0


# --- telling -------------------------------------------------------------------------------------------------


def test_each_path_is_read_and_answered_in_its_own_family() -> None:
    for path, dialect in RELAYED.items():
        native = path.startswith(b"/api/")
        assert bool(dialect & NATIVE) is native
        assert tongue_of(path) is (ollama if native else openai)
    assert tongue_of(b"/api/nope") is ollama
    assert tongue_of(b"") is openai


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_error_is_one_string(code: str) -> None:
    told = json.loads(ollama.error(status_of(code), code, message_of(code)))
    assert told == {"error": CODES[code][1]}


@pytest.mark.parametrize("mid_event", [False, True])
def test_a_broken_stream_ends_with_a_line_of_its_own(mid_event: bool) -> None:
    sent = b'{"response":"a"}\n{"resp' if mid_event else b'{"response":"a"}\n'
    whole = sent + ollama.stream_error("upstream_lost", "gone", mid_event=mid_event)
    assert whole.endswith(b"\n")
    assert json.loads(whole.splitlines()[-1]) == {"error": "gone"}
