"""The two spans: for any JSON object only the one value changes and only the one member goes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.dialects import openai, spans
from agent.relay.dialects.facts import BodyFault
from agent.relay.forwarding.body import Parcel
from router_core.record.state import Dialect

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.text(max_size=9) | st.sampled_from(("models", "mode", "model ", '"model"', "a\\", "pairmesh2"))
WHITE = st.text(" \t\r\n", max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """A JSON object with one ``model``, perhaps a ``pairmesh``, in any place, with any white space and escapes."""
    members: list[tuple[str, Any]] = [
        (key, value)
        for key, value in draw(st.dictionaries(KEYS, VALUES, max_size=5)).items()
        if key.lower() not in ("model", "pairmesh")
    ]
    members.insert(draw(st.integers(0, len(members))), ("model", draw(st.text(max_size=12))))
    if draw(st.booleans()):
        value = draw(st.dictionaries(st.sampled_from(("prefer", "model", "x")), VALUES, max_size=2))
        members.insert(draw(st.integers(0, len(members))), ("pairmesh", value))
    ascii_only = draw(st.booleans())
    parts = [
        draw(WHITE)
        + json.dumps(key, ensure_ascii=ascii_only)
        + draw(WHITE)
        + ":"
        + draw(WHITE)
        + json.dumps(value, ensure_ascii=ascii_only)
        + draw(WHITE)
        for key, value in members
    ]
    text = draw(WHITE) + "{" + ",".join(parts) + "}" + draw(WHITE)
    return text.encode("utf-8", "surrogatepass"), dict(members)


@pytest.mark.promise("of a body only two spans ever change")
@given(bodies(), st.text(min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_only_the_models_value_changes_and_only_the_member_goes(
    body_and_told: tuple[bytes, dict[str, Any]], name: str
) -> None:
    body, told = body_and_told
    found = spans.find(body)
    assert not isinstance(found, BodyFault)
    model_at, member_at = found
    assert json.loads(body[model_at[0] : model_at[1]]) == told["model"]
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    changed = json.loads(spans.rewrite(body, model_at, member_at, name))
    assert list(changed) == [key for key in told if key != "pairmesh"]
    assert changed == {key: value for key, value in told.items() if key != "pairmesh"} | {"model": name}
    assert spans.rewrite(body, model_at, None, None) == body


@given(bodies())
@settings(max_examples=60, deadline=None)
def test_a_body_without_hints_is_sent_as_it_came(body_and_told: tuple[bytes, dict[str, Any]]) -> None:
    body, told = body_and_told
    try:
        body.decode()
    except UnicodeDecodeError:
        return
    parcel = Parcel.read(openai.read, Dialect.CHAT, body)
    assert isinstance(parcel, Parcel)
    sent = parcel.as_model(told["model"])
    assert (sent is body) is ("pairmesh" not in told)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","x":1,"mo\\u0064el":"b"}',
        b'{"model":"a","Model":"b"}',
        b'{"MODEL":"b","model":"a"}',
        b'{"model":"a","x":[{"model":"c"}],"mODEl":"b"}',
        b'{"model":"a","\\u004dodel":"b"}',
        b'{"model":"a","\\u004D\\u006fdel":"b"}',
        b'{"pairmesh":1,"model":"a","pairmesh":2}',
        b'{"pairmesh":1,"model":"a","p\\u0061irmesh":2}',
    ],
)
def test_a_key_that_stands_twice_is_refused_however_it_is_spelled(body: bytes) -> None:
    assert Parcel.read(openai.read, Dialect.CHAT, body) is BodyFault.DUPLICATE_KEY


def test_the_same_key_deeper_down_is_no_duplicate() -> None:
    body = b'{"x":{"Model":"q","pairmesh":1},"model":"a","y":[{"model":"r"}],"z":"Model"}'
    parcel = Parcel.read(openai.read, Dialect.CHAT, body)
    assert isinstance(parcel, Parcel)
    renamed = b'{"x":{"Model":"q","pairmesh":1},"model":"b","y":[{"model":"r"}],"z":"Model"}'
    assert parcel.as_model("b") == renamed


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        (b'{"pairmesh":{"a":[1,2]},"model":"m"}', b'{"model":"m"}'),
        (b'{"model":"m","pairmesh":{}}', b'{"model":"m"}'),
        (b'{"model":"m" , "pairmesh" : "x" , "n":1}', b'{"model":"m" ,  "n":1}'),
    ],
)
def test_the_cut_takes_one_adjoining_comma(body: bytes, cut: bytes) -> None:
    parcel = Parcel.read(openai.read, Dialect.CHAT, body)
    assert isinstance(parcel, Parcel)
    assert parcel.as_model("m") == cut
