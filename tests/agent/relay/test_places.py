"""Where an attempt goes, and how long it may be silent before its first byte."""

import pytest

from agent.relay.dialects.facts import Facts
from agent.relay.places import Places, attempt_target
from agent.relay.ports import Routed
from router_core.policy.exchange import ExchangePolicy
from tests.agent.relay.rig import Fleet, Local, at

POLICY = ExchangePolicy()


def routed(*, output_tokens: int = 100, ttft_ms: float = 500.0, ect_ms: float = 5_500.0) -> Routed:
    """100 tokens expected at 50 ms each, after half a second."""
    return Routed(
        decision_id="d",
        at=at("e0"),
        node=None,
        label="@here/e0",
        endpoint="e0",
        served="m",
        reason="native",
        seq=1,
        inst=1,
        route_seq=1,
        prompt_tokens=10,
        output_tokens=output_tokens,
        request_class="interactive",
        wait_ms=1_000,
        left_ms=600_000,
        resident=True,
        ttft_ms=ttft_ms,
        load_ms=0.0,
        ect_ms=ect_ms,
        service_ms=5_000.0,
    )


def patience_ms(facts: Facts, **over: float) -> int:
    return attempt_target(POLICY, None, routed(**over), facts).first_byte_ms


def test_a_stream_is_waited_for_by_its_first_token() -> None:
    assert patience_ms(Facts(model="m", stream=True), ttft_ms=6_000.0) == 18_000
    assert patience_ms(Facts(model="m", stream=True, max_tokens=100_000), ttft_ms=6_000.0) == 18_000


@pytest.mark.parametrize(
    ("max_tokens", "n", "expected_ms"),
    [
        (100, None, 16_500),
        (1_000, None, 151_500),
        (1_000, 2, 301_500),
        (10, None, 16_500),
        (None, None, 61_500),
    ],
)
def test_a_whole_answer_is_waited_for_by_the_longest_it_may_get(
    max_tokens: int | None, n: int | None, expected_ms: int
) -> None:
    assert patience_ms(Facts(model="m", max_tokens=max_tokens, n=n)) == expected_ms


def test_what_has_no_answer_of_tokens_is_waited_for_as_predicted() -> None:
    assert patience_ms(Facts(model="m"), output_tokens=0, ttft_ms=4_000.0, ect_ms=4_000.0) == 12_000


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
