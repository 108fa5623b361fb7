"""What becomes of requests that find no room: ceilings by class, holding, shedding, and honest refusals."""

from typing import Any

from msgspec.structs import replace

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.ingress import IngressAsk, admit
from router_core.placement.decision.replay import replay
from router_core.placement.ledger import Ledger
from router_core.placement.queueing.hold import waiting_of
from router_core.placement.reasons import Action, Cause, Reason
from router_core.placement.request.request import Hints, PlacementRequest, RequestClass
from tests.support.fleets import (
    ALL_DIALECTS,
    NOW,
    POLICY,
    a_choice,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    decided,
    parsed_hints,
)

INTERACTIVE, BATCH, BACKGROUND = RequestClass
FULL = {"in_flight": 4, "queued": 8}


class Holder:
    """A hold queue with room for bodies up to ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def has_room(self, body_bytes: int, share: float) -> bool:
        return body_bytes <= share * self.room


def of_class(request_class: RequestClass, request_id: str = "r", **over: Any) -> PlacementRequest:
    hints = Hints(request_class=request_class, **over)
    return replace(a_request(request_id=request_id), hints=hints)


def held_at(room: int = 1_000_000) -> Live:
    return Live(ledger=a_ledger(), hold=Holder(room))


def test_the_lower_the_class_the_less_of_an_endpoint_it_may_fill() -> None:
    most = {}
    for request_class in RequestClass:
        fitting = [
            busy
            for busy in range(14)
            if decided(
                of_class(request_class), a_fleet(a_row(in_flight=min(4, busy), queued=max(0, busy - 4)))
            ).action
            is Action.ROUTE
        ]
        assert fitting == list(range(len(fitting)))
        most[request_class] = len(fitting)
    assert most == {INTERACTIVE: 12, BATCH: 11, BACKGROUND: 9}


def test_any_class_may_use_an_endpoint_of_one_place() -> None:
    for request_class in RequestClass:
        row = a_row(slots=1, ceiling=1)
        assert decided(of_class(request_class), a_fleet(row)).action is Action.ROUTE
        busy = decided(of_class(request_class), a_fleet(replace(row, in_flight=1)))
        assert busy.reason is Reason.QUEUE_FULL


def test_the_ingress_keeps_the_same_reserve() -> None:
    ledger = a_ledger()
    fleet = a_fleet(
        replace(a_row("me", is_self=True), node_id=a_fleet().node_id, key=f"{a_fleet().node_id}/llamacpp"),
        live=Live(ledger=ledger),
    )
    causes: dict[RequestClass, list[Cause | None]] = {request_class: [] for request_class in RequestClass}
    for _ in range(12):
        for request_class in RequestClass:
            ask = IngressAsk(
                endpoint="llamacpp",
                model="tiny",
                dialect=ALL_DIALECTS,
                resident=True,
                ahead=None,
                patient=True,
                request_class=request_class,
            )
            causes[request_class].append(admit(ask, fleet))
        ledger.local.start("llamacpp", 1.0, NOW)
    assert [causes[each].count(Cause.QUEUE_FULL) for each in RequestClass] == [0, 1, 3]


def test_full_rows_alone_are_a_reason_to_wait_if_there_is_where() -> None:
    fleet = a_fleet(a_row("a", **FULL), a_row("b", down="gone"), live=held_at())
    decision = decided(a_request(), fleet)
    assert (decision.action, decision.reason, decision.chosen) == (Action.QUEUE, Reason.QUEUE_FULL, None)
    assert decision.hold is not None
    assert (decision.hold.since_ms, decision.hold.until_ms, decision.hold.deadline_ms) == (
        NOW,
        NOW + 600_000,
        NOW + 1_800_000,
    )
    assert decision.retry_after_s is not None
    assert decision.record.action is Action.QUEUE
    refused = decided(a_request(), a_fleet(a_row("a", **FULL), live=held_at(-1)))
    assert (refused.action, refused.reason, refused.hold) == (Action.REJECT, Reason.QUEUE_FULL, None)
    assert refused.reason.status == 429
    assert refused.retry_after_s is not None


def test_requests_of_one_class_that_wait_for_the_same_rows_are_of_one_kind() -> None:
    rows = [a_row(name, ctx=ctx, ctx_most=ctx, **FULL) for name, ctx in (("a", 131_072), ("b", 8_192))]
    fleet = a_fleet(*rows, live=held_at())

    def kind(request: PlacementRequest) -> object:
        terms = decided(request, fleet).hold
        assert terms is not None
        return waiting_of(request, terms, 1).kind

    assert kind(a_request(request_id="r1")) == kind(of_class(INTERACTIVE, "r2", expect_tokens=9))
    others = [of_class(BATCH), of_class(INTERACTIVE, ctx_least=9_000), of_class(INTERACTIVE)]
    assert len({kind(each) for each in others}) == 3


def test_a_low_class_finds_the_hold_queue_full_before_a_high_one_does() -> None:
    fleet = a_fleet(a_row("a", **FULL), live=held_at(100))
    actions = [decided(replace(of_class(each), body_bytes=95), fleet).action for each in (INTERACTIVE, BATCH)]
    assert actions == [Action.QUEUE, Action.REJECT]


def test_the_work_of_a_held_request_counts_as_where_it_is_done_fastest() -> None:
    slow, fast = a_row("a", pp=100.0, tg=5.0, **FULL), a_row("b", pp=1_000.0, tg=50.0, **FULL)
    decision = decided(a_request(), a_fleet(slow, fast, live=held_at()))
    need = decision.evidence.need
    assert decision.hold is not None
    assert decision.hold.seconds == need.prompt / 1_000.0 + need.output / 50.0


def test_nobody_is_held_longer_than_its_class_or_its_deadline_allows() -> None:
    fleet = a_fleet(a_row("a", **FULL), live=held_at())
    for request_class, hold_ms in ((INTERACTIVE, 600_000), (BATCH, 900_000), (BACKGROUND, 1_800_000)):
        terms = decided(of_class(request_class), fleet).hold
        assert terms is not None
        assert terms.until_ms == NOW + hold_ms
    hurried = decided(of_class(BATCH, deadline_ms=5_000), fleet).hold
    assert hurried is not None
    assert hurried.until_ms == NOW + 5_000


def test_who_is_held_keeps_its_place_and_its_time_whatever_room_there_is() -> None:
    fleet = a_fleet(a_row("a", **FULL), live=held_at(-1))
    again = decided(replace(a_request(), held_since_ms=NOW - 20_000, waits=True), fleet)
    assert again.hold is not None
    assert (again.hold.since_ms, again.hold.until_ms) == (NOW - 20_000, NOW + 580_000)
    late = decided(replace(a_request(), held_since_ms=NOW - 600_000, waits=True), fleet)
    assert (late.action, late.reason) == (Action.REJECT, Reason.QUEUE_FULL)


def test_who_left_the_queue_comes_back_only_if_there_is_room() -> None:
    back = replace(a_request(), held_since_ms=NOW - 20_000, attempt=2)
    again = decided(back, a_fleet(a_row("a", **FULL), live=held_at()))
    assert again.hold is not None
    assert (again.hold.since_ms, again.hold.until_ms) == (NOW - 20_000, NOW + 580_000)
    refused = decided(back, a_fleet(a_row("a", **FULL), live=held_at(-1)))
    assert (refused.action, refused.reason) == (Action.REJECT, Reason.QUEUE_FULL)


def test_what_failed_a_request_before_does_not_hide_that_the_rest_is_only_full() -> None:
    tried, full = a_row("a"), a_row("b", **FULL)
    for hold, action in ((held_at(), Action.QUEUE), (Live(ledger=a_ledger()), Action.REJECT)):
        request = replace(a_request(), attempt=2, tried=frozenset({tried.key}))
        decision = decided(request, a_fleet(tried, full, live=hold))
        assert (decision.action, decision.reason, decision.reason.status) == (action, Reason.QUEUE_FULL, 429)


def test_nobody_waits_for_an_endpoint_that_failed_it_already() -> None:
    full = a_row("a", **FULL)
    request = replace(a_request(), attempt=2, tried=frozenset({full.key}))
    decision = decided(request, a_fleet(full, live=held_at()))
    assert decision.action is Action.REJECT


def told_to_return(*rows: Row, ledger: Ledger | None = None, **hints: str) -> int:
    live = Live(ledger=ledger or a_ledger())
    retry_s = decided(a_request(hints=parsed_hints(**hints)), a_fleet(*rows, live=live)).retry_after_s
    assert retry_s is not None
    return retry_s


def test_when_to_return_is_told_by_the_rows_that_the_request_waits_for() -> None:
    busy = a_row("a", in_flight=4, queued=8, taken_ms=NOW, pp=500, tg=25)
    idle = a_row("b"), a_row("c", resident=False, loadable=False), a_row("d", draining=True)
    assert 22 <= told_to_return(busy, *idle, require="node=@a") <= 34, "nine turns of 3.1 s"
    told_before = replace(busy, taken_ms=NOW - 6_200)
    assert 17 <= told_to_return(told_before, *idle, require="node=@a") <= 27, "two of them are over"
    assert told_to_return(busy, a_row("b", in_flight=12, taken_ms=NOW, pp=1e5, tg=500)) <= 3


def test_own_work_that_no_record_shows_yet_is_waited_for_as_well() -> None:
    ledger = a_ledger()
    mine, peer = a_row("me", is_self=True), a_row("b")
    for _ in range(12):
        ledger.local.start("llamacpp", 10.0, NOW)
        ledger.reserve(a_choice(peer, prefill_s=2.0, decode_s=8.0), NOW)
    for name in ("me", "b"):
        told_s = told_to_return(mine, peer, ledger=ledger, require=f"node=@{name}")
        assert 10 <= told_s <= 17, "nine turns of 1.55 s"


def test_who_asks_for_what_no_wait_brings_about_is_not_told_to_return_at_once() -> None:
    assert told_to_return(a_row("a", down="gone")) == 30


def test_who_asks_for_what_never_fits_is_not_told_to_return() -> None:
    large = a_row("a", resident=False, weight_bytes=9 * 2**30, reach_bytes=8.0 * 2**30)
    decision = decided(a_request(), a_fleet(large))
    assert (decision.reason, decision.retry_after_s) == (Reason.DOES_NOT_FIT, None)


def saturated(saturation: float) -> Row:
    """A row on which a request waits for this part of the background target."""
    turn_s = 1.55
    queued = round(saturation * POLICY.background.ttft_s / turn_s) - 1
    return a_row("a", in_flight=4, queued=queued, ceiling=1_000, taken_ms=NOW)


def put_off(request_class: RequestClass, saturation: float, count: int = 400) -> float:
    fleet = a_fleet(saturated(saturation), m_r=1.0, live=held_at())
    decisions = [decided(of_class(request_class, f"r{number}"), fleet) for number in range(count)]
    for decision in decisions:
        if decision.action is Action.QUEUE:
            assert (decision.reason, decision.chosen) == (Reason.SHED, None)
            assert decision.hold is not None
            assert decision.hold.until_ms == decision.hold.deadline_ms
    return sum(decision.action is Action.QUEUE for decision in decisions) / count


def test_background_waits_in_proportion_to_saturation_and_nothing_else_does() -> None:
    assert put_off(BACKGROUND, 0.79) == 0.0
    assert 0.4 < put_off(BACKGROUND, 1.0) < 0.6
    assert put_off(BACKGROUND, 1.21) == 1.0
    for request_class in (INTERACTIVE, BATCH):
        assert put_off(request_class, 1.21) == 0.0


def test_background_is_shed_where_the_queue_cannot_take_it() -> None:
    decision = decided(of_class(BACKGROUND), a_fleet(saturated(1.21), m_r=1.0, live=held_at(-1)))
    assert (decision.action, decision.reason, decision.reason.status) == (Action.SHED, Reason.SHED, 429)
    assert decision.retry_after_s == 60


def test_the_same_request_is_put_off_again_and_its_record_tells_of_it() -> None:
    fleet = a_fleet(saturated(1.0), m_r=1.0, live=held_at())
    told = [[decided(of_class(BACKGROUND, f"r{number}"), fleet).action for number in range(40)] for _ in "ab"]
    assert told[0] == told[1]
    assert set(told[0]) == {Action.QUEUE, Action.ROUTE}
    record = decided(of_class(BACKGROUND, f"r{told[0].index(Action.QUEUE)}"), fleet).record
    assert (record.full, record.chosen, record.margin, record.alternatives) == (True, None, None, ())
    assert [round(candidate.est.wait, -1) for candidate in record.candidates] == [POLICY.background.ttft_s]
    assert replay(record, POLICY) == record


def test_who_was_held_for_as_long_as_its_class_allows_or_dispatched_goes_on() -> None:
    fleet = a_fleet(saturated(1.21), m_r=1.0, live=held_at())
    request, hold_ms = of_class(BACKGROUND), POLICY.background.hold_ms
    assert decided(request, fleet).action is Action.QUEUE
    assert decided(replace(request, held_since_ms=NOW - hold_ms + 1), fleet).action is Action.QUEUE
    assert decided(replace(request, held_since_ms=NOW - hold_ms), fleet).action is Action.ROUTE
    hasty = of_class(BACKGROUND, deadline_ms=10_000)
    for waited_ms, action in ((4_000, Action.QUEUE), (6_000, Action.ROUTE)):
        held = replace(hasty, arrival_ms=NOW - waited_ms, held_since_ms=NOW - waited_ms)
        assert decided(held, fleet).action is action, "in time for its deadline"
    assert decided(replace(request, attempt=2), fleet).action is Action.ROUTE
