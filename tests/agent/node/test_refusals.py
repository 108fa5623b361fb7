"""A refusal names what is lacking, what is allowed and who says so, and repeats nothing of the request."""

from typing import Any

import pytest

from agent.node.routing.answers import turned
from router_core.placement.candidates.candidate import Row
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.request import Locality
from router_core.record.state import Capability, Dialect
from tests.support.fleets import GIB, POLICY, a_fleet, a_request, a_row, decided, parsed_hints


def words(*rows: Row, **request: Any) -> str:
    told = turned(decided(a_request(**request), a_fleet(*rows)), None)
    assert told.words is not None, told
    return told.words


NO_PICTURES = {"cap_no": int(Capability.VISION)}
NO_TOOLS = {"cap_no": int(Capability.TOOLS)}


def test_a_capability_is_told_by_its_name() -> None:
    need = "no endpoint of this model supports "
    vision = Capability.VISION
    assert words(a_row("a", **NO_PICTURES), requires=vision) == need + "vision"
    both = words(a_row("a", **NO_PICTURES), a_row("b", **NO_TOOLS), requires=vision | Capability.TOOLS)
    assert both.startswith(f"{need}all of ")
    assert set(both.removeprefix(f"{need}all of ").split(", ")) == {"vision", "tools"}
    explicit = words(a_row("a"), hints=parsed_hints(require="cap=tools"))
    assert explicit == f"{need}tools (x-pairmesh-require: cap=tools must be known to hold)"
    assert "params>= and bits>=" in words(a_row("a"), hints=parsed_hints(require="params>=70"))


def test_a_dialect_that_the_engines_do_not_speak_is_told_with_the_routes_that_they_do() -> None:
    told = words(a_row("a", dialects=int(Dialect.CHAT | Dialect.EMBED)), dialect=Dialect.OLLAMA_CHAT)
    assert "do not speak ollama_chat" in told
    assert told.endswith("it is served on /v1/chat/completions, /v1/embeddings")


def test_a_context_is_told_as_clients_look_for_it() -> None:
    rows = a_row("a", ctx=2_048), a_row("b", ctx=4_096)
    told = words(*rows, sure_tokens=5_000)
    assert told.startswith("This model's maximum context length is 4096 tokens.")
    assert "5000" in told
    demanded = words(*rows, hints=parsed_hints(require="ctx>=8192"))
    assert demanded.startswith("This model's maximum context length is 4096 tokens.")
    assert "ctx>=8192 is demanded by x-pairmesh-require" in demanded


def test_unmet_terms_are_told_by_their_keys_alone() -> None:
    told = words(a_row("a"), hints=parsed_hints(require="node=@secret,label=room:hidden"))
    assert told == "no endpoint of this model matches x-pairmesh-require: unmet are label, node"


def test_a_locality_is_told_with_who_says_so() -> None:
    elsewhere = words(a_row("a"), hints=parsed_hints(locality="host"))
    assert "within locality host, which x-pairmesh-locality allows" in elsewhere
    outside = words(a_row("a", cloud=True))
    assert "x-pairmesh-locality: any" in outside
    assert "spill.cap" in outside
    assert POLICY.spill_cap is Locality.MESH


def test_weights_that_fit_nowhere_are_told_in_numbers() -> None:
    told = words(
        a_row("a", resident=False, weight_bytes=20 * GIB, reach_bytes=12.0 * GIB),
        a_row("b", resident=False, weight_bytes=20 * GIB, reach_bytes=16.0 * GIB),
    )
    assert "20.0 GiB" in told
    assert "16.0 GiB" in told


@pytest.mark.parametrize(
    ("header", "value", "where", "says"),
    [
        ("require", "cap=canary", "x-pairmesh-require", "cap takes one of"),
        ("require", "canary=1", "x-pairmesh-require", "node engine label cap"),
        ("require", "ctx>=canary", "x-pairmesh-require", "ctx takes >= and a number"),
        ("require", "node=canary", "x-pairmesh-require", "@NAME"),
        ("require", "label=canary", "x-pairmesh-require", "KEY:VALUE"),
        ("require", "cap=tools,canary", "x-pairmesh-require", "term 2"),
        ("locality", "canary", "x-pairmesh-locality", "host mesh any"),
    ],
)
def test_a_hint_that_is_not_understood_is_told_by_header_term_and_what_is_allowed(
    header: str, value: str, where: str, says: str
) -> None:
    fault = parse_hints([(f"x-pairmesh-{header}", value)])
    assert isinstance(fault, HintFault)
    assert fault.where == where
    assert says in fault.detail
    assert "canary" not in fault.detail
    in_body = parse_hints([], b'{"%s": "%s"}' % (header.encode(), value.encode()))
    assert isinstance(in_body, HintFault)
    assert (in_body.where, in_body.detail) == (f"pairmesh.{header}", fault.detail)
