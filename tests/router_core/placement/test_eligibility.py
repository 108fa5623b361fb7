"""Every filter excludes what it says, in the stated order, with the stated status."""

from typing import Any

import pytest
from msgspec.structs import replace

from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.replay import replay
from router_core.placement.queueing.hold import Hold
from router_core.placement.reasons import EXCLUSIONS, Action, Reason
from router_core.placement.request.request import Hints, Locality
from router_core.policy.placement import PlacementPolicy
from router_core.record.state import Capability, Dialect
from tests.support.fleets import (
    GIB,
    NOW,
    POLICY,
    Broken,
    a_choice,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    after_failure,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
)

KEY = a_row("a").key

OUT = [
    ({"untrusted": True}, {}, Reason.UNTRUSTED, None),
    ({"cloud": True}, {}, Reason.LOCALITY, None),
    ({}, {"hints": Hints(locality=Locality.HOST)}, Reason.LOCALITY, None),
    ({}, {"hints": parsed_hints(require="node=@b")}, Reason.NOT_IN_SUBSET, "node"),
    ({}, {"hints": parsed_hints(require="!node=@a")}, Reason.NOT_IN_SUBSET, "node"),
    ({}, {"hints": parsed_hints(require="engine=ollama")}, Reason.NOT_IN_SUBSET, "engine"),
    ({}, {"hints": parsed_hints(require="!engine=llamacpp")}, Reason.NOT_IN_SUBSET, "engine"),
    ({}, {"hints": parsed_hints(require="label=room:attic,node=@a")}, Reason.NOT_IN_SUBSET, "label"),
    ({"down": "engine"}, {}, Reason.UNREACHABLE, "engine"),
    ({"draining": True}, {}, Reason.DRAINING, None),
    ({"resident": False, "loadable": False}, {}, Reason.MODEL_ABSENT, "not_loadable"),
    ({"dialects": int(Dialect.EMBED)}, {}, Reason.CAPABILITY, "chat"),
    ({"cap_no": int(Capability.TOOLS)}, {"requires": Capability.TOOLS}, Reason.CAPABILITY, "tools"),
    ({}, {"hints": parsed_hints(require="cap=vision")}, Reason.CAPABILITY, "vision"),
    ({"params_m": 7000}, {"hints": parsed_hints(require="params>=8")}, Reason.CAPABILITY, "size"),
    ({"bits": None}, {"hints": parsed_hints(require="bits>=4")}, Reason.CAPABILITY, "size"),
    ({"ctx": 1000}, {"sure_tokens": 1001}, Reason.CONTEXT_TOO_SMALL, "1000<1001"),
    ({}, {"hints": parsed_hints(require="ctx>=9000")}, Reason.CONTEXT_TOO_SMALL, "8192<9000"),
    (
        {"resident": False, "weight_bytes": 17 * GIB, "reach_bytes": 16.0 * GIB},
        {},
        Reason.DOES_NOT_FIT,
        "17408>16384 MiB",
    ),
    ({"gate": Gate.SHUT, "squeeze_detail": "thermal"}, {}, Reason.PRESSURE, "thermal"),
    ({"resident": False, "loads": False, "squeeze_detail": "unknown"}, {}, Reason.PRESSURE, "unknown"),
    ({"in_flight": 4, "queued": 8}, {}, Reason.QUEUE_FULL, None),
    ({}, {"hints": Hints(deadline_ms=5000), "arrival_ms": NOW - 5000}, Reason.DEADLINE, None),
    ({}, {"tried": frozenset({KEY})}, Reason.TRIED, None),
    ({}, {"refused": frozenset({KEY})}, Reason.REFUSED, None),
]


@pytest.mark.parametrize(("row", "request_over", "reason", "detail"), OUT)
def test_a_filter_excludes_and_says_why(
    row: dict[str, Any], request_over: dict[str, Any], reason: Reason, detail: str | None
) -> None:
    decision = decided(a_request(**request_over), a_fleet(a_row("a", **row)))
    assert decision.action is Action.REJECT
    assert decision.reason is reason
    assert decision.chosen is None
    (gone,) = decision.record.excluded
    assert (gone.code, gone.detail) == (reason, detail)
    assert decision.record.excluded_counts == {reason.value: 1}


STATUS = [503, 400, 400, 503, 503, 503, 404, 400, 400, 503, 429, 429, 504, 502, 429]


def test_each_code_has_its_place_and_status() -> None:
    assert [reason.status for reason in EXCLUSIONS] == STATUS
    assert [reason.order for reason in EXCLUSIONS] == list(range(1, 16))


def test_the_furthest_code_reached_names_the_refusal() -> None:
    fleet = a_fleet(a_row("a", untrusted=True), a_row("b", in_flight=12), a_row("c", draining=True))
    decision = decided(a_request(), fleet)
    assert decision.reason is Reason.QUEUE_FULL
    assert decision.record.excluded_counts == {"untrusted": 1, "queue_full": 1, "draining": 1}
    assert decision.retry_after_s is not None


def test_the_first_failing_filter_of_a_row_is_the_reported_one() -> None:
    row = a_row("a", draining=True, dialects=0, ctx=1, gate=Gate.SHUT, in_flight=99)
    assert decided(a_request(), a_fleet(row)).reason is Reason.DRAINING


def test_unknown_passes_an_inferred_requirement_and_fails_an_explicit_one() -> None:
    fleet = a_fleet(a_row("a"))
    assert decided(a_request(requires=Capability.VISION), fleet).action is Action.ROUTE
    assert decided(a_request(hints=parsed_hints(require="cap=vision")), fleet).action is Action.REJECT


def test_unknown_context_and_unknown_room_pass() -> None:
    assert decided(a_request(text_bytes=10**6), a_fleet(a_row("a", ctx=None))).action is Action.ROUTE
    cold = a_row("a", resident=False, room_bytes=None)
    assert decided(a_request(), a_fleet(cold)).action is Action.ROUTE_COLD


def test_an_embedding_request_needs_no_known_no_of_embeddings() -> None:
    request = a_request(dialect=Dialect.EMBED)
    assert decided(request, a_fleet(a_row("a"))).action is Action.ROUTE
    refusing = a_fleet(a_row("a", cap_no=int(Capability.EMBEDDINGS)))
    assert decided(request, refusing).reason is Reason.CAPABILITY


@pytest.mark.lesson("a half-open node that wins on rank")
def test_an_open_breaker_excludes_and_a_half_open_one_is_the_last_resort() -> None:
    live = Live(ledger=a_ledger(), breakers=Broken(a=2))
    decision = decided(a_request(), a_fleet(a_row("a", tg=500), a_row("b"), live=live))
    assert chosen_node(decision) == "b"
    assert decision.record.excluded_counts == {"breaker_open": 1}
    live = Live(ledger=a_ledger(), breakers=Broken(a=1))
    fleet = a_fleet(a_row("a", tg=500), a_row("b", tg=5, pp=100), live=live)
    decision = decided(a_request(), fleet)
    assert chosen_node(decision) == "b"
    assert [row.row for row in decision.record.candidates] == [a_row("b").key, a_row("a").key]
    assert chosen_node(decided(a_request(), a_fleet(a_row("a"), live=live))) == "a"


def test_with_every_breaker_open_one_probe_goes_to_the_least_recently_failed_and_the_others_wait_for_it() -> (
    None
):
    breakers = Broken(b=2, a=2)
    live = Live(ledger=a_ledger(), breakers=breakers, hold=Hold(PlacementPolicy()))
    fleet = a_fleet(a_row("a", tg=500), a_row("b"), live=live)
    probe = decided(a_request(), fleet)
    assert (chosen_node(probe), probe.reason) == ("b", Reason.DEGRADED)
    assert probe.record.degraded == ("probe",)
    assert probe.record.excluded_counts == {"breaker_open": 1}
    breakers.on_trial = "b"
    waiting = decided(a_request(request_id="r2"), fleet)
    assert (waiting.action, waiting.reason, waiting.reason.status) == (Action.QUEUE, Reason.BREAKER_OPEN, 503)
    breakers.on_trial = ""
    assert chosen_node(decided(a_request(request_id="r2"), fleet)) == "b"
    assert chosen_node(decided(after_failure(a_request(), choice_of(probe).endpoint), fleet)) == "a"


def test_other_work_under_way_behind_an_open_breaker_keeps_no_probe_waiting() -> None:
    ledger = a_ledger()
    live = Live(ledger=ledger, breakers=Broken(a=2))
    fleet = a_fleet(a_row("a"), live=live)
    probe = decided(a_request(), fleet)
    ledger.reserve(choice_of(probe), NOW)
    assert chosen_node(decided(a_request(request_id="r2"), fleet)) == "a"


def test_what_cannot_serve_anyway_keeps_nobody_from_a_probe() -> None:
    live = Live(ledger=a_ledger(), breakers=Broken(a=2))
    for other in (
        a_row("b", draining=True),
        a_row("b", dialects=int(Dialect.RERANK)),
        a_row("b", resident=False, loadable=False),
    ):
        assert chosen_node(decided(a_request(), a_fleet(a_row("a"), other, live=live))) == "a"
    tried = after_failure(a_request(), a_row("b").key)
    assert chosen_node(decided(tried, a_fleet(a_row("a"), a_row("b"), live=live))) == "a"


def test_a_probe_still_passes_every_other_filter() -> None:
    live = Live(ledger=a_ledger(), breakers=Broken(a=2))
    draining = decided(a_request(), a_fleet(a_row("a", draining=True), live=live))
    assert draining.reason is Reason.BREAKER_OPEN
    assert draining.record.excluded_counts == {"breaker_open": 1}
    full = a_fleet(a_row("a"), a_row("b", in_flight=12), live=live)
    assert decided(a_request(), full).reason is Reason.QUEUE_FULL


def test_a_suspect_endpoint_serves_only_if_nothing_else_is_left() -> None:
    live = Live(ledger=a_ledger(), suspects=frozenset({KEY}))
    assert chosen_node(decided(a_request(), a_fleet(a_row("a", tg=500), a_row("b", tg=5), live=live))) == "b"
    alone = decided(a_request(), a_fleet(a_row("a"), live=live))
    assert chosen_node(alone) == "a"
    assert alone.record.degraded == ("stale_view",)
    assert alone.reason is Reason.DEGRADED


@pytest.mark.lesson(
    "kubernetes-sigs/gateway-api-inference-extension#2294: stale pictures trusted, or all dropped"
)
def test_when_every_picture_is_stale_the_backups_serve_and_say_so() -> None:
    old = {"taken_ms": NOW - 5001}
    decision = decided(a_request(), a_fleet(a_row("a", **old), a_row("b", **old)))
    assert decision.action is Action.ROUTE
    assert decision.record.degraded == ("stale_view",)
    assert decision.record.view.max_age_ms == 5001


def test_a_stale_row_backs_up_a_fresh_one() -> None:
    decision = decided(a_request(), a_fleet(a_row("a", tg=500, taken_ms=NOW - 5001), a_row("b", tg=5)))
    assert chosen_node(decision) == "b"
    assert decision.record.degraded == ()
    assert {row.row: row.out for row in decision.record.candidates} == {KEY: "backup", a_row("b").key: None}


def test_soft_pressure_excludes_until_it_would_empty_the_set() -> None:
    playing = a_row("a", tg=500, gate=Gate.SOFT, pressure=0.9, squeeze_detail="activity")
    decision = decided(a_request(), a_fleet(playing, a_row("b", tg=5)))
    assert chosen_node(decision) == "b"
    assert decision.record.excluded[0].detail == "activity"
    busier = a_row("b", gate=Gate.SOFT, pressure=0.95)
    decision = decided(a_request(), a_fleet(playing, busier))
    assert chosen_node(decision) == "a"
    assert decision.record.degraded == ("pressure",)
    assert decision.record.excluded_counts == {"pressure": 1}
    assert choice_of(decision).ahead is None
    cold = a_row("b", gate=Gate.SOFT, pressure=0.1, resident=False, loads=False)
    assert chosen_node(decided(a_request(), a_fleet(playing, cold))) == "a", "no model is loaded into a game"
    equal = a_row("b", gate=Gate.SOFT, pressure=0.9)
    decision = decided(a_request(), a_fleet(playing, equal))
    assert decision.record.excluded_counts == {}
    assert choice_of(decision).ahead is None, "its host lets nobody in who is in a hurry"


def test_a_pressed_host_of_which_news_are_late_serves_if_it_is_all_there_is() -> None:
    pressed = {"gate": Gate.SOFT, "pressure": 0.9}
    late = a_row("a", **pressed, taken_ms=NOW - 5001)
    alone = decided(a_request(), a_fleet(late))
    assert (chosen_node(alone), alone.record.degraded) == ("a", ("pressure", "stale_view"))
    assert replay(alone.record, POLICY) == alone.record
    for better, degraded in (
        (a_row("b", **pressed), "pressure"),
        (a_row("b", backup="failing"), "stale_view"),
    ):
        decision = decided(a_request(), a_fleet(late, better))
        assert (chosen_node(decision), decision.record.degraded) == ("b", (degraded,))


def test_own_uncovered_requests_count_towards_the_ceiling() -> None:
    ledger = a_ledger()
    row = a_row("a", in_flight=4, queued=6)
    fleet = a_fleet(row, live=Live(ledger=ledger))
    assert decided(a_request(), fleet).action is Action.ROUTE
    ledger.reserve(a_choice(row), NOW)
    seq = ledger.reserve(a_choice(row), NOW).seq
    assert decided(a_request(), fleet).reason is Reason.QUEUE_FULL
    ledger.end(seq)
    assert decided(a_request(), fleet).action is Action.ROUTE


def test_own_loads_under_way_probably_take_the_room_of_a_node() -> None:
    ledger = a_ledger()
    cold = a_row("a", resident=False, need_bytes=9 * GIB, fit_scale=1.0 * GIB)
    other = a_row("b", resident=False, need_bytes=9 * GIB, fit_scale=1.0 * GIB, tg=30)
    fleet = a_fleet(cold, other, live=Live(ledger=ledger))
    decision = decided(a_request(), fleet)
    assert (chosen_node(decision), choice_of(decision).need_bytes) == ("a", 9 * GIB)
    seq = ledger.reserve(choice_of(decision), NOW).seq
    assert chosen_node(decided(a_request(), fleet)) == "b"
    alone = decided(a_request(), a_fleet(cold, live=Live(ledger=ledger)))
    assert alone.action is Action.ROUTE_COLD
    assert alone.record.candidates[0].f.memory > 0.8
    ledger.end(seq)
    assert chosen_node(decided(a_request(), fleet)) == "a"


def test_another_context_on_ollama_is_a_reload_up_to_what_the_weights_allow() -> None:
    row = a_row("a", engine="ollama", resident_ctx=4096, ctx=4096, ctx_most=32_768)
    same = decided(a_request(num_ctx=4096), a_fleet(row))
    assert (same.action, choice_of(same).est.load) == (Action.ROUTE, 0.0)
    more = decided(a_request(num_ctx=16_384), a_fleet(row))
    assert (more.action, choice_of(more).est.load) == (Action.ROUTE_COLD, 5.0)
    most = decided(a_request(num_ctx=65_536, sure_tokens=60_000), a_fleet(row))
    assert most.action is Action.ROUTE_COLD, (
        "Ollama cuts num_ctx to what the weights allow, and the prompt to that"
    )
    untold = decided(a_request(num_ctx=16_384), a_fleet(a_row("a", engine="ollama", resident_ctx=None)))
    assert choice_of(untold).est.load == 0.0, "of a context that nobody tells nothing is expected"


def test_several_choices_multiply_the_work_but_not_the_context_of_each() -> None:
    decision = decided(a_request(choices=4), a_fleet(a_row("a")))
    assert choice_of(decision).output_tokens == 4 * 256
    assert decision.record.req.ctx_need == 1380 + 256


def test_no_row_at_all_is_an_absent_model() -> None:
    decision = decided(a_request(), a_fleet())
    assert (decision.reason, decision.reason.status) == (Reason.MODEL_ABSENT, 404)
    assert decision.retry_after_s is None


def test_a_deadline_that_will_probably_be_missed_moves_a_rank_and_refuses_nothing() -> None:
    slow, soon = a_row("a", pp=10, tg=500), a_row("b")
    hurried = a_request(hints=Hints(deadline_ms=6_000))
    alone = decided(hurried, a_fleet(slow))
    assert (alone.action, alone.record.candidates[0].f.slo) == (Action.ROUTE, 1.0)
    assert chosen_node(decided(hurried, a_fleet(slow, soon))) == "b"
    for left_ms, reason in ((1, None), (0, Reason.DEADLINE)):
        late = decided(replace(hurried, arrival_ms=NOW - 6_000 + left_ms), a_fleet(slow))
        assert (late.reason if late.chosen is None else None) is reason
