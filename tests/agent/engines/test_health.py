"""The health of an endpoint as a pure fold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.contract import EndpointHealth, EngineRefusal
from agent.engines.health import FAILURES, SILENT_MS, START_MS, Signs

PERIOD = 2_000


def test_nothing_known_is_unreachable() -> None:
    assert Signs().judge(0, PERIOD) is EndpointHealth.UNREACHABLE


def test_an_engine_seen_a_moment_ago_may_be_starting_but_not_for_ever() -> None:
    signs = Signs().answered(0)
    assert signs.judge(START_MS - 1, PERIOD) is EndpointHealth.STARTING
    assert signs.judge(START_MS, PERIOD) is EndpointHealth.UNREACHABLE


def test_a_list_and_a_recent_look_make_it_ready_and_three_missed_periods_degraded() -> None:
    signs = Signs().listed(0).looked(0)
    assert signs.judge(3 * PERIOD, PERIOD) is EndpointHealth.READY
    assert signs.judge(3 * PERIOD + 1, PERIOD) is EndpointHealth.DEGRADED
    assert Signs().listed(0).judge(1, PERIOD) is EndpointHealth.DEGRADED


def silent(signs: Signs, now: int = 1, in_flight: int = 0) -> Signs:
    for _ in range(FAILURES):
        signs = signs.missed(now, in_flight)
    return signs


def test_one_refused_connection_is_enough_but_silence_takes_three() -> None:
    ready = Signs().listed(0).looked(0)
    assert ready.gone().judge(1, PERIOD) is EndpointHealth.UNREACHABLE
    signs = ready
    for _ in range(FAILURES - 1):
        signs = signs.missed(1)
        assert signs.judge(1, PERIOD) is EndpointHealth.READY
    assert signs.missed(1).judge(1, PERIOD) is EndpointHealth.SILENT


def test_silence_alone_makes_an_engine_gone_after_a_minute_and_never_while_it_holds_requests() -> None:
    signs = silent(Signs().listed(0).looked(0, in_flight=2), now=100, in_flight=2)
    assert signs.judge(100 + SILENT_MS - 1, PERIOD) is EndpointHealth.SILENT
    assert signs.judge(100 + SILENT_MS, PERIOD) is EndpointHealth.UNREACHABLE
    assert signs.judge(100 + 10 * SILENT_MS, PERIOD, in_flight=1) is EndpointHealth.SILENT
    assert signs.answered(99_000).listed(99_000).looked(99_000).judge(99_000, PERIOD) is EndpointHealth.READY


def test_a_missed_answer_counts_only_with_no_more_requests_in_hand_than_it_ever_answered_with() -> None:
    idle = Signs().listed(0).looked(0)
    assert silent(idle, in_flight=1).judge(1, PERIOD, 1) is EndpointHealth.DEAF
    busy = idle.looked(0, in_flight=4)
    assert silent(busy, in_flight=4).judge(1, PERIOD, 4) is EndpointHealth.SILENT
    assert silent(busy, in_flight=5).judge(1, PERIOD, 5) is EndpointHealth.DEAF
    again = busy.gone().listed(9).looked(9)
    assert silent(again, in_flight=1).judge(9, PERIOD, 1) is EndpointHealth.DEAF


def test_an_engine_that_serves_although_it_answered_no_question_is_known_to_be_deaf_from_so_much_work_on() -> (
    None
):
    deaf = silent(Signs().listed(0).looked(0), in_flight=3).served().looked(1)
    assert silent(deaf, in_flight=3).judge(1, PERIOD, 3) is EndpointHealth.READY
    assert silent(deaf, in_flight=9).judge(1, PERIOD, 9) is EndpointHealth.READY
    assert silent(deaf, in_flight=2).judge(1, PERIOD, 2) is EndpointHealth.DEAF
    assert silent(deaf).judge(1, PERIOD) is EndpointHealth.SILENT
    assert silent(deaf.gone().listed(2).looked(2), in_flight=3).judge(2, PERIOD, 3) is EndpointHealth.DEAF


def test_an_answer_or_a_byte_of_its_own_work_in_between_starts_the_count_anew() -> None:
    signs = Signs().listed(0).looked(0)
    for _ in range(10):
        signs = signs.missed(1).missed(1).answered(5)
        signs = signs.missed(1).missed(1).works()
    assert signs.judge(5, PERIOD) is EndpointHealth.READY
    assert silent(signs).works().judge(5, PERIOD) is EndpointHealth.READY


def test_after_a_lost_connection_everything_must_be_seen_again() -> None:
    back = Signs().listed(0).looked(0).gone().answered(10)
    assert back.judge(10, PERIOD) is EndpointHealth.STARTING


def test_a_refused_key_lasts_until_an_identification_succeeds() -> None:
    signs = Signs().listed(0).looked(0).unlisted(0, loading=False, key_refused=True)
    assert signs.looked(1).listed(1).judge(1, PERIOD) is EndpointHealth.UNAUTHORISED
    assert signs.identified(2).listed(2).looked(2).judge(2, PERIOD) is EndpointHealth.READY


def test_loading_is_starting_whatever_was_seen_before() -> None:
    signs = Signs().listed(0).looked(0).unlisted(1, loading=True, key_refused=False)
    assert signs.judge(1, PERIOD) is EndpointHealth.STARTING
    assert signs.listed(2).looked(2).judge(2, PERIOD) is EndpointHealth.READY


Step = st.sampled_from(
    [
        lambda s, now: s.answered(now),
        lambda s, now: s.listed(now),
        lambda s, now: s.looked(now),
        lambda s, now: s.identified(now),
        lambda s, now: s.works(),
        lambda s, now: s.served(),
        lambda s, now: s.missed(now, now % 3),
        lambda s, now: s.looked(now, now % 3),
        lambda s, now: s.gone(),
        lambda s, now: s.unlisted(now, loading=True, key_refused=False),
        lambda s, now: s.unlisted(now, loading=False, key_refused=True),
    ]
)


@settings(max_examples=100)
@given(st.lists(Step, max_size=20), st.integers(0, 100))
def test_requests_are_taken_only_with_a_list_and_never_once_refused(steps: list, refuse_at: int) -> None:  # type: ignore[type-arg]
    signs = Signs()
    for now, step in enumerate(steps):
        signs = step(signs, now)
        if now == refuse_at:
            signs = signs.refused(EngineRefusal.SELF_LOOP)
        health = signs.judge(now, PERIOD)
        if health.takes_requests:
            assert signs.listed_ms is not None
            assert not signs.lost
        if now >= refuse_at:
            assert health is EndpointHealth.REFUSED
