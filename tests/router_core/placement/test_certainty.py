"""What is only probable ranks, and never refuses: lengths, contexts, memory, times; and who may still be heard."""

import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.ids import NodeName, node_id_of
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.decision import Decision
from router_core.placement.reasons import Action, Reason
from router_core.record.state import Capability, Dialect
from tests.router_core.placement.test_plain_rules import a_chance_row
from tests.support.fleets import (
    GIB,
    NOW,
    POLICY,
    a_fleet,
    a_ledger,
    a_request,
    a_row,
    choice_of,
    chosen_node,
    decided,
    id32,
    parsed_hints,
)


def test_a_context_that_is_probably_too_small_costs_a_place_in_the_order_and_no_more() -> None:
    """aibrix#2664, warpllm#44: a refusal by an estimate met requests that the engine would have served."""
    small, large = a_row("a", ctx=4_096, tg=60), a_row("b", ctx=32_768, tg=50)
    longer = a_request(text_bytes=15_500)
    assert chosen_node(decided(a_request(), a_fleet(small, large))) == "a"
    assert chosen_node(decided(longer, a_fleet(small, large))) == "b"
    alone = decided(longer, a_fleet(small))
    assert alone.action is Action.ROUTE
    ctx_need = alone.record.req.ctx_need
    assert alone.record.candidates[0].adj == pytest.approx(POLICY.context_most * (ctx_need / 4_096 - 1))
    huge = decided(a_request(text_bytes=10**7), a_fleet(small))
    assert huge.record.candidates[0].adj == POLICY.context_most


@pytest.mark.parametrize("dialect", [Dialect.OLLAMA_CHAT, Dialect.OLLAMA_GENERATE, Dialect.OLLAMA_EMBED])
def test_a_dialect_in_which_prompts_are_cut_is_never_refused_for_its_length(dialect: Dialect) -> None:
    """ollama#14259."""
    row = a_row("a", ctx=4_096, dialects=int(dialect))
    assert decided(a_request(dialect=dialect, sure_tokens=10**6), a_fleet(row)).action is Action.ROUTE


def test_nor_is_any_at_an_engine_that_cuts_them_but_for_a_context_that_the_request_demands() -> None:
    row = a_row("a", engine="ollama", ctx=4_096)
    assert decided(a_request(sure_tokens=10**6), a_fleet(row)).action is Action.ROUTE
    demanding = a_request(hints=parsed_hints(require="ctx>=5000"))
    assert decided(demanding, a_fleet(row)).reason is Reason.CONTEXT_TOO_SMALL


def test_of_many_items_the_longest_counts_for_the_context_and_all_for_the_work() -> None:
    request = a_request(dialect=Dialect.EMBED, text_bytes=64 * 200, item_bytes=200)
    decision = decided(request, a_fleet(a_row("a", ctx=512)))
    assert (decision.action, decision.record.candidates[0].adj) == (Action.ROUTE, 0.0)
    assert choice_of(decision).prompt_tokens == 3_556
    counted = a_request(
        dialect=Dialect.EMBED,
        text_bytes=0,
        token_numbers=2_400,
        item_bytes=0,
        item_tokens=300,
        sure_tokens=300,
    )
    decision = decided(counted, a_fleet(a_row("a", ctx=512)))
    assert (decision.action, choice_of(decision).prompt_tokens) == (Action.ROUTE, 2_400)
    assert decided(replace(counted, sure_tokens=513), a_fleet(a_row("a", ctx=512))).reason.status == 400


def test_what_fits_by_its_weights_alone_is_not_refused_for_what_it_probably_needs_besides() -> None:
    cold = a_row("a", resident=False, need_bytes=17 * GIB, weight_bytes=15 * GIB, reach_bytes=16.0 * GIB)
    assert decided(a_request(), a_fleet(cold)).action is Action.ROUTE_COLD
    untold = a_row("a", resident=False, need_bytes=17 * GIB, weight_bytes=0, reach_bytes=16.0 * GIB)
    assert decided(a_request(), a_fleet(untold)).action is Action.ROUTE_COLD


def test_memory_is_too_small_by_fresh_news_alone() -> None:
    over = {"resident": False, "weight_bytes": 17 * GIB, "reach_bytes": 16.0 * GIB}
    old = decided(a_request(), a_fleet(a_row("a", taken_ms=NOW - 5_001, **over)))
    assert (old.action, old.record.degraded) == (Action.ROUTE_COLD, ("stale_view",))
    assert (
        decided(a_request(), a_fleet(a_row("a", taken_ms=NOW - 5_000, **over))).reason is Reason.DOES_NOT_FIT
    )


def test_no_estimate_times_anything_from_a_hundredth_to_a_hundred_changes_a_status() -> None:
    """P18, on rows and requests of all kinds."""

    @given(st.integers(0, 2**32), st.sampled_from([0.01, 0.1, 0.5, 2.0, 10.0, 100.0]))
    @settings(max_examples=150, deadline=None)
    def holds(seed: int, c: float) -> None:
        rng = Random(seed)
        rows = [a_chance_row(rng, number, 1) for number in range(rng.randint(1, 4))]
        request = a_request(
            text_bytes=rng.choice((40, 4_320, 30_000)),
            images=rng.randint(0, 1),
            sure_tokens=rng.choice((0, 2_000)),
            requires=rng.choice((Capability(0), Capability.VISION)),
        )
        scaled = [
            replace(
                row,
                prefill_s_per_token=c * row.prefill_s_per_token,
                token_s=c * row.token_s,
                full_token_s=c * row.full_token_s,
                load_s=c * row.load_s,
                reload_s=c * row.reload_s,
                first_s=c * row.first_s,
                need_bytes=round(c * row.need_bytes),
                way_s=c * row.way_s,
            )
            for row in rows
        ]
        policy = dataclasses.replace(
            POLICY,
            output_tokens=max(1, round(c * POLICY.output_tokens)),
            image_tokens=round(c * POLICY.image_tokens),
            prompt_slack=max(1.0, c),
            rtt_s=c * POLICY.rtt_s,
        )
        before, after = decided(request, a_fleet(*rows)), decided(request, a_fleet(*scaled), policy)
        assert before.reason.status == after.reason.status, (before.reason, after.reason)
        assert (before.chosen is None) is (after.chosen is None)

    holds()


# --- just started --------------------------------------------------------------------------------------------


def just_started(unheard: bool, ago_ms: int, *rows: Row, room: bool = True) -> Decision:
    class Hall:
        def has_room(self, body_bytes: int, share: float) -> bool:
            return room

    live = Live(ledger=a_ledger(), started_ms=NOW - ago_ms, hold=Hall())
    return decided(a_request(), replace(a_fleet(*rows, live=live), silent=SILENT if unheard else ()))


SILENT = ((node_id_of(id32("b")), NodeName("b")),)


def test_right_after_a_start_a_request_waits_for_members_that_may_have_the_model() -> None:
    waits = just_started(True, 2_000)
    assert (waits.action, waits.reason, waits.reason.status) == (Action.QUEUE, Reason.STARTING, 503)
    assert waits.hold is not None
    assert (waits.hold.since_ms, waits.hold.until_ms) == (NOW, NOW + 8_000)
    assert waits.retry_after_s is not None
    away = just_started(True, 2_000, a_row("a", down="gone"))
    assert (away.action, away.reason) == (Action.QUEUE, Reason.STARTING)


def test_a_member_that_is_demanded_and_not_heard_is_unreachable_and_a_stranger_is_none_of_the_subset() -> (
    None
):
    fleet = replace(a_fleet(a_row("a")), silent=SILENT)
    for ref in ("@b", SILENT[0][0]):
        decision = decided(a_request(hints=parsed_hints(require=f"node={ref}")), fleet)
        assert (decision.reason, decision.reason.status) == (Reason.UNREACHABLE, 503)
    for ref in ("@c", "@b~zzzz"):
        decision = decided(a_request(hints=parsed_hints(require=f"node={ref}")), fleet)
        assert (decision.reason, decision.reason.status) == (Reason.NOT_IN_SUBSET, 400)


def test_and_no_longer_than_that_nor_if_all_were_heard_nor_for_what_is_known() -> None:
    assert just_started(True, 10_000).reason is Reason.MODEL_ABSENT
    assert just_started(False, 0).reason is Reason.MODEL_ABSENT
    assert just_started(True, 0, a_row("a")).action is Action.ROUTE
    full = just_started(True, 0, room=False)
    assert (full.action, full.reason) == (Action.REJECT, Reason.STARTING)
    assert just_started(True, 0, a_row("a", ctx=1), room=False).action is Action.ROUTE
