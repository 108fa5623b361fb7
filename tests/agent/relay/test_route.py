"""The headers by which two relays understand each other."""

import pytest
from msgspec.structs import replace

from agent.relay.upstream.route_header import (
    decode_state,
    encode_state,
    format_ahead,
    format_route,
    parse_route,
)
from tests.agent.relay.ingress_rig import ROUTE, STATE


def test_a_route_header_survives_its_own_parser() -> None:
    parsed = parse_route(ROUTE)
    assert parsed is not None
    assert format_route(parsed) == ROUTE
    for wrong in (
        "",
        ROUTE[:-1],
        ROUTE + "0",
        ROUTE.replace("c=i", "c=x"),
        ROUTE.replace("e=e0", "e=../x"),
        " " + ROUTE,
    ):
        assert parse_route(wrong) is None


def test_what_a_router_expects_has_a_header_of_its_own_and_the_route_is_one_that_older_ingresses_know() -> (
    None
):
    plain = parse_route(ROUTE)
    assert plain is not None
    assert (plain.ahead, format_ahead(plain)) == (None, None)
    expecting = replace(plain, ahead=2.0625)
    assert format_route(expecting) == ROUTE
    told = parse_route(format_route(expecting), format_ahead(expecting))
    assert told is not None
    assert told.ahead == pytest.approx(2.0625, abs=0.001)
    assert parse_route(ROUTE, "0") == replace(plain, ahead=0.0)
    for wrong in ("", "-1", "1.0000", "nan", "inf", "1e3", "1234567", "1;2", " 1", "\u0661"):
        assert parse_route(ROUTE, wrong) is None


def test_a_state_header_survives_its_own_parser_and_rejects_junk() -> None:
    assert decode_state(encode_state(*STATE)) == STATE
    for wrong in (b"", b"!!!", b"AAAA", b"A" * 5_000, b"\xff\xfe"):
        assert decode_state(wrong) is None
