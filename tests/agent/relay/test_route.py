"""The headers by which two relays understand each other."""

from agent.relay.route import decode_state, encode_state, format_route, parse_route
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


def test_a_state_header_survives_its_own_parser_and_rejects_junk() -> None:
    assert decode_state(encode_state(*STATE)) == STATE
    for wrong in (b"", b"!!!", b"AAAA", b"A" * 5_000, b"\xff\xfe"):
        assert decode_state(wrong) is None
