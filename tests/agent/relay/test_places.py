"""Where an attempt goes, and how long it may be silent before its first byte."""

from typing import Any

from agent.relay.dialects.facts import Facts
from agent.relay.ports import Routed
from agent.relay.upstream.targets import Places, attempt_target
from router_core.policy.exchange import ExchangePolicy
from tests.agent.relay.rig import Fleet, Local, at
from tests.support.routes import a_choice, a_route, an_estimate

POLICY = ExchangePolicy()


def routed(*, output_tokens: int = 100, ttft_ms: float = 500.0, ect_ms: float = 5_500.0) -> Routed:
    """100 tokens expected at 50 ms each, after half a second."""
    est = an_estimate(ttft=ttft_ms / 1000.0, ect=ect_ms / 1000.0)
    return a_route(a_choice("e0", key=at("e0"), output_tokens=output_tokens, est=est))


def overdue_ms(facts: Facts, **over: Any) -> int:
    return attempt_target(POLICY, None, routed(**over), facts).overdue_ms


def test_a_stream_is_overdue_by_its_first_token_and_a_whole_answer_by_its_end() -> None:
    assert overdue_ms(Facts(model="m", stream=True), ttft_ms=6_000.0) == 18_000
    assert overdue_ms(Facts(model="m"), ect_ms=20_000.0) == 60_000
    assert overdue_ms(Facts(model="m"), output_tokens=0, ttft_ms=100.0, ect_ms=100.0) == 10_000


def test_the_owners_limits_are_kept_where_its_endpoint_is_and_none_is_made_up() -> None:
    engine = Local("e0", 1, connect_ms=7, first_byte_ms=120_000, idle_ms=9)
    own = attempt_target(POLICY, engine, routed(), Facts(model="m"))
    assert (own.connect_ms, own.first_byte_ms, own.idle_ms) == (7, 120_000, 9)
    free = attempt_target(POLICY, Local("e0", 1), routed(), Facts(model="m"))
    assert free.first_byte_ms == 0
    away = attempt_target(POLICY, None, a_route(a_choice("e0", node="beta")), Facts(model="m"))
    assert (away.peer, away.first_byte_ms, away.idle_ms) == (True, 0, 0)


def test_a_place_is_that_of_the_endpoint_that_bears_the_name_now() -> None:
    fleet = Fleet()
    places, chosen = Places(fleet), routed()
    assert places.of(chosen) is None
    first = fleet.add(Local("e0", 1_001))
    place = places.of(chosen)
    assert place is not None
    assert (place.engine, place.target.port) == (first, 1_001)
    assert places.of(chosen) is place
    fleet.add(Local("e0", 1_002))
    other = places.of(chosen)
    assert other is not None
    assert other.target.port == 1_002
    del fleet.locals["e0"]
    assert places.of(chosen) is None
