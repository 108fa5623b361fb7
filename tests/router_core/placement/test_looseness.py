"""When another model may stand in for the one asked for, how it is told, and what never qualifies."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, HintOutcome, Reason
from router_core.placement.request.hints import parse_hints
from router_core.placement.request.request import Hints, Locality, Match
from router_core.policy.placement import PlacementPolicy
from router_core.profile.bits import nominal_bits
from router_core.record.state import Dialect
from tests.support.fleets import (
    POLICY,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    choice_of,
    chosen_node,
    decided,
    parsed_hints,
)


class OneOpen:
    """Breakers of which one is open."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def __len__(self) -> int:
        return 1

    def state(self, endpoint: str, now: int) -> int:
        return 2 if endpoint == self._endpoint else 0

    def last_fault_ms(self, endpoint: str) -> int | None:
        return 1 if endpoint == self._endpoint else None

    def is_on_trial(self, endpoint: str) -> bool:
        return False


BASE, OTHER_BASE = b"base-one", b"base-two"
DOWN: dict[str, Any] = {"down": "engine"}
ONE, TWO = b"\1" * 32, b"\2" * 32


def asked(
    match: str | None, *rows: Row, policy: PlacementPolicy = POLICY, model: str = "tiny:q4", **over: Any
) -> Decision:
    hints = parsed_hints(match=match) if match is not None else Hints()
    return decided(a_request(model=model, hints=hints, **over), a_fleet(*rows), policy)


def q4(name: str = "a", **over: Any) -> Row:
    return a_row(
        name, **{"model": "tiny:q4", "base": BASE, "family": "t", "params_m": 8_000, "bits": 4.9} | over
    )


def q8(name: str = "b", **over: Any) -> Row:
    return q4(name, **{"model": "tiny:q8", "bits": 8.5} | over)


def code_of(decision: Decision, name: str) -> tuple[Reason, str | None]:
    names = decision.record.names
    return next((x.code, x.detail) for x in decision.record.excluded if names[x.row].startswith(f"@{name}/"))


def test_a_quant_twin_serves_where_it_is_allowed_and_is_named() -> None:
    decision = asked("quant", q4(**DOWN), q8())
    assert decision.action is Action.ROUTE
    assert choice_of(decision).model == "tiny:q8"
    assert choice_of(decision).match is Match.QUANT
    (candidate,) = decision.record.candidates
    assert (candidate.level, candidate.adj) == (1, 0.1)
    assert decision.record.req.model_asked == "tiny:q4"
    assert decision.record.req.match == "quant"


@pytest.mark.parametrize("match", [None, "exact"])
def test_a_quant_twin_never_serves_unasked(match: str | None) -> None:
    decision = asked(match, q4(**DOWN), q8())
    assert decision.action is Action.REJECT
    assert decision.reason is Reason.UNREACHABLE
    assert decision.record.view.rows == 1


def test_the_operators_cap_holds_and_is_told() -> None:
    decision = asked("any", q4(**DOWN), q8(), policy=replace(POLICY, match_cap=Match.EXACT))
    assert decision.action is Action.REJECT
    assert decision.record.req.match == "exact"
    assert [note.outcome for note in decision.record.hints] == [HintOutcome.CLAMPED]


def test_a_looser_level_stays_shut_while_the_model_itself_meets_its_targets() -> None:
    decision = asked("any", q4(tg=20), q8(tg=200))
    assert chosen_node(decision) == "a"
    assert choice_of(decision).match is Match.EXACT
    assert code_of(decision, "b") == (Reason.MODEL_ABSENT, "better_match")


def test_a_looser_level_opens_when_the_model_itself_would_be_late() -> None:
    decision = asked("quant", q4(in_flight=4, queued=7), q8())
    assert chosen_node(decision) == "b"
    levels = {candidate.model: candidate.level for candidate in decision.record.candidates}
    assert levels == {"tiny:q4": 0, "tiny:q8": 1}


def test_the_penalty_keeps_equals_with_the_model_itself() -> None:
    decision = asked("quant", q4(pp=100.0, tg=5.0), q8(pp=100.0, tg=5.0))
    assert chosen_node(decision) == "a"
    assert decision.record.alternatives[0].top_factor == "adj"


@pytest.mark.parametrize(
    ("over", "level"),
    [
        ({}, 1),
        ({"bits": 3.9}, None),
        ({"bits": 4.0}, 1),
        ({"bits": None}, 2),
        ({"bits": None, "family": None}, None),
        ({"base": None}, 2),
        ({"base": OTHER_BASE}, 2),
        ({"base": OTHER_BASE, "params_m": 7_999}, None),
        ({"base": OTHER_BASE, "params_m": None}, None),
        ({"base": OTHER_BASE, "family": "u"}, None),
        ({"base": OTHER_BASE, "family": None}, None),
        ({"base": OTHER_BASE, "params_m": 70_000}, 2),
        ({"base": OTHER_BASE, "bits": 2.5}, None),
    ],
)
def test_what_is_unknown_or_too_coarse_or_too_small_never_qualifies(
    over: dict[str, Any], level: int | None
) -> None:
    decision = asked("family", q4(**DOWN), q8(**over))
    if level is None:
        assert decision.action is Action.REJECT
        assert decision.record.view.rows == 1
    else:
        assert decision.record.candidates[0].level == level


@pytest.mark.parametrize("field", ["base", "family", "params_m"])
def test_of_a_model_whose_own_lineage_is_unknown_nothing_is_kin(field: str) -> None:
    match = "quant" if field == "base" else "family"
    twin = q8() if field == "base" else q8(base=OTHER_BASE)
    unknown: dict[str, Any] = {field: None}
    assert asked(match, q4(**DOWN, **unknown), twin).action is Action.REJECT


def test_owners_that_contradict_each_other_about_the_base_make_it_unknown() -> None:
    twins = (q4("a", **DOWN), q4("c", **DOWN, base=OTHER_BASE))
    assert asked("quant", *twins, q8()).action is Action.REJECT
    assert asked("quant", twins[0], q4("c", **DOWN), q8()).action is Action.ROUTE


def test_a_required_least_number_of_bits_holds_on_every_level() -> None:
    hints = parsed_hints(match="family", require="bits>=8")
    fleet = a_fleet(q4(), q8(), q8("c", model="tiny:q5", bits=5.7))
    decision = decided(a_request(model="tiny:q4", hints=hints), fleet)
    assert chosen_node(decision) == "b"
    assert decision.record.excluded_counts == {"capability": 2}


def test_a_required_size_takes_the_place_of_the_asked_models_own() -> None:
    smaller = q8(base=OTHER_BASE, params_m=3_000)
    hints = parsed_hints(match="family", require="params>=2")
    assert asked("family", q4(**DOWN), smaller).action is Action.REJECT
    decision = decided(a_request(model="tiny:q4", hints=hints), a_fleet(q4(**DOWN), smaller))
    assert chosen_node(decision) == "b"


def test_any_is_the_operators_pool_and_nothing_else() -> None:
    fleet = a_row("b", model="big"), a_row("c", model="other")
    assert asked("any", *fleet, model="gone").reason is Reason.MODEL_ABSENT
    pool = replace(POLICY, match_any_pool=("big",))
    decision = asked("any", *fleet, model="gone", policy=pool)
    assert choice_of(decision).model == "big"
    assert (decision.record.candidates[0].level, decision.record.candidates[0].adj) == (3, 0.5)
    assert decision.record.req.model_asked == ""
    assert asked("family", *fleet, model="gone", policy=pool).reason is Reason.MODEL_ABSENT


def test_a_refusal_for_lack_of_stand_ins_never_tells_the_name_that_nobody_offers() -> None:
    rows = a_row("b", model="big", draining=True), a_row("c", model="gone2")
    decision = asked("any", *rows, model="gone", policy=replace(POLICY, match_any_pool=("big",)))
    assert decision.reason is Reason.DRAINING
    assert decision.record.req.model_asked == ""


def test_embeddings_are_never_mixed_with_those_of_another_model() -> None:
    embed: dict[str, Any] = {"dialect": Dialect.EMBED}
    related = q8(base=OTHER_BASE)
    assert asked("family", q4(**DOWN), related, **embed).action is Action.REJECT
    decision = asked("family", q4(**DOWN), q8(), **embed)
    assert choice_of(decision).match is Match.QUANT
    assert decision.record.req.match == "quant"


def test_another_digest_of_the_same_name_counts_by_its_lineage() -> None:
    rows = q4("a", digest=ONE, **DOWN), q4("c", digest=ONE, **DOWN), q4("b", digest=TWO, bits=8.5)
    exact = asked(None, *rows, model=f"tiny:q4@sha256:{ONE.hex()}")
    assert exact.reason is Reason.MODEL_ABSENT
    assert code_of(exact, "b") == (Reason.MODEL_ABSENT, "digest")
    loose = asked("quant", *rows, model=f"tiny:q4@sha256:{ONE.hex()}")
    assert chosen_node(loose) == "b"
    assert choice_of(loose).match is Match.QUANT
    assert loose.record.excluded_counts == {"unreachable": 2}


def test_an_aliass_price_comes_on_top_of_the_levels() -> None:
    policy = replace(POLICY, aliases=(("chat", ("other", "tiny:q4")),))
    decision = asked("quant", q4(**DOWN), q8(), model="chat", policy=policy)
    assert choice_of(decision).model == "tiny:q8"
    assert decision.record.candidates[0].adj == pytest.approx(0.15)


def test_an_alias_means_one_digest_of_each_of_its_names() -> None:
    policy = replace(POLICY, aliases=(("chat", ("tiny", "small")),))
    rows = (
        a_row("a", digest=ONE, draining=True),
        a_row("b", digest=ONE, draining=True),
        a_row("c", digest=ONE, draining=True, model="copy"),
        a_row("d", digest=TWO, draining=True),
        a_row("e", model="small", in_flight=1),
    )
    decision = asked(None, *rows, model="chat", policy=policy)
    assert chosen_node(decision) == "e"
    assert decision.record.degraded == ("digest_conflict",)
    assert decision.record.excluded_counts == {"draining": 3}


def test_after_a_failure_a_stand_in_may_take_over() -> None:
    decision = asked("quant", q4(), q8(), tried=frozenset([q4().key]))
    assert (chosen_node(decision), choice_of(decision).match) == ("b", Match.QUANT)
    assert decision.record.excluded_counts == {"tried": 1}


def test_a_stand_in_probed_behind_its_open_breaker_stays_one() -> None:
    live = Live(ledger=a_ledger(), breakers=OneOpen(q8().key))
    fleet = a_fleet(q4(**DOWN), q8(), live=live)
    decision = decided(a_request(model="tiny:q4", hints=parsed_hints(match="quant")), fleet)
    assert decision.record.degraded == ("probe",)
    assert choice_of(decision).match is Match.QUANT
    assert decision.record.candidates[0].adj == 0.1


@pytest.mark.parametrize(
    ("wanted", "offered"),
    [
        ("tiny:q4", "Tiny:q4"),
        ("tiny:q4", "tiny:q4-long"),
        ("tiny:q4", "tiny"),
        ("tiny", "tiny:latest"),
        ("org/tiny", "tiny"),
        ("hf.co/u/tiny:q4", "hf.co/u/tiny:q8"),
        ("registry.example/tiny:q4", "tiny:q4"),
    ],
)
@pytest.mark.parametrize("match", ["exact", "quant", "family", "any"])
def test_names_that_look_alike_are_no_kin_at_any_level(wanted: str, offered: str, match: str) -> None:
    rows = a_row("a", model=wanted, **DOWN), a_row("b", model=offered)
    assert asked(match, *rows, model=wanted).action is Action.REJECT


_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(["tiny:q4", "tiny:q8", "tiny", "big"]),
            "digest": st.sampled_from([None, ONE, TWO]),
            "base": st.sampled_from([None, BASE, OTHER_BASE]),
            "family": st.sampled_from([None, "t", "u"]),
            "params_m": st.sampled_from([None, 3_000, 8_000]),
            "bits": st.sampled_from([None, 2.5, 4.9, 8.5]),
            "cloud": st.booleans(),
            "is_self": st.booleans(),
            "down": st.sampled_from([None, None, "engine"]),
            "queued": st.sampled_from([0, 11]),
        }
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.promise("match and locality are never looser than a cap")
@settings(max_examples=200, deadline=None)
@given(
    _ROWS,
    st.sampled_from(Match),
    st.sampled_from(Match),
    st.sampled_from(Locality),
    st.sampled_from(Locality),
)
def test_effective_match_and_locality_are_never_looser_than_a_cap(
    rows: list[dict[str, Any]],
    match: Match,
    cap: Match,
    locality: Locality,
    spill_cap: Locality,
) -> None:
    fleet = a_fleet(*(a_row(f"n{i}", **fields) for i, fields in enumerate(rows)))
    policy = replace(POLICY, match_cap=cap, spill_cap=spill_cap, match_any_pool=("big",))
    hints = Hints(match=match, locality=locality)
    decision = decided(a_request(model="tiny:q4", hints=hints), fleet, policy)
    for candidate in decision.record.candidates:
        row = fleet.row(candidate.row, candidate.model)
        assert row is not None
        assert candidate.level <= min(match.level, cap.level)
        assert row.is_self or Locality.HOST not in (locality, spill_cap)
        assert not row.cloud or (locality, spill_cap) == (Locality.ANY, Locality.ANY)
        if candidate.level == 0:
            assert row.model == "tiny:q4" or row.digest is not None
        elif candidate.level == 1:
            assert row.base is not None
            assert row.bits is not None
            assert row.bits >= policy.match_min_bits
        elif candidate.level == 2:
            assert row.family is not None
            assert row.params_m is not None
        else:
            assert row.model == "big"
    if decision.chosen is not None:
        assert decision.chosen.match.level <= min(match.level, cap.level)


def test_bits_are_known_by_whole_names_and_unknown_ones_stay_unknown() -> None:
    least = POLICY.match_min_bits
    fine = [
        "F16",
        "Q8_0",
        "Q4_K_M",
        "Q4_K",
        "Q3_K_L",
        "MXFP4",
        "IQ4_XS",
        "AWQ",
        "GPTQ-4",
        "gptq_int8",
        "FP8_E4M3",
    ]
    coarse = ["Q3_K_M", "Q3_K_S", "Q2_K", "IQ3_XXS", "IQ1_S", "GPTQ-3", "AWQ-2BIT"]
    assert all((nominal_bits(name) or 0.0) >= least for name in fine)
    assert all(0.0 < (nominal_bits(name) or 0.0) < least for name in coarse)
    assert [nominal_bits(name) for name in ("", "K_M", "XQ4_0", "AWQ-MIXED", None)] == [None] * 5
    ordered = [nominal_bits(name) or 0.0 for name in ("Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S")]
    assert ordered == sorted(set(ordered), reverse=True)


def test_a_body_may_ask_for_a_looser_match() -> None:
    hints = parse_hints([], b'{"match": "quant"}')
    assert isinstance(hints, Hints)
    decision = decided(a_request(model="tiny:q4", hints=hints), a_fleet(q4(**DOWN), q8()))
    assert choice_of(decision).match is Match.QUANT
