"""One record per request, whatever happens to it, and nothing left in the books."""

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from agent.engines.contract import EndpointHealth, LoadSource, ObservedLoad
from agent.node.routing.placement import Choosing
from agent.node.state.statement import EndpointWork
from agent.observe.metrics import Registry
from agent.relay.frontends.replies import hints_header
from agent.relay.ports import Queued, Routed, Turned
from agent.relay.upstream.route_header import route_of
from router_core import limits
from router_core.placement.reasons import Action, HintOutcome
from router_core.placement.request.request import HintNote, Locality, Match, RequestClass
from router_core.policy.exchange import Hedge
from router_core.policy.placement import PlacementPolicy
from router_core.record.spelling import CAPABILITIES
from router_core.record.state import Capability, Dialect
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Result
from tests.agent.node.rig import (
    STREAMED,
    World,
    a_line,
    a_report,
    a_resident,
    an_endpoint,
    an_outcome,
    an_owned,
    answered,
    failed,
    key_of,
    marks,
    stated,
)


def two_nodes() -> World:
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    return world


def figures(world: World) -> str:
    faults: list[BaseException] = []
    registry = Registry(faults.append)
    registry.add(world.placing.metrics)
    text = registry.render()
    assert not faults
    return text


def test_what_a_body_tells_is_what_the_request_needs() -> None:
    plain = two_nodes().ask(stream=False).request
    assert plain is not None
    assert (plain.choices, plain.num_ctx, plain.output_cap, plain.requires) == (1, None, None, Capability(0))
    asked: dict[str, Any] = {"n": 3, "num_ctx": 4_096, "max_tokens": 50, "images": 2, "audio_parts": 1}
    request = two_nodes().ask(**asked).request
    assert request is not None
    assert (request.choices, request.num_ctx, request.output_cap) == (3, 4_096, 50)
    assert (request.text_bytes, request.body_bytes, request.images, request.audio_parts) == (
        4_000,
        5_000,
        2,
        1,
    )
    assert request.requires == Capability.STREAMING | Capability.VISION | Capability.AUDIO_IN


@pytest.mark.parametrize("fact", ["tools", "json_schema", "logprobs"])
def test_each_thing_that_a_body_asks_for_is_required_by_its_name(fact: str) -> None:
    asked: dict[str, Any] = {fact: True}
    request = two_nodes().ask(stream=False, **asked).request
    assert request is not None
    assert request.requires == CAPABILITIES[fact]


def test_a_served_request_leaves_one_record_with_its_attempt_and_ending() -> None:
    world = two_nodes()
    choosing = world.ask()
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    world.placing.attempted(a_report(routed), 50)
    world.placing.answered(a_line(routed.decision_id))
    (record,) = world.kept.records
    assert record.id == routed.decision_id
    assert [attempt.result for attempt in record.attempts] == ["done"]
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.out_tokens) == (200, 50)
    assert not world.placing.open


def test_a_request_that_moved_on_leaves_the_record_of_the_decision_that_served_it() -> None:
    world = two_nodes()
    choosing = world.ask()
    first = world.route(choosing)
    choosing.end(first.attempt)
    world.placing.attempted(a_report(first, failed(first), marks=None), None)
    second = world.route(choosing, attempt=2, tried={first.choice.endpoint: None})
    choosing.end(second.attempt)
    world.placing.attempted(a_report(second), 50)
    world.placing.answered(a_line(second.decision_id, attempts=2))
    (record,) = world.kept.records
    assert (record.id, record.chosen) == (second.decision_id, second.choice.endpoint)
    assert [(attempt.row, attempt.result) for attempt in record.attempts] == [
        (first.choice.label, "reset"),
        (second.choice.label, "done"),
    ]
    assert not world.placing.open


def test_a_request_that_nobody_took_over_is_kept_under_the_id_its_client_was_told() -> None:
    world = World()
    world.own(an_endpoint())
    choosing = world.ask()
    first = world.route(choosing)
    choosing.end(first.attempt)
    world.placing.attempted(a_report(first, failed(first), marks=None), None)
    turned = choosing.decide(
        attempt=2, tried=frozenset({first.choice.endpoint}), refused=frozenset(), now=1_000_000
    )
    assert isinstance(turned, Turned)
    world.placing.answered(a_line(first.decision_id, status=502, code="upstream_unreachable"))
    (record,) = world.kept.records
    assert record.id == turned.decision_id == first.decision_id
    assert (record.action, record.chosen) == (Action.ROUTE, first.choice.endpoint)
    assert [attempt.result for attempt in record.attempts] == ["reset"]
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.err_ect) == (502, None)


def test_a_request_that_nobody_can_take_is_kept_when_it_was_told_so() -> None:
    world = World()
    world.own(an_endpoint())
    turned = world.ask(model="absent").decide(
        attempt=1, tried=frozenset(), refused=frozenset(), now=1_000_007
    )
    assert isinstance(turned, Turned)
    world.placing.answered(a_line(turned.decision_id, status=404, code="model_absent", total_ms=7.0))
    (record,) = world.kept.records
    assert (record.id, record.action) == (turned.decision_id, Action.REJECT)
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.total_ms) == (404, 7)
    assert len(world.router.ledger) == 0


def one_place() -> World:
    """A node of one place, which is taken."""
    world = World()
    world.own(an_endpoint(slots=1, max_queue=0))
    world.work.start("llama", 1.0, world.clock.now)
    return world


def again(world: World, choosing: Choosing) -> Routed | Turned | Queued:
    return choosing.decide(attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now)


def test_a_held_request_leaves_one_record_that_tells_how_long_it_waited() -> None:
    world = one_place()
    choosing = world.ask(request_id="held")
    queued = again(world, choosing)
    assert isinstance(queued, Queued)
    waiting = queued.waiting
    assert (waiting.caller, waiting.body_bytes, waiting.since_ms) == ("local", 5_000, 1_000_000)
    assert (queued.until_ms, waiting.deadline_ms) == (1_600_000, 2_800_000)
    assert (queued.turned.status, queued.turned.code) == (429, "queue_full")
    assert queued.turned.retry_after_s is not None
    world.clock.now += 4_000
    same = again(world, choosing)
    assert isinstance(same, Queued)
    assert (same.waiting, same.turned.decision_id) == (waiting, queued.turned.decision_id)
    world.work.finish(1)
    world.clock.now += 1_000
    routed = world.route(choosing)
    assert routed.held_ms == 5_000
    choosing.end(routed.attempt)
    world.placing.attempted(a_report(routed), 50)
    world.placing.answered(a_line(routed.decision_id, total_ms=9_000.0))
    (record,) = world.kept.records
    assert (record.id, record.action) == (routed.decision_id, Action.ROUTE)
    assert record.outcome is not None
    assert record.outcome.held_ms == 5_000
    assert not world.placing.open
    text = figures(world)
    assert 'pairmesh_decisions_total{action="queue",reason="queue_full"} 1\n' in text
    assert 'pairmesh_queue_wait_seconds_sum{class="interactive"} 5' in text


def test_who_left_a_queue_that_is_full_by_now_is_turned_away() -> None:
    world = one_place()
    choosing = world.ask()
    queued = again(world, choosing)
    assert isinstance(queued, Queued)
    world.work.finish(1)
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    world.work.start("llama", 600.0, world.clock.now)
    for ticket in range(limits.HELD_REQUESTS):
        other = replace(queued.waiting, ticket=1_000 + ticket)
        world.router.queue.join(other, lambda: None, world.clock.now)
    turned = choosing.decide(
        attempt=2, tried=frozenset(), refused=frozenset({routed.choice.endpoint}), now=world.clock.now
    )
    assert isinstance(turned, Turned)
    assert (turned.status, turned.code) == (429, "queue_full")


def test_who_waits_keeps_its_place_although_others_have_filled_the_queue() -> None:
    world = one_place()
    choosing = world.ask()
    queued = again(world, choosing)
    assert isinstance(queued, Queued)
    for ticket in range(limits.HELD_REQUESTS):
        world.router.queue.join(replace(queued.waiting, ticket=ticket), lambda: None, world.clock.now)
    assert isinstance(again(world, choosing), Queued)
    assert isinstance(again(world, world.ask("r2")), Turned)


def test_who_waited_long_uses_the_room_of_the_class_that_it_rose_to() -> None:
    """Else those of a higher class fill each place that it may not have."""
    world = World()
    world.own(an_endpoint(slots=4, max_queue=8))
    for _ in range(11):
        world.work.start("llama", 600.0, world.clock.now)
    choosing = world.ask(headers=(("x-pairmesh-class", "background"),))
    began = world.clock.now
    for waited_ms in (0, 29_999, 30_000, 59_999):
        world.clock.now = began + waited_ms
        assert isinstance(again(world, choosing), Queued), waited_ms
    world.clock.now = began + 60_000
    routed = world.route(choosing)
    assert (routed.request_class, routed.stands_as) == ("background", "interactive")
    assert route_of(routed).request_class == "interactive", "the target judges by it, too"


def test_waits_before_and_after_a_failure_are_one_wait_with_one_end() -> None:
    world = one_place()
    choosing = world.ask()
    queued = again(world, choosing)
    assert isinstance(queued, Queued)
    world.clock.now += 4_000
    assert choosing.held_ms(world.clock.now) == 4_000
    world.work.finish(1)
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    world.clock.now += 1_000
    world.work.start("llama", 1.0, world.clock.now)
    after = choosing.decide(
        attempt=2, tried=frozenset(), refused=frozenset({routed.choice.endpoint}), now=world.clock.now
    )
    assert isinstance(after, Queued)
    assert (after.until_ms, after.waiting.since_ms) == (queued.until_ms, queued.waiting.since_ms)
    assert choosing.held_ms(world.clock.now + 500) == 4_500


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (499, "client_gone")])
def test_who_waited_in_vain_is_kept_with_the_time_it_waited(status: int, code: str) -> None:
    world = one_place()
    choosing = world.ask()
    queued = again(world, choosing)
    assert isinstance(queued, Queued)
    world.placing.answered(a_line(queued.turned.decision_id, status=status, code=code, total_ms=3_000.0))
    (record,) = world.kept.records
    assert (record.id, record.action) == (queued.turned.decision_id, Action.QUEUE)
    assert record.outcome is not None
    assert (record.outcome.status, record.outcome.held_ms) == (status, 3_000)
    assert not world.placing.open


def test_who_waited_for_a_node_that_left_is_kept_as_turned_away() -> None:
    world = one_place()
    choosing = world.ask()
    assert isinstance(again(world, choosing), Queued)
    world.own()
    world.clock.now += 2_000
    turned = again(world, choosing)
    assert isinstance(turned, Turned)
    assert turned.code == "model_absent"
    world.placing.answered(a_line(turned.decision_id, status=404, code="model_absent", total_ms=2_000.0))
    (record,) = world.kept.records
    assert (record.action, record.outcome.held_ms) == (Action.REJECT, 2_000)  # type: ignore[union-attr]
    assert not world.placing.open


def test_a_request_that_was_shed_is_told_and_counted() -> None:
    policy = PlacementPolicy(shed_above=1e-6, shed_range=1e-6)
    world = World(policy=policy)
    world.own(an_endpoint(slots=1, max_queue=9))
    world.work.start("llama", 600.0, world.clock.now)
    background = (("x-pairmesh-class", "background"),)
    while isinstance(turned := again(world, world.ask(headers=background)), Queued):
        assert turned.turned.code == "shed"
        world.router.queue.join(turned.waiting, lambda: None, world.clock.now)
    assert isinstance(turned, Turned)
    assert (turned.status, turned.code) == (429, "shed")
    assert turned.retry_after_s is not None
    world.placing.answered(a_line(turned.decision_id, status=429, code="shed"))
    assert world.kept.records[0].action is Action.SHED
    assert 'pairmesh_shed_total{class="background"} 1\n' in figures(world)


def test_a_narrowing_hint_that_makes_no_sense_is_refused_without_a_decision() -> None:
    world = two_nodes()
    choosing = world.ask(headers=(("x-pairmesh-require", "%%%"),))
    turned = choosing.decide(attempt=1, tried=frozenset(), refused=frozenset(), now=1_000_000)
    assert isinstance(turned, Turned)
    assert (turned.status, turned.code, turned.decision_id) == (400, "hint_malformed", None)
    assert turned.hints == "require=excluded(hint_malformed)", "which one it was is told, not what it said"
    text = figures(world)
    assert 'pairmesh_decisions_total{action="reject",reason="hint_malformed"} 1\n' in text
    assert 'pairmesh_hints_total{hint="require",outcome="excluded"} 1\n' in text
    assert choosing.until_ms is None
    assert len(world.router.ledger) == 0


def test_prediction_errors_count_from_the_dispatch_of_the_attempt_that_served() -> None:
    world = World()
    world.own(an_endpoint())
    choosing = world.ask()
    routed = world.route(choosing)
    report = a_report(routed, dispatched_ms=1_005_000.0, marks=marks(1_005_000))
    choosing.end(routed.attempt)
    world.placing.attempted(report, 50)
    world.placing.answered(a_line(routed.decision_id, total_ms=6_100.0, first_byte_ms=5_095.0))
    outcome = world.kept.records[0].outcome
    assert outcome is not None
    assert outcome.err_ttft == pytest.approx(math.log(100.0 / (1000.0 * routed.choice.est.ttft)))
    assert outcome.err_ect == pytest.approx(math.log(1_100.0 / (1000.0 * routed.choice.est.ect)))
    assert outcome.ttft_ms == 5_095


def test_an_answer_in_one_piece_says_nothing_about_its_first_token() -> None:
    world = World()
    world.own(an_endpoint())
    choosing = world.ask(stream=False)
    routed = world.route(choosing)
    whole = marks(1_000_000, content_events=None, first_content_ms=None, first_byte_ms=1_001_100.0)
    choosing.end(routed.attempt)
    world.placing.attempted(a_report(routed, marks=whole), 50)
    world.placing.answered(a_line(routed.decision_id, first_byte_ms=1_100.0))
    outcome = world.kept.records[0].outcome
    assert outcome is not None
    assert outcome.err_ttft is None
    assert outcome.err_ect == pytest.approx(math.log(1_100.0 / (1000.0 * routed.choice.est.ect)))


def test_a_client_that_left_in_mid_answer_is_no_prediction_error_and_its_tokens_count() -> None:
    world = World()
    world.own(an_endpoint())
    choosing = world.ask()
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    gone = an_outcome(routed, Result.CANCELLED)
    world.placing.attempted(a_report(routed, gone, marks=marks(1_000_000, content_events=12)), None)
    world.placing.answered(a_line(routed.decision_id, status=499, code="client_gone"))
    outcome = world.kept.records[0].outcome
    assert outcome is not None
    assert (outcome.cancelled_by, outcome.err_ttft, outcome.err_ect) == ("client", None, None)
    assert outcome.out_tokens == 12


def serve(world: World, choosing: Choosing, result: Result = Result.DONE, **over: Any) -> Routed:
    routed = world.route(choosing)
    choosing.end(routed.attempt)
    world.placing.attempted(a_report(routed, an_outcome(routed, result), **over), None)
    code = "client_gone" if result is Result.CANCELLED else None
    world.placing.answered(a_line(routed.decision_id, code=code))
    return routed


def test_the_client_is_told_what_stood_in_for_the_model_it_named() -> None:
    world = World()
    world.own(
        an_endpoint(owned=(an_owned("big", base="Toy-2B", quant="Q8_0"),), resident=(a_resident("big"),))
    )
    world.peer(
        "beta", an_endpoint(owned=(an_owned(base="toy-2b"),), health=EndpointHealth.UNREACHABLE, resident=())
    )
    strict = world.ask().decide(attempt=1, tried=frozenset(), refused=frozenset(), now=1_000_000)
    assert isinstance(strict, Turned)
    routed = world.route(world.ask(headers=(("x-pairmesh-match", "quant"),)))
    assert (routed.choice.model, routed.choice.match) == ("big", Match.QUANT)
    assert (
        world.route(world.ask(model="big", headers=(("x-pairmesh-match", "quant"),))).choice.match
        is Match.EXACT
    )


def test_requests_go_on_leaving_the_mesh_until_it_is_nearly_as_good_again() -> None:
    world = World(policy=PlacementPolicy(spill_cap=Locality.ANY))
    world.own(an_endpoint("out", cloud=True, remote_host=True, slots=8))
    busy = ObservedLoad(source=LoadSource.ENGINE, running=1, waiting=200)
    world.peer(
        "beta", an_endpoint(slots=1, max_queue=300, load=busy), work={"llama": EndpointWork(foreign=201)}
    )
    batch = ("x-pairmesh-class", "batch")
    away = (("x-pairmesh-locality", "any"), batch)
    assert serve(world, world.ask(headers=(batch,))).choice.endpoint_name == "llama"
    assert not world.router.spilling
    routed = world.route(world.ask(headers=away))
    assert (routed.choice.endpoint_name, world.router.spilling) == ("out", {RequestClass.BATCH})
    world.peer("beta", an_endpoint())
    assert world.route(world.ask(headers=away)).choice.endpoint_name == "llama"
    assert not world.router.spilling


def test_a_session_is_kept_where_it_was_served_and_the_client_is_told() -> None:
    world = two_nodes()
    named = (("x-session-id", "s1"),)
    assert serve(world, world.ask(headers=())).session is None
    assert serve(world, world.ask(headers=named)).session == "miss"
    assert serve(world, world.ask(headers=named)).session == "hit"
    assert len(world.router.sessions) == 1


def test_what_a_session_was_answered_is_counted_as_cached_where_it_was_served() -> None:
    world = two_nodes()
    named = (("x-session-id", "s1"),)
    serve(world, world.ask(headers=named))
    served = world.ask(headers=named)
    routed = world.route(served)
    assert served.request is not None
    assert served.request.pin is not None
    assert served.request.pin.tokens == routed.choice.prompt_tokens + STREAMED


def test_a_policy_without_affinity_says_that_sessions_are_off() -> None:
    world = World(policy=PlacementPolicy(affinity_bonus=0.0))
    world.own(an_endpoint())
    named = (("x-session-id", "s1"),)
    assert [serve(world, world.ask(headers=named)).session for _ in range(2)] == ["off", "off"]


def test_a_session_that_had_to_move_is_said_to_have_moved() -> None:
    world = World()
    world.peer("beta", an_endpoint())
    named = (("x-session-id", "s1"),)
    assert serve(world, world.ask(headers=named)).session == "miss"
    world.admit()
    world.own(an_endpoint())
    assert serve(world, world.ask(headers=named)).session == "moved"


def test_a_session_is_kept_although_its_client_cut_the_answer_short() -> None:
    world = two_nodes()
    named = (("x-session-id", "s1"),)
    serve(world, world.ask(headers=named), Result.CANCELLED)
    assert len(world.router.sessions) == 1


def test_a_request_that_ended_before_any_answer_pins_no_session() -> None:
    world = two_nodes()
    named = (("x-session-id", "s1"),)
    serve(world, world.ask(headers=named), Result.CANCELLED, marks=None)
    serve(world, world.ask(headers=named), Result.FAILED, marks=None)
    assert len(world.router.sessions) == 0


def test_what_was_sent_far_away_is_counted_until_a_record_can_have_seen_it() -> None:
    world = World()
    static, volatile = stated(an_endpoint())
    world.admit("beta")
    world.hear("beta", static, volatile, rtt_ms=300)
    world.route(world.ask())
    for later_ms, counted in ((250, 1), (60, 0)):
        world.clock.now += later_ms
        world.hear("beta", static, volatile, rtt_ms=300)
        assert len(world.router.ledger.owed) == counted


def test_requests_of_one_id_never_mix() -> None:
    world = two_nodes()
    asked = [(world.ask("same"), number) for number in range(8)]
    routed = [(world.route(choosing), choosing, number) for choosing, number in asked]
    for way, choosing, number in reversed(routed):
        choosing.end(way.attempt)
        world.placing.attempted(a_report(way, request_id="same"), number)
        world.placing.answered(a_line(way.decision_id, request_id="same", total_ms=float(number + 1)))
    kept = {record.id: record.outcome for record in world.kept.records}
    assert len(kept) == 8
    for way, _, number in routed:
        outcome = kept[way.decision_id]
        assert outcome is not None
        assert (outcome.out_tokens, outcome.total_ms) == (number, number + 1)
    assert len(world.router.ledger) == 0


def test_what_the_ingress_served_is_no_request_of_this_router() -> None:
    world = two_nodes()
    choosing = world.ask()
    routed = world.route(choosing)
    world.placing.attempted(a_report(routed, side="ingress"), 50)
    world.placing.answered(a_line(routed.decision_id, side="ingress"))
    assert not world.kept.records
    assert len(world.placing.open) == 1


def test_hints_are_told_with_why_they_did_not_hold() -> None:
    notes = (
        HintNote(hint="prefer", outcome=HintOutcome.EXCLUDED, detail="pressure"),
        HintNote(hint="class", outcome=HintOutcome.HONOURED),
    )
    assert hints_header(notes) == "prefer=excluded(pressure), class=honoured"
    assert hints_header(()) is None


def test_a_deadline_bounds_what_a_target_may_take() -> None:
    world = two_nodes()
    choosing = world.ask(headers=(("x-pairmesh-deadline-ms", "60000"),))
    world.clock.now += 1_000
    assert choosing.until_ms == 1_060_000
    assert world.route(choosing).left_ms == 59_000


class Requests(RuleBasedStateMachine):
    """Any interleaving of requests that are routed, refused, moved on, served, cut, or struck by a shutdown."""

    def __init__(self) -> None:
        super().__init__()
        self.world = two_nodes()
        self.world.peer("gamma", an_endpoint(slots=1, max_queue=1))
        self.open: list[tuple[Choosing, Routed, frozenset[str]]] = []
        self.ended = 0

    @rule(model=st.sampled_from(["tiny", "absent"]), own=st.booleans())
    def arrives(self, model: str, own: bool) -> None:
        headers = (("x-pairmesh-locality", "host"),) if own else ()
        self._decide(self.world.ask("same", model=model, headers=headers), 1, frozenset())

    def _decide(self, choosing: Choosing, attempt: int, tried: frozenset[str]) -> bool:
        told = choosing.decide(attempt=attempt, tried=tried, refused=frozenset(), now=self.world.clock.now)
        if isinstance(told, Routed):
            self.open.append((choosing, told, tried))
            return True
        if attempt == 1:
            turned = told.turned if isinstance(told, Queued) else told
            self.world.placing.answered(a_line(turned.decision_id, status=turned.status, code=turned.code))
            self.ended += 1
        return False

    def _take(self, data: st.DataObject) -> tuple[Choosing, Routed, frozenset[str]]:
        return self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        choosing, routed, _ = data.draw(st.sampled_from(self.open))
        choosing.first_token(routed.attempt)

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        result=st.sampled_from([Result.DONE, Result.BROKEN, Result.CANCELLED]),
        again=st.booleans(),
    )
    def ends(self, data: st.DataObject, result: Result, again: bool) -> None:
        choosing, routed, _ = self._take(data)
        choosing.end(routed.attempt)
        self.world.placing.attempted(a_report(routed, an_outcome(routed, result)), None)
        for _ in range(1 + again):
            choosing.end(routed.attempt)
            self.world.placing.answered(a_line(routed.decision_id))
        self.ended += 1

    @precondition(lambda self: self.open)
    @rule(data=st.data(), busy=st.booleans())
    def fails_over(self, data: st.DataObject, busy: bool) -> None:
        choosing, routed, tried = self._take(data)
        choosing.end(routed.attempt)
        outcome = answered(routed, 503, FailureClass.BUSY) if busy else failed(routed, Cause.CONNECT_REFUSED)
        self.world.placing.attempted(a_report(routed, outcome, marks=None), None)
        if not self._decide(choosing, len(tried) + 2, tried | {routed.choice.endpoint}):
            self.world.placing.answered(a_line(routed.decision_id, status=502, code="upstream_unreachable"))
            self.ended += 1

    @rule(name=st.sampled_from(["beta", "gamma"]), seen=st.booleans())
    def hears(self, name: str, seen: bool) -> None:
        self.world.clock.now += 500
        self.world.peer(name, an_endpoint(), now=self.world.clock.now)
        if seen:
            self.world.own(an_endpoint())

    @invariant()
    def books_agree(self) -> None:
        world = self.world
        assert len(world.router.ledger) == len(self.open)
        assert set(world.placing.open) == {routed.decision_id for _, routed, _ in self.open}
        assert len(world.kept.records) == self.ended
        own = sum(routed.choice.endpoint == key_of("me") for _, routed, _ in self.open)
        assert world.work.in_flight("llama") == own

    def teardown(self) -> None:
        for choosing, routed, _ in self.open:
            choosing.end(routed.attempt)
            self.world.placing.answered(a_line(routed.decision_id, status=503, code="shutting_down"))
        assert len(self.world.router.ledger) == 0
        assert not self.world.placing.open
        assert not self.world.router.ledger.owed
        assert not self.world.router.ledger.loading
        assert self.world.work.in_flight("llama") == 0


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_second_attempt_is_told_in_the_record_of_the_first_and_the_session_goes_where_it_was_served() -> (
    None
):
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    choosing = world.ask(request_id="hedged")
    first = world.route(choosing)
    other = key_of("beta" if first.choice.endpoint == key_of("me") else "me")
    now = world.clock.boot_ms()
    assert choosing.has_other(tried=frozenset({first.choice.endpoint}), refused=frozenset(), now=now)
    assert not choosing.has_other(
        tried=frozenset({first.choice.endpoint, other}), refused=frozenset(), now=now
    )
    spare = choosing.spare(
        beside=first, attempt=2, tried=frozenset({first.choice.endpoint}), refused=frozenset(), now=now
    )
    assert spare is not None
    assert (spare.choice.endpoint, spare.decision_id) == (other, first.decision_id)
    assert len(world.router.ledger) == 2
    choosing.first_token(spare.attempt)
    assert choosing.placement is not None
    assert choosing.placement.choice is not None
    assert choosing.placement.choice.endpoint == other
    choosing.end(first.attempt)
    choosing.end(spare.attempt)
    assert len(world.router.ledger) == 0


def test_an_answer_that_is_kept_where_it_is_given_gets_no_second_attempt() -> None:
    world = World()
    world.own(an_endpoint())
    assert world.ask().hedge is Hedge.HUNG
    assert world.ask(dialect=Dialect.RESPONSES).hedge is Hedge.OFF
