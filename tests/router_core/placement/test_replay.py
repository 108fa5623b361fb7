"""A record holds all that the choice looked at: replayed, it chooses the same row; under another policy, that policy's."""

import dataclasses
from random import Random

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.placement.candidates.fleet import Fleet, Live
from router_core.placement.decision.decide import decide
from router_core.placement.decision.replay import NotReplayable, replay
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import Counsel, Pin, PlacementRequest
from router_core.placement.scoring.survey import survey
from router_core.placement.selection.choose import choose, field_of, seed_of
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy, Weights
from router_core.router.breaker import Breakers
from tests.router_core.placement.test_advice import a_counsel, counsels
from tests.router_core.placement.test_decide import NAMES, fleets, requests
from tests.support.fleets import (
    NOW,
    POLICY,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    chosen_node,
    decided,
    parsed_hints,
    sustained,
)

policies = st.builds(
    PlacementPolicy,
    weights=st.builds(Weights, slo=st.floats(0, 1), pressure=st.floats(0, 1), speed=st.floats(0, 1)),
    hint_bonus=st.sampled_from([0.0, 0.15, 0.4]),
    affinity_bonus=st.sampled_from([0.0, 0.15, 0.4]),
    pareto_eps=st.sampled_from([0.0, 0.02, 0.2]),
    tie_fixed=st.sampled_from([0.0, 0.01, 0.3]),
    pack_below=st.sampled_from([0.0, 0.0, 0.5]),
    aliases=st.sampled_from([(), (("tiny", ("other", "tiny")),)]),
    explore_share=st.sampled_from([0.0, 0.02, 1.0]),
)
pins = st.none() | st.builds(
    lambda name, tokens, age: Pin(endpoint=a_row(name).key, model="tiny", tokens=tokens, at_ms=NOW - age),
    st.sampled_from("abcdef"),
    st.integers(0, 10**6),
    st.integers(0, 700_000),
)


@st.composite
def alike(draw: st.DrawFn) -> Fleet:
    """Nodes of which many are equal to the last digit, some of them failing, some with two models of one alias."""
    kinds = draw(st.lists(st.sampled_from([20.0, 50.0, 50.0, 50.0, 80.0]), min_size=1, max_size=24))
    names = [*NAMES, *(f"n{number}" for number in range(len(kinds)))]
    rows = [
        a_row(
            name, tg=tg, backup="failing" if number % 7 == 6 else None, samples=draw(st.sampled_from([4, 30]))
        )
        for number, (name, tg) in enumerate(zip(names, kinds, strict=False))
    ]
    rows += [a_row(name, model="other") for name in names[: draw(st.integers(0, len(kinds)))]]
    return a_fleet(*draw(st.permutations(rows)))


def without_aliases(policy: PlacementPolicy) -> PlacementPolicy:
    """``policy``, but the same rows are candidates as by default."""
    return dataclasses.replace(policy, aliases=())


def stored(record: DecisionRecord, way: str) -> DecisionRecord:
    """``record`` as the journal gives it back, or as a script reads it."""
    if way == "msgpack":
        return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=DecisionRecord)
    return msgspec.json.decode(msgspec.json.encode(record), type=DecisionRecord)


@pytest.mark.promise("a replay chooses what was chosen")
@settings(max_examples=150, deadline=None)
@given(
    fleets().map(lambda rows: a_fleet(*rows)) | alike(),
    requests,
    pins,
    st.none() | counsels,
    policies,
    st.sampled_from(["msgpack", "json"]),
)
def test_p6_a_replay_chooses_what_was_chosen_and_tells_the_same(
    fleet: Fleet,
    request: PlacementRequest,
    pin: Pin | None,
    advice: Counsel | None,
    policy: PlacementPolicy,
    way: str,
) -> None:
    decision = decide(replace(request, pin=pin, advice=advice), fleet, policy, NOW, Random(1), full=True)
    again = replay(stored(decision.record, way), policy)
    assert again.chosen == (decision.chosen and decision.chosen.endpoint)
    assert again == decision.record


@settings(max_examples=60, deadline=None)
@given(alike(), requests)
def test_the_order_in_which_rows_come_says_nothing(fleet: Fleet, request: PlacementRequest) -> None:
    orders = []
    for turn in (1, -1):
        seen = survey(request, fleet, POLICY, NOW)
        field = field_of(seen.scored[::turn], POLICY)
        chosen = choose(field, seed_of("r", 1), sustained(seen))
        orders.append([(row.key, row.model) for row in ([chosen] if chosen else []) + field.rows])
    assert orders[0] == orders[1]


@settings(max_examples=60, deadline=None)
@given(fleets().map(lambda rows: a_fleet(*rows)) | alike(), requests, pins, policies)
def test_another_policy_replays_to_what_it_would_have_chosen_from_the_same_estimates(
    fleet: Fleet, request: PlacementRequest, pin: Pin | None, policy: PlacementPolicy
) -> None:
    policy = without_aliases(policy)
    request = replace(request, pin=pin)
    before, after = (
        decide(request, fleet, rule, NOW, Random(1), full=True).record for rule in (POLICY, policy)
    )
    assume(rows_of(before) == rows_of(after))
    assert replay(before, policy).chosen == after.chosen


def rows_of(record: DecisionRecord) -> set[tuple[str, str]]:
    """The rows in the running: how many pressed ones are forgiven is the policy's too, and a record tells no others."""
    return {(row.row, row.model) for row in record.candidates}


def test_a_bonus_is_weighed_as_the_other_policy_weighs_it() -> None:
    fleet = a_fleet(a_row("near", tg=45), a_row("far", tg=50))
    record = decided(a_request(hints=parsed_hints(prefer="@near")), fleet).record
    assert (record.chosen, record.reason) == (a_row("near").key, Reason.HINT)
    without = replay(record, PlacementPolicy(hint_bonus=0.0, tie_fixed=0.0, tie_per_period=0.0))
    assert (without.chosen, without.reason) == (a_row("far").key, Reason.NATIVE)
    assert [candidate.adj for candidate in without.candidates] == [0.0, 0.0]
    back = replay(without, POLICY)
    assert (back.chosen, back.reason) == (record.chosen, record.reason)


@pytest.mark.parametrize("ref", ["@near", "@near/llamacpp", a_row("near").node_id, a_row("near").key])
def test_what_became_of_a_preference_is_told_by_the_new_choice(ref: str) -> None:
    fleet = a_fleet(a_row("near", tg=45), a_row("nearer", tg=30), a_row("far", tg=50))
    record = decided(a_request(hints=parsed_hints(prefer=f"{ref},@away")), fleet).record
    without = replay(record, PlacementPolicy(hint_bonus=0.0, tie_fixed=0.0, tie_per_period=0.0))
    for told, outcome in (
        (record, "honoured"),
        (without, "outscored"),
        (replay(without, POLICY), "honoured"),
    ):
        assert [note.outcome.value for note in told.hints] == [outcome, "ignored_unknown"]


def test_under_another_policy_a_cold_row_may_win_and_the_action_says_so() -> None:
    busy = a_row("warm", pressure=0.5, tg=20, in_flight=2)
    record = decided(a_request(), a_fleet(busy, a_row("cold", resident=False, load_s=1.5, tg=90))).record
    assert (record.chosen, record.action) == (busy.key, Action.ROUTE)
    hasty = PlacementPolicy(weights=Weights(slo=0.0, memory=0.0, switch=0.0, pressure=1.0, speed=1.0))
    again = replay(record, hasty)
    assert (again.chosen, again.action) == (a_row("cold").key, Action.ROUTE_COLD)
    assert [other.row for other in again.alternatives] == [busy.key]


def test_what_an_authority_decided_is_replayed_as_its_word() -> None:
    request = a_request(advice=a_counsel("slow"))
    record = decided(request, a_fleet(a_row("fast", tg=90), a_row("slow", tg=20))).record
    assert (record.chosen, record.reason) == (a_row("slow").key, Reason.AUTHORITY)
    assert replay(record, POLICY) == record


def test_what_was_chosen_to_learn_of_it_is_replayed_as_that() -> None:
    policy = PlacementPolicy(explore_share=1.0)
    record = decided(a_request(), a_fleet(a_row("known", tg=90), a_row("new", samples=0)), policy).record
    assert (record.chosen, record.reason) == (a_row("new").key, Reason.EXPLORE)
    assert replay(record, policy) == record


def test_a_refusal_stays_one_under_any_policy() -> None:
    refused = decided(a_request(), a_fleet(a_row("a", down="engine"))).record
    other = PlacementPolicy(tie_fixed=0.5)
    assert replay(refused, other) == replace(refused, policy_hash=other.hash)


def test_the_last_resorts_are_chosen_from_again() -> None:
    breakers = Breakers(ExchangePolicy())
    fleet = a_fleet(
        a_row("a", backup="failing"),
        a_row("b", backup="stale", tg=20),
        live=Live(ledger=a_ledger(), breakers=breakers),
    )
    record = decided(a_request(), fleet).record
    assert record.reason is Reason.DEGRADED
    assert replay(record, POLICY) == record


def test_a_short_record_cannot_be_replayed() -> None:
    fleet = a_fleet(*(a_row(f"n{number}") for number in range(40)))
    short = next(
        record
        for number in range(40)
        if not (record := decided(a_request(request_id=f"r{number}"), fleet).record).full
    )
    with pytest.raises(NotReplayable, match="only the rows nearest"):
        replay(short, POLICY)
    whole = decide(a_request(request_id=short.request_id), fleet, POLICY, NOW, Random(1), full=True)
    assert whole.record.chosen == short.chosen
    assert chosen_node(whole) is not None
