"""When an endpoint is left alone, for how long, and how it comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.ids import NodeId
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy
from router_core.router.breaker import Breaker, Breakers, BreakerState

POLICY = ExchangePolicy()
CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


def key(name: str) -> Endpoint:
    return f"node/{name}"


def opened(now: int = 0) -> Breaker:
    breaker = Breaker(POLICY)
    breaker.failed(now, connection_refused=True)
    return breaker


def test_five_faults_in_a_row_open_it_for_five_seconds() -> None:
    breaker = Breaker(POLICY)
    for _ in range(4):
        breaker.failed(0)
    assert breaker.state(0) is CLOSED
    breaker.failed(0)
    assert breaker.state(4_999) is OPEN
    assert breaker.state(5_000) is HALF_OPEN


def test_a_refused_connection_opens_it_at_once() -> None:
    assert opened().state(0) is OPEN


def test_half_of_at_least_five_within_thirty_seconds_opens_it() -> None:
    breaker = Breaker(POLICY)
    for now in (0, 2_000):
        breaker.failed(now)
        breaker.succeeded(now + 1_000)
    assert breaker.state(3_000) is CLOSED
    breaker.failed(4_000)
    assert breaker.state(4_000) is OPEN


def test_faults_older_than_the_window_do_not_count() -> None:
    breaker = Breaker(POLICY)
    for now in (0, 2_000):
        breaker.failed(now)
        breaker.succeeded(now + 1_000)
    breaker.failed(40_000)
    assert breaker.state(40_000) is CLOSED


def test_half_open_takes_one_trial_and_its_success_closes() -> None:
    breaker = opened()
    breaker.dispatched(5_000)
    assert breaker.state(5_000) is OPEN
    breaker.succeeded(5_100)
    assert breaker.state(5_100) is CLOSED
    breaker.failed(6_000, connection_refused=True)
    assert breaker.deadline == 11_000


def test_failed_trials_double_the_rest_up_to_a_minute() -> None:
    breaker, now, rests = opened(), 0, []
    for _ in range(6):
        assert breaker.deadline is not None
        now = breaker.deadline
        breaker.dispatched(now)
        breaker.failed(now)
        rests.append(breaker.deadline - now)
    assert rests == [10_000, 20_000, 40_000, 60_000, 60_000, 60_000]


def test_a_cancelled_trial_leaves_room_for_another() -> None:
    breaker = opened()
    breaker.dispatched(5_000)
    breaker.released()
    assert breaker.state(5_000) is HALF_OPEN


def test_a_late_success_of_an_old_request_does_not_close_it() -> None:
    breaker = opened()
    breaker.succeeded(100)
    assert breaker.state(100) is OPEN


STEPS = st.lists(
    st.tuples(st.sampled_from(("fail", "refuse", "ok", "go", "release")), st.integers(0, 3_000)), max_size=80
)


@pytest.mark.promise("a breaker's deadline never shortens")
@pytest.mark.lesson("BerriAI/litellm#40130: arithmetic of cool-downs")
@given(STEPS)
@settings(max_examples=100, deadline=None)
def test_an_open_breakers_deadline_never_shortens(steps: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(POLICY), 0
    for step, passed in steps:
        now += passed
        before, was = breaker.deadline, breaker.state(now)
        if step == "ok":
            breaker.succeeded(now)
        elif step == "go":
            breaker.dispatched(now)
        elif step == "release":
            breaker.released()
        else:
            breaker.failed(now, connection_refused=step == "refuse")
        if before is not None and breaker.deadline is not None:
            assert breaker.deadline >= before
        if was is OPEN and step in ("fail", "refuse"):
            assert breaker.deadline is not None


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(("fail", "refuse", "ok", "go", "release", "reborn")),
            st.integers(0, 3_000),
        ),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_breakers_count_as_many_as_are_not_closed(steps: list[tuple[str, str, int]]) -> None:
    breakers, now = Breakers(POLICY, limit=2), 0
    for name, step, passed in steps:
        endpoint, now = key(name), now + passed
        if step == "ok":
            breakers.succeeded(endpoint, now)
        elif step == "go":
            breakers.dispatched(endpoint, now)
        elif step == "release":
            breakers.released(endpoint)
        elif step == "reborn":
            breakers.reborn(NodeId("node"))
        else:
            breakers.failed(endpoint, now, connection_refused=step == "refuse")
        assert len(breakers) == sum(breakers.state(key(each), now) is not CLOSED for each in "abc")


def test_endpoints_without_a_fault_are_not_kept_and_the_table_is_bounded() -> None:
    breakers = Breakers(POLICY, limit=2)
    breakers.succeeded(key("a"), 0)
    breakers.dispatched(key("a"), 0)
    breakers.released(key("a"))
    assert len(breakers) == 0
    for now, name in enumerate("abc"):
        breakers.failed(key(name), now, connection_refused=True)
    assert len(breakers) == 2
    assert [breakers.state(key(name), 10) for name in "abc"] == [CLOSED, OPEN, OPEN]
    assert breakers.last_fault_ms(key("c")) == 2


def test_one_callers_failing_body_opens_nothing_however_often_it_is_sent() -> None:
    breakers = Breakers(POLICY)
    for now in range(0, 20_000, 100):
        breakers.erred(key("a"), now, ("local", "/v1/chat/completions", 512), busy=False)
    assert breakers.state(key("a"), 20_000) is CLOSED


def test_an_endpoint_that_fails_everybody_is_left() -> None:
    breakers = Breakers(POLICY)
    for number in range(5):
        assert breakers.state(key("a"), 100 * number) is CLOSED
        breakers.erred(key("a"), 100 * number, ("local", "/", number), busy=False)
    assert breakers.state(key("a"), 400) is OPEN


def test_errors_say_nothing_of_an_endpoint_that_serves_others_meanwhile() -> None:
    served, busy, slow = Breakers(POLICY), Breakers(POLICY), Breakers(POLICY)
    for number in range(20):
        served.erred(key("a"), number, number, busy=False)
        if number % 4 == 3:
            served.succeeded(key("a"), number)
        busy.erred(key("a"), number, number, busy=True)
        slow.erred(key("a"), 8_000 * number, number, busy=False)
    assert [each.state(key("a"), 200_000) for each in (served, busy, slow)] == [CLOSED] * 3


def test_a_trial_that_ends_in_a_server_error_is_a_failed_one() -> None:
    breaker = opened()
    breaker.dispatched(5_000)
    breaker.erred(5_000, "anyone", busy=False)
    assert (breaker.state(14_999), breaker.state(15_000)) == (OPEN, HALF_OPEN)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3_000), st.booleans()), min_size=1, max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_four_requests_open_a_breaker_by_their_errors_alone(
    script: list[tuple[int, int, bool]],
) -> None:
    breaker, now = Breaker(POLICY), 0
    for request, passed, busy in script:
        now += passed
        breaker.erred(now, min(request, 3), busy=busy)
        assert breaker.state(now) is CLOSED
