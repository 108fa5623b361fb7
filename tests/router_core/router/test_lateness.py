"""Which endpoints rank worse because they are late or full, and how they come back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.policy.exchange import ExchangePolicy
from router_core.router.lateness import COST, Lateness

POLICY = ExchangePolicy()
HERE, ELSEWHERE = "node/engine", "node/other"


class Sent:
    """An attempt that was sent."""

    def __init__(self, last_byte_ms: float | None = None) -> None:
        self.last_byte_ms = last_byte_ms


def late(count: int) -> tuple[Lateness, list[Sent]]:
    """``count`` overdue attempts at one endpoint, at 10 s."""
    lateness, attempts = Lateness(POLICY), [Sent() for _ in range(count)]
    for attempt in attempts:
        lateness.sent(HERE, attempt)
        lateness.overdue(HERE, attempt, 10_000)
    return lateness, attempts


def test_one_overdue_attempt_costs_and_a_second_one_makes_a_suspect() -> None:
    once, _ = late(1)
    assert (dict(once.costs), once.suspects) == ({HERE: COST}, set())
    twice, attempts = late(2)
    assert (dict(twice.costs), twice.suspects) == ({HERE: COST}, {HERE})
    twice.overdue(HERE, attempts[0], 11_000)
    assert len(twice.suspects) == 1


def test_a_first_byte_or_one_in_mid_answer_clears_it() -> None:
    for how in ("first", "mid"):
        lateness, _ = late(2)
        if how == "first":
            lateness.heard(HERE)
        else:
            flowing = Sent(9_000.0)
            lateness.sent(HERE, flowing)
            lateness.sweep(11_000)
            assert lateness.suspects == {HERE}
            flowing.last_byte_ms = 11_500.0
            lateness.sweep(12_000)
        assert (dict(lateness.costs), lateness.suspects, lateness.is_calm) == ({}, set(), True)


def test_it_lasts_until_a_minute_after_the_last_overdue_attempt_ended() -> None:
    lateness, attempts = late(2)
    lateness.ended(HERE, attempts[0], 20_000)
    lateness.sweep(500_000)
    assert lateness.suspects == {HERE}
    lateness.ended(HERE, attempts[1], 500_000)
    lateness.sweep(559_999)
    assert lateness.suspects == {HERE}
    lateness.sweep(560_000)
    assert lateness.is_calm


def test_who_says_that_it_is_full_costs_until_it_said_it_would_not_be() -> None:
    lateness = Lateness(POLICY)
    lateness.full(HERE, 0)
    lateness.full(ELSEWHERE, 0, 20_000.0)
    lateness.sweep(POLICY.busy_ms)
    assert dict(lateness.costs) == {ELSEWHERE: COST}
    lateness.full(ELSEWHERE, 20_000, 10_000_000.0)
    lateness.sweep(20_000 + POLICY.overdue_kept_ms)
    assert lateness.is_calm


def test_a_stall_in_mid_answer_makes_a_suspect_for_as_long_as_it_lasts() -> None:
    lateness, _ = late(2)
    lateness.sweep(11_000, frozenset({HERE, ELSEWHERE}))
    assert lateness.suspects == {HERE, ELSEWHERE}
    lateness.sweep(12_000)
    assert lateness.suspects == {HERE}


@given(
    st.lists(
        st.tuples(st.sampled_from(("sent", "overdue", "heard", "ended", "full", "sweep")), st.integers(0, 5)),
        max_size=80,
    )
)
@settings(max_examples=100, deadline=None)
def test_when_all_has_ended_and_time_has_passed_nothing_is_left(steps: list[tuple[str, int]]) -> None:
    lateness, now = Lateness(POLICY), 0
    attempts = [Sent() for _ in range(6)]
    for step, number in steps:
        now += 1_000
        endpoint, attempt = (HERE, ELSEWHERE)[number % 2], attempts[number]
        if step == "sent":
            lateness.sent(endpoint, attempt)
        elif step == "overdue":
            lateness.overdue(endpoint, attempt, now)
        elif step == "heard":
            lateness.heard(endpoint)
        elif step == "ended":
            lateness.ended(endpoint, attempt, now)
        elif step == "full":
            lateness.full(endpoint, now)
        else:
            lateness.sweep(now)
        assert lateness.suspects <= set(lateness.costs)
    for number, attempt in enumerate(attempts):
        lateness.ended((HERE, ELSEWHERE)[number % 2], attempt, now)
    lateness.sweep(now + POLICY.overdue_kept_ms)
    assert lateness.is_calm
    assert len(lateness) == 0
