"""Who waits in the router, who may try next, and what holds for every order of comings, goings and news."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.errors import LocalMisuse
from router_core.placement.filters.eligibility import targets_of
from router_core.placement.queueing.hold import Event, Hold, Joined, Left, NewsCame, Release, Stayed, Waiting
from router_core.placement.request.request import RequestClass
from router_core.policy.placement import PlacementPolicy

POLICY = PlacementPolicy()
INTERACTIVE, BATCH, BACKGROUND = RequestClass


def waiting(ticket: int, **over: Any) -> Waiting:
    fields: dict[str, Any] = {
        "ticket": ticket,
        "request_class": INTERACTIVE,
        "caller": "local",
        "kind": "m",
        "seconds": 1.0,
        "body_bytes": 10,
        "since_ms": 0,
        "deadline_ms": 600_000,
    }
    return Waiting(**(fields | over))


def held(*requests: Waiting, **bounds: int) -> Hold:
    hold = Hold(POLICY, **bounds)
    for one in requests:
        assert hold.handle(Joined(waiting=one), one.since_ms) == []
    return hold


def released(actions: Iterable[Release]) -> list[int]:
    return [action.ticket for action in actions]


def served(hold: Hold, now: int, event: Event | None = None) -> list[int]:
    """Tickets in the order in which they get a place if there is one for each, from ``event`` on."""
    order, actions = [], hold.handle(event or NewsCame(), now)
    while actions:
        (action,) = actions
        order.append(action.ticket)
        actions = hold.handle(Left(ticket=action.ticket), now)
    return order


def test_equal_requests_are_served_in_the_order_in_which_they_came() -> None:
    hold = held(*(waiting(ticket, since_ms=ticket) for ticket in range(5)))
    assert served(hold, 10) == [0, 1, 2, 3, 4]


def test_nothing_is_released_without_news_and_one_at_a_time() -> None:
    hold = held(waiting(1), waiting(2))
    assert released(hold.handle(NewsCame(), 0)) == [1]
    assert hold.handle(NewsCame(), 0) == []
    assert released(hold.handle(Left(ticket=1), 0)) == [2]


def test_who_found_no_place_keeps_its_turn_and_its_kind_is_not_asked_before_other_news() -> None:
    hold = held(waiting(1), waiting(2), waiting(3, kind="other"))
    assert released(hold.handle(NewsCame(), 0)) == [1]
    assert released(hold.handle(Stayed(ticket=1), 0)) == [3]
    assert hold.handle(Stayed(ticket=3), 0) == []
    assert released(hold.handle(NewsCame(), 0)) == [1]


class Kind:
    """A kind like no other; all kinds together count how often one is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Kind.looks += 1
        return id(self)


def test_news_for_nobody_cost_a_few_looks_for_each_who_waits() -> None:
    hold = held(*(waiting(ticket, kind=Kind()) for ticket in range(200)))
    asked, actions = [], hold.handle(NewsCame(), 0)
    while actions:
        asked += released(actions)
        actions = hold.handle(Stayed(ticket=asked[-1]), 0)
    assert asked == list(range(200))
    assert Kind.looks <= 5 * 200


def test_news_that_come_while_somebody_decides_are_not_lost() -> None:
    hold = held(waiting(1))
    hold.handle(NewsCame(), 0)
    hold.handle(NewsCame(), 0)
    assert released(hold.handle(Stayed(ticket=1), 0)) == [1]
    assert hold.handle(Stayed(ticket=1), 0) == []


def test_classes_come_before_callers_and_deadlines() -> None:
    hold = held(
        waiting(1, request_class=BACKGROUND, deadline_ms=1),
        waiting(2, request_class=BATCH, deadline_ms=2),
        waiting(3, deadline_ms=9),
    )
    assert served(hold, 0) == [3, 2, 1]


def test_the_earliest_deadline_of_a_caller_comes_first() -> None:
    hold = held(
        waiting(1, since_ms=1, deadline_ms=9),
        waiting(2, since_ms=2, deadline_ms=3),
        waiting(3, deadline_ms=6),
    )
    assert served(hold, 2) == [2, 3, 1]


def test_every_thirty_seconds_of_waiting_are_worth_a_class() -> None:
    old = waiting(1, request_class=BACKGROUND, deadline_ms=10)
    for now, order in ((59_999, [2, 1]), (60_000, [1, 2])):
        hold = held(old, waiting(2, deadline_ms=20, since_ms=now))
        assert served(hold, now) == order


def test_who_rose_is_served_before_those_of_its_new_class_that_came_after_it() -> None:
    """Else no wait would help against requests of a class that wants its answers sooner."""

    def one(ticket: int, request_class: RequestClass, since_ms: int) -> Waiting:
        deadline_ms = since_ms + targets_of(request_class, POLICY).deadline_ms
        return waiting(ticket, request_class=request_class, since_ms=since_ms, deadline_ms=deadline_ms)

    hold = held(
        one(1, INTERACTIVE, 0),
        one(2, BACKGROUND, 5_000),
        one(3, BATCH, 10_000),
        one(4, INTERACTIVE, 20_000),
        one(5, INTERACTIVE, 39_000),
    )
    for now, order in ((39_999, [1, 4, 5, 2, 3]), (40_000, [1, 3, 4, 5, 2]), (65_000, [1, 2, 3, 4, 5])):
        assert served(copy.deepcopy(hold), now) == order, now


def test_an_own_deadline_counts_whatever_a_class_gives() -> None:
    hurried = waiting(2, request_class=BATCH, deadline_ms=400_000)
    hold = held(waiting(1, deadline_ms=500_000), hurried, waiting(3, deadline_ms=300_000))
    assert served(hold, 30_000) == [3, 2, 1]


def test_a_caller_of_much_work_takes_turns_with_one_of_little() -> None:
    greedy = [waiting(ticket, caller="a", seconds=5.0) for ticket in range(6)]
    modest = [waiting(ticket, caller="b", seconds=5.0) for ticket in range(6, 8)]
    order = served(held(*greedy, *modest), 0)
    assert set(order[:4]) == {0, 1, 6, 7}


def test_a_request_of_any_length_gets_its_turn_in_few_steps() -> None:
    hold = held(waiting(1, caller="a", seconds=1e7), waiting(2, caller="b", seconds=1e7 + 1))
    assert served(hold, 0) == [1, 2]


def test_the_caller_whose_request_is_the_most_urgent_has_the_first_turn() -> None:
    late, soon = waiting(1, caller="a", deadline_ms=9), waiting(2, caller="b", deadline_ms=3)
    assert served(held(late, soon), 0) == served(held(soon, late), 0) == [2, 1]


def test_a_caller_that_has_nothing_waiting_saves_nothing_up() -> None:
    hold = held(waiting(1, caller="a", seconds=0.1), waiting(2, caller="b", seconds=20.0))
    assert served(hold, 0) == [1, 2]
    for ticket in range(3, 13):
        hold.handle(Joined(waiting=waiting(ticket, caller="ab"[ticket % 2], seconds=5.0)), 0)
    order = served(hold, 0)
    assert all({order[i] % 2, order[i + 1] % 2} == {0, 1} for i in range(0, 10, 2))


def test_what_a_caller_did_not_use_of_its_turn_is_gone_when_it_comes_back() -> None:
    hold = held(waiting(0, caller="a", seconds=0.1))
    assert served(hold, 0) == [0]
    for ticket in range(1, 21):
        hold.handle(Joined(waiting=waiting(ticket, caller="ab"[ticket > 10], seconds=1.0)), 0)
    assert served(hold, 0) == [*range(1, 6), *range(11, 16), *range(6, 11), *range(16, 21)]


def test_there_is_room_up_to_the_bounds_and_never_beyond() -> None:
    hold = held(waiting(1, body_bytes=30), waiting(2, body_bytes=60), requests=3, body_bytes=100)
    assert hold.has_room(10)
    assert not hold.has_room(11)
    with pytest.raises(LocalMisuse):
        hold.handle(Joined(waiting=waiting(3, body_bytes=11)), 0)
    hold.handle(Joined(waiting=waiting(3, body_bytes=0)), 0)
    assert not hold.has_room(0)
    hold.handle(Left(ticket=2), 0)
    assert hold.has_room(70)
    assert (len(hold), hold.body_bytes, hold.depth(INTERACTIVE), hold.depth(BATCH)) == (2, 30, 2, 0)


def test_who_left_is_never_released_and_leaving_twice_is_harmless() -> None:
    hold = held(waiting(1), waiting(2))
    hold.handle(NewsCame(), 0)
    hold.handle(Left(ticket=2), 0)
    assert hold.handle(Left(ticket=1), 0) == []
    assert hold.handle(Left(ticket=1), 0) == []
    assert hold.handle(Stayed(ticket=1), 0) == []
    assert (len(hold), hold.body_bytes) == (0, 0)


def test_the_lower_the_class_the_less_of_the_queue_it_may_fill() -> None:
    hold = held(*(waiting(ticket, body_bytes=0) for ticket in range(7)), requests=10, body_bytes=100)
    assert [hold.has_room(0, share) for share in (1.0, 0.9, 0.7)] == [True, True, False]
    assert [hold.has_room(80, share) for share in (1.0, 0.9, 0.7)] == [True, True, False]
    assert [hold.has_room(95, share) for share in (1.0, 0.9, 0.7)] == [True, False, False]


REQUESTS = st.builds(
    waiting,
    ticket=st.just(0),
    request_class=st.sampled_from(list(RequestClass)),
    caller=st.sampled_from("abc"),
    kind=st.sampled_from("mn"),
    seconds=st.floats(0.0, 100.0),
    body_bytes=st.integers(0, 40),
    deadline_ms=st.integers(0, 1_000_000),
)
STEPS = st.lists(
    st.one_of(
        REQUESTS,
        st.tuples(st.just("gone"), st.integers(0, 60)),
        st.just(("news", 0)),
        st.just(("placed", 0)),
        st.just(("stayed", 0)),
    ),
    max_size=80,
)


@given(STEPS, st.integers(0, 20_000))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_nobody_is_lost_or_released_twice_and_the_bounds_hold(
    steps: list[Waiting | tuple[str, int]], pace_ms: int
) -> None:
    hold = Hold(POLICY, requests=8, body_bytes=100)
    inside: dict[int, Waiting] = {}
    out: int | None = None
    now = 0
    for number, step in enumerate(steps):
        now += pace_ms
        actions: list[Release] = []
        if isinstance(step, Waiting):
            one = replace(step, ticket=number)
            if hold.has_room(one.body_bytes):
                actions = hold.handle(Joined(waiting=one), now)
                inside[number] = one
        elif step[0] == "news":
            actions = hold.handle(NewsCame(), now)
        elif step[0] == "gone":
            actions = hold.handle(Left(ticket=step[1]), now)
            inside.pop(step[1], None)
            out = None if out == step[1] else out
        elif out is not None:
            last, out = out, None
            if step[0] == "placed":
                del inside[last]
                actions = hold.handle(Left(ticket=last), now)
            else:
                actions = hold.handle(Stayed(ticket=last), now)
        assert len(hold) == len(inside) <= 8
        assert hold.body_bytes == sum(one.body_bytes for one in inside.values()) <= 100
        for action in actions:
            assert out is None
            assert action.ticket in inside
            out = action.ticket
    rest = [] if out is None else [out, *served(hold, now, Left(ticket=out))]
    assert sorted(rest + served(hold, now)) == sorted(inside)


@pytest.mark.promise("equal callers get equal seconds")
@given(st.lists(st.floats(0.1, 20.0), min_size=8, max_size=40), st.integers(2, 5), st.data())
@settings(max_examples=30, deadline=None)
def test_callers_that_always_have_something_waiting_get_equal_seconds(
    costs: list[float], callers: int, data: st.DataObject
) -> None:
    """P11: over a long time, whatever each request costs, within a tenth."""
    hold, ticket, seconds = Hold(POLICY), 0, [0.0] * callers
    owner: dict[int, tuple[int, float]] = {}
    offsets = [data.draw(st.integers(0, len(costs) - 1)) for _ in range(callers)]

    def join(caller: int) -> None:
        nonlocal ticket
        ticket += 1
        cost = costs[(ticket + offsets[caller]) % len(costs)] * (1 + caller % 2)
        owner[ticket] = caller, cost
        hold.handle(Joined(waiting=waiting(ticket, caller=f"c{caller}", seconds=cost)), 0)

    for caller in range(callers):
        join(caller)
        join(caller)
    actions = hold.handle(NewsCame(), 0)
    while min(seconds) < 1_000.0:
        caller, cost = owner.pop(actions[0].ticket)
        seconds[caller] += cost
        join(caller)
        actions = hold.handle(Left(ticket=actions[0].ticket), 0)
    assert max(seconds) <= 1.1 * min(seconds)
