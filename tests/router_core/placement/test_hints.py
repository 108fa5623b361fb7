"""The grammar of hints: what is understood, what is ignored, what refuses the request."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.ids import node_id_of
from router_core.placement.reasons import HintOutcome
from router_core.placement.request.hints import Grants, HintFault, parse_hints, parse_ref
from router_core.placement.request.request import Hints, Locality, Match, RequestClass
from router_core.record.state import Capability
from tests.support.fleets import id32

NODE_ID = node_id_of(id32("a"))


def parsed(*headers: tuple[str, str], body: object = None, **more: Any) -> Hints:
    hints = parse_hints(headers, None if body is None else json.dumps(body).encode(), **more)
    assert isinstance(hints, Hints), hints
    return hints


def outcomes(hints: Hints) -> list[tuple[str, HintOutcome]]:
    return [(note.hint, note.outcome) for note in hints.notes]


def test_a_request_without_hints_has_the_defaults() -> None:
    assert parse_hints([("content-type", "application/json")]) == Hints()


def test_every_header_is_read() -> None:
    hints = parsed(
        ("x-pairmesh-prefer", f"@desk/ollama, {NODE_ID}"),
        (
            "x-pairmesh-require",
            "node=@desk,!engine=vllm,cap=tools,cap=vision,label=room:attic,ctx>=8192,params>=7.5,bits>=4.5",
        ),
        ("x-pairmesh-locality", "host"),
        ("x-pairmesh-class", "batch"),
        ("x-pairmesh-slo-ttft-ms", "1500"),
        ("x-pairmesh-slo-tpot-ms", "40"),
        ("x-pairmesh-deadline-ms", "90000"),
        ("x-pairmesh-expect-tokens", "0"),
    )
    assert [ref.text for ref in hints.prefer] == ["@desk/ollama", NODE_ID]
    assert hints.prefer[0].endpoint == "ollama"
    assert [ref.name for ref in hints.requires_node] == ["desk"]
    assert hints.refuses_engine == ("vllm",)
    assert hints.requires_label == (("room", "attic"),)
    assert hints.requires_caps == Capability.TOOLS | Capability.VISION
    assert (hints.ctx_least, hints.params_least_m, hints.bits_least) == (8192, 7500, 4.5)
    assert hints.locality is Locality.HOST
    assert hints.request_class is RequestClass.BATCH
    assert (hints.slo_ttft_ms, hints.slo_tpot_ms, hints.deadline_ms) == (1500, 40, 90_000)
    assert hints.expect_tokens == 0
    assert hints.notes == ()


def test_the_body_says_the_same_and_a_header_beats_it() -> None:
    hints = parsed(
        ("x-pairmesh-class", "background"),
        body={"class": "batch", "prefer": "@desk", "expect_tokens": 7, "session": "abc"},
    )
    assert hints.request_class is RequestClass.BACKGROUND
    assert [ref.name for ref in hints.prefer] == ["desk"]
    assert hints.expect_tokens == 7
    assert hints.session == "abc"


def test_a_repeated_list_is_joined_and_a_repeated_scalar_is_malformed() -> None:
    hints = parsed(
        ("x-pairmesh-prefer", "@one"),
        ("x-pairmesh-prefer", "@two"),
        ("x-pairmesh-class", "batch"),
        ("x-pairmesh-class", "batch"),
    )
    assert [ref.name for ref in hints.prefer] == ["one", "two"]
    assert hints.request_class is RequestClass.INTERACTIVE
    assert outcomes(hints) == [("class", HintOutcome.IGNORED_MALFORMED)]


@pytest.mark.parametrize(
    "term",
    [
        "node=", "node=desk", "node>=@desk", "node=@desk,", "nodes=@desk", "cap=flying", "!cap=tools", "ctx=4096",
        "ctx>=-1", "!ctx>=1", "label=room", "engine=OLLAMA", "bits>=four", "@desk", "", ",".join(["cap=tools"] * 17),
    ],
)  # fmt: skip
def test_a_malformed_requirement_refuses_the_request(term: str) -> None:
    fault = parse_hints([("x-pairmesh-require", term)])
    assert isinstance(fault, HintFault)
    assert fault.hint == "require"
    assert term == "" or term not in fault.detail


@pytest.mark.parametrize("value", ["here", "HOST", "", "mesh,host"])
def test_a_malformed_locality_refuses_the_request(value: str) -> None:
    assert isinstance(parse_hints([("x-pairmesh-locality", value)]), HintFault)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("prefer", "desk"), ("prefer", ",".join(["@a"] * 9)), ("prefer", "@a,,@b"), ("class", "urgent"),
        ("match", "loose"), ("slo-ttft-ms", "0"), ("slo-ttft-ms", "3600001"), ("slo-tpot-ms", "fast"),
        ("slo-tpot-ms", "0"), ("slo-tpot-ms", "60001"), ("deadline-ms", "0"), ("deadline-ms", "3600001"),
        ("deadline-ms", "1.5"), ("expect-tokens", "-1"), ("expect-tokens", "1000001"),
    ],
)  # fmt: skip
def test_a_malformed_advisory_hint_is_ignored_and_noted(header: str, value: str) -> None:
    hints = parsed((f"x-pairmesh-{header}", value))
    assert [note.outcome for note in hints.notes] == [HintOutcome.IGNORED_MALFORMED]
    assert hints.prefer == ()
    assert hints.match is Match.EXACT
    assert value not in repr(hints.notes)


def test_every_range_includes_its_ends() -> None:
    assert parsed(("x-pairmesh-slo-ttft-ms", "3600000"), ("x-pairmesh-slo-tpot-ms", "60000")).notes == ()
    assert parsed(("x-pairmesh-deadline-ms", "3600000"), ("x-pairmesh-expect-tokens", "1000000")).notes == ()
    assert parsed(("x-pairmesh-slo-ttft-ms", "1"), ("x-pairmesh-slo-tpot-ms", "1")).notes == ()
    assert parsed(("x-pairmesh-deadline-ms", "1"), ("x-pairmesh-prefer", ",".join(["@a"] * 8))).notes == ()
    assert len(parsed(("x-pairmesh-require", ",".join(["node=@a"] * 16))).requires_node) == 16


def test_a_label_is_found_up_to_the_lengths_that_a_manifest_may_write() -> None:
    key, value = "k" * 32, "v" * 32
    assert parsed(("x-pairmesh-require", f"label={key}:{value}")).requires_label == ((key, value),)
    for longer in (f"{key}k:{value}", f"{key}:{value}v"):
        assert isinstance(parse_hints([("x-pairmesh-require", f"label={longer}")]), HintFault)


def test_of_floors_told_twice_the_higher_holds_and_a_fraction_of_a_token_is_a_whole_one() -> None:
    hints = parsed(("x-pairmesh-require", "ctx>=4096.2,ctx>=100,bits>=3,bits>=4.5,params>=7,params>=0.5"))
    assert (hints.ctx_least, hints.params_least_m, hints.bits_least) == (4097, 7000, 4.5)


def test_unknown_keys_are_ignored_and_counted_without_their_names() -> None:
    hints = parsed(("x-pairmesh-colour", "red"), body={"secret-key": "x"})
    assert outcomes(hints) == [
        ("pairmesh", HintOutcome.IGNORED_UNKNOWN),
        ("header", HintOutcome.IGNORED_UNKNOWN),
    ]
    assert "secret-key" not in repr(hints)


def test_however_many_are_unknown_the_reply_tells_it_once() -> None:
    body = {f"k{number}": 0 for number in range(300)}
    hints = parsed(*((f"x-pairmesh-{name}", "") for name in "abcdefgh"), body=body)
    assert outcomes(hints) == [
        ("pairmesh", HintOutcome.IGNORED_UNKNOWN),
        ("header", HintOutcome.IGNORED_UNKNOWN),
    ]


def test_transport_headers_of_the_mesh_are_no_hints() -> None:
    assert parsed(("x-pairmesh-route", "v=1"), ("x-pairmesh-state", "abc")) == Hints()


@pytest.mark.parametrize("body", [b"[]", b"nope", b'"prefer"', b"{" + b" " * 4096 + b"}", b"[" * 3000])
def test_a_body_object_that_cannot_be_read_refuses_the_request(body: bytes) -> None:
    assert isinstance(parse_hints([], body), HintFault)


def test_a_body_object_of_null_says_nothing() -> None:
    assert parse_hints([], b"null") == Hints()


def test_hint_headers_at_the_limit_are_read_and_one_byte_more_refuses_the_request() -> None:
    name, other = "x-pairmesh-prefer", ("x-pairmesh-class", "batch")
    room = 4096 - len(name) - sum(map(len, other)) - len("@a")
    full = parse_hints([(name, "@a" + " " * room), other])
    assert isinstance(full, Hints)
    assert [ref.name for ref in full.prefer] == ["a"]
    fault = parse_hints([(name, "@a" + " " * (room + 1)), other])
    assert isinstance(fault, HintFault)
    assert fault.hint == "headers"


def test_a_body_object_at_the_limit_is_read_and_one_byte_more_refuses_the_request() -> None:
    told = b'{"class":"batch"'
    assert isinstance(parse_hints([], told + b" " * (4095 - len(told)) + b"}"), Hints)
    fault = parse_hints([], told + b" " * (4096 - len(told)) + b"}")
    assert isinstance(fault, HintFault)
    assert fault.hint == "pairmesh"


@pytest.mark.parametrize("key", ["locality", "require"])
def test_a_narrowing_key_that_stands_twice_in_the_body_refuses_the_request(key: str) -> None:
    for first, second in (("host", "any"), ("any", "host"), ("host", "host"), ("host", None)):
        body = f'{{"{key}": {json.dumps(first)}, "{key}": {json.dumps(second)}}}'
        fault = parse_hints([], body.encode())
        assert isinstance(fault, HintFault)
        assert fault.hint == key


def test_a_header_beats_what_stands_twice_in_the_body() -> None:
    twice = b'{"locality":"any","locality":"mesh"}'
    hints = parse_hints([("x-pairmesh-locality", "host")], twice)
    assert isinstance(hints, Hints)
    assert hints.locality is Locality.HOST


def test_advice_that_stands_twice_in_the_body_is_left_out() -> None:
    hints = parse_hints([], b'{"class":"batch","class":"batch","session":"a","session":"a","x":1,"x":2}')
    assert isinstance(hints, Hints)
    assert (hints.request_class, hints.session) == (RequestClass.INTERACTIVE, None)
    assert outcomes(hints) == [
        ("pairmesh", HintOutcome.IGNORED_UNKNOWN),
        ("class", HintOutcome.IGNORED_MALFORMED),
        ("session", HintOutcome.IGNORED_MALFORMED),
    ]


def test_wrong_types_in_the_body_are_malformed() -> None:
    hints = parsed(body={"prefer": ["@desk"], "expect_tokens": True, "class": 3, "deadline_ms": None})
    assert {note.hint for note in hints.notes} == {"prefer", "expect_tokens", "class"}
    assert isinstance(parse_hints([], b'{"require": ["node=@desk"]}'), HintFault)


def test_a_caller_gets_no_more_than_it_was_granted() -> None:
    grants = Grants(
        prefer=False, class_cap=RequestClass.BATCH, locality_cap=Locality.HOST, match_cap=Match.QUANT
    )
    hints = parsed(("x-pairmesh-prefer", "@desk"), ("x-pairmesh-match", "any"), grants=grants)
    assert hints.prefer == ()
    assert hints.match is Match.QUANT
    assert hints.request_class is RequestClass.BATCH
    assert hints.locality is Locality.HOST
    assert ("prefer", HintOutcome.IGNORED_UNAUTHORISED) in outcomes(hints)
    assert ("class", HintOutcome.CLAMPED) in outcomes(hints)


def test_the_local_caller_may_ask_for_anything_the_policy_permits() -> None:
    hints = parsed(("x-pairmesh-locality", "any"), ("x-pairmesh-match", "any"))
    assert (hints.locality, hints.match) == (Locality.ANY, Match.ANY)
    assert outcomes(hints) == []


def test_session_comes_from_its_header_then_named_ones_then_the_body() -> None:
    own, named = ("x-session-id", "own"), ("x-claude-code-session-id", "named")
    names = ("x-claude-code-session-id",)
    assert parsed(named, own, session_headers=names).session == "own"
    assert parsed(own, named, session_headers=names).session == "own"
    assert parsed(named, session_headers=names, body={"session": "body"}).session == "named"
    assert parsed(body={"session": "body"}).session == "body"
    for unfit in (
        parsed(("x-session-id", "has space"), named, session_headers=names),
        parsed(("x-session-id", ""), body={"session": "body"}),
        parsed(own, own, named, session_headers=names),
        parsed(("x-session-id", "x" * 129)),
        parsed(body={"session": 7}),
    ):
        assert unfit.session is None
        assert outcomes(unfit) == [("session", HintOutcome.IGNORED_MALFORMED)]


@pytest.mark.parametrize(
    "text",
    [
        "desk",
        "@",
        "@Desk",
        "@desk/",
        "@desk/Ollama",
        NODE_ID[:-1],
        NODE_ID + "a",
        "@a/b/c",
        "@desk~",
        "@desk~abc",
    ],
)
def test_a_reference_is_a_full_id_or_a_name(text: str) -> None:
    assert parse_ref(text) is None


def test_a_shared_name_may_be_marked() -> None:
    ref = parse_ref("@desk~abcd/ollama")
    assert ref is not None
    assert (ref.name, ref.mark, ref.endpoint, ref.node_id) == ("desk", "abcd", "ollama", None)


_NAMES = st.sampled_from(
    ["prefer", "require", "match", "locality", "class", "slo-ttft-ms", "deadline-ms", "expect-tokens", "zzz"]
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(_NAMES.map("x-pairmesh-".__add__), st.text(max_size=40)), max_size=6),
    st.one_of(st.none(), st.binary(max_size=60)),
)
def test_anything_a_client_sends_gives_hints_or_a_fault(
    headers: list[tuple[str, str]], body: bytes | None
) -> None:
    hints = parse_hints(headers, body)
    assert isinstance(hints, Hints | HintFault)
    if isinstance(hints, Hints):
        assert len(hints.prefer) <= 8
        granted = parse_hints(
            headers, body, Grants(locality_cap=Locality.HOST, match_cap=Match.QUANT, prefer=False)
        )
        assert isinstance(granted, Hints)
        assert granted.locality is Locality.HOST
        assert granted.match in (Match.EXACT, Match.QUANT)
        assert granted.prefer == ()
