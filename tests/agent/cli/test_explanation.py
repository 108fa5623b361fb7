"""Claims about explanations: the words follow the record, every code has words, no name repaints a screen."""

from textwrap import dedent
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli.explanation import (
    AGAINST,
    AUTHORITY,
    CHOICES,
    EXCLUSIONS,
    HINTS,
    NOBODY,
    REFUSALS,
    explain,
    explain_again,
    explain_dry,
)
from router_core.placement.reasons import EXCLUSIONS as FILTERS
from router_core.placement.reasons import Action, AuthorityOutcome, HintOutcome, Reason
from router_core.placement.record import (
    Alternative,
    Attempt,
    AuthorityNote,
    DecisionRecord,
    Ending,
    Excluded,
    Factors,
    ViewFacts,
)
from router_core.placement.request.request import HintNote
from router_core.policy.authority import AuthorityMode
from tests.agent.observe.records import candidate, record


def told(**changes: Any) -> str:
    made: DecisionRecord = replace(record(), **changes)
    return explain(made)


def test_a_served_request_in_full() -> None:
    assert explain(record()) == dedent(
        """\
        decision AAAAAAAAAAAAAAAAAAAAAAAAAA for request req-1, by policy balanced 3f2a91c0
        asked for llama3.2, that is llama3.2:3b (chat, interactive, streamed): about 1,200 prompt tokens; 256 expected back; needs tools

        chosen: @atlas/ollama, because it costs least by its estimates
          warm: the model is in memory
          expected: first token in 0.31 s (prompt 0.30 s, network 10 ms), all in 3.1 s, 91 tokens/s, give or take 30%
          based on state 0.40 s old

        scores, lowest first:
                          score    slo  memory  switch  pressure  speed    adj  ahead   wait   load  first token  all in    cost
        *  @atlas/ollama  0.030  0.030   0.000   0.000     0.100  0.100  0.000    0.0    0 s    0 s       0.31 s   3.1 s  0.59 s
           @borg/vllm     0.240  0.240   0.000   0.000     0.100  0.100  0.000    2.1  1.6 s    0 s        2.0 s   4.8 s   5.2 s
           @tiny/ollama   0.640  0.640   0.000   0.000     0.100  0.100  0.000    0.0    0 s  8.0 s        8.3 s  11.1 s   8.6 s  cold, veto

        runners-up:
          @borg/vllm    score 0.240 against 0.030  slower or less certain to answer in time
          @tiny/ollama  score 0.640 against 0.030  tight on memory; set aside: one factor is as bad as can be

        left out: 2 candidates
          @laptop/ollama  is under pressure (activity)
          @old/llamacpp   does not support what the request needs (tools)

        hint prefer @tiny: considered, but another was better by more than the bonus

        attempt 1: sent to @atlas/ollama after 2 ms, connected after 3 ms, first byte after 280 ms, done

        outcome: status 200 after 3.1 s, first token after 0.28 s, 251 tokens
          first token: predicted 0.31 s, was 0.28 s (10% shorter)
          whole answer: predicted 3.1 s, was 3.1 s (as predicted)
        """
    )


def test_a_refused_request_in_full() -> None:
    refused = replace(
        record(),
        action=Action.REJECT,
        reason=Reason.QUEUE_FULL,
        chosen=None,
        margin=None,
        candidates=(),
        alternatives=(),
        hints=(),
        excluded=(Excluded(row="@atlas/ollama", code=Reason.QUEUE_FULL),),
        excluded_counts={"queue_full": 3, "unreachable": 1},
        attempts=(),
        outcome=None,
    )
    assert explain(refused) == dedent(
        """\
        decision AAAAAAAAAAAAAAAAAAAAAAAAAA for request req-1, by policy balanced 3f2a91c0
        asked for llama3.2, that is llama3.2:3b (chat, interactive, streamed): about 1,200 prompt tokens; 256 expected back; needs tools

        refused (queue_full, status 429): no endpoint has a free slot or room in its queue

        left out: 4 candidates
          @atlas/ollama  has no free slot, and its queue is full
          and 2 more that each has no free slot, and its queue is full
          and 1 more that each is not reachable, or its engine is not running

        outcome: not known yet
        """
    )


def test_a_wait_for_room_is_told_with_its_length() -> None:
    nobody: dict[str, object] = {"chosen": None, "margin": None, "candidates": (), "alternatives": ()}
    held = told(
        action=Action.QUEUE,
        reason=Reason.QUEUE_FULL,
        outcome=Ending(status=429, total_ms=60_010, held_ms=60_000),
        **nobody,
    )
    assert "queued (queue_full): no candidate has room for its class" in held
    assert "outcome: status 429 after 60.0 s, waited 60.0 s for room\n" in held
    put_off = told(action=Action.QUEUE, reason=Reason.SHED, **nobody)
    assert "queued (shed): all candidates are so busy that background requests wait" in put_off
    shed = told(action=Action.SHED, reason=Reason.SHED, **nobody)
    assert "refused (shed, status 429): all candidates are so busy" in shed


def test_a_refusal_names_what_no_endpoint_supports() -> None:
    nobody: dict[str, object] = {"chosen": None, "margin": None, "candidates": (), "alternatives": ()}
    requires = replace(record().req, requires=("vision",))
    text = told(action=Action.REJECT, reason=Reason.CAPABILITY, req=requires, **nobody)
    assert "refused (capability, status 400): no endpoint supports vision\n" in text
    requires = replace(requires, requires=("streaming", "vision"))
    text = told(action=Action.REJECT, reason=Reason.CAPABILITY, req=requires, **nobody)
    assert "no endpoint supports all of streaming, vision\n" in text


def test_a_choice_among_loaded_hosts_says_so_with_what_loads_them() -> None:
    text = told(reason=Reason.DEGRADED, degraded=("digest_conflict", "pressure"))
    assert "because all candidates are under load (activity)\n" in text
    assert "  note: endpoints have different files under this model's name\n" in text
    assert "  note: all candidates" not in text
    preferred = told(reason=Reason.HINT, degraded=("stale_view",))
    assert "  note: the state of all candidates is too old to rank by\n" in preferred


def test_a_model_nobody_offers_is_said_so() -> None:
    text = told(
        action=Action.REJECT,
        reason=Reason.MODEL_ABSENT,
        chosen=None,
        view=ViewFacts(gen=1, max_age_ms=0, m_r=3, rows=0),
        excluded=(),
        excluded_counts={},
    )
    assert "refused (model_absent, status 404): no node offers the model\n" in text


def test_a_cold_choice_says_that_it_loads_first() -> None:
    text = told(
        action=Action.ROUTE_COLD,
        chosen="@tiny/ollama",
        candidates=(candidate("@tiny/ollama", 0.5, resident=False),),
        alternatives=(),
    )
    assert "  cold: the model must be loaded first\n" in text
    assert "load 8.0 s" in text
    assert "nothing else could have served it\n" in text


def test_when_it_was_decided_is_told_where_that_is_known() -> None:
    assert " for request req-1 at 2026-11-30T05:18:29Z, by policy" in told(at_ms=1_796_015_909_341)


def test_a_draw_among_rows_that_are_as_good_is_called_one() -> None:
    drawn: dict[str, object] = {
        "chosen": "@borg/vllm",
        "candidates": (candidate("@borg/vllm", 0.11), candidate("@atlas/ollama", 0.1)),
        "alternatives": (Alternative(row="@atlas/ollama", score=0.1, top_factor="memory"),),
    }
    text = told(**drawn)
    assert "chosen: @borg/vllm, because it was drawn among those that cost least by their estimates" in text
    assert "@atlas/ollama  score 0.100 against 0.110  as good: the draw went the other way\n" in text
    even = told(
        **(drawn | {"candidates": (candidate("@borg/vllm", 0.0999), candidate("@atlas/ollama", 0.1))})
    )
    assert "because it costs least" in even
    assert "as good: the draw went the other way\n" in even
    led = told(**drawn, reason=Reason.AUTHORITY)
    assert "because the authority asked about it said so" in led
    cold = replace(candidate("@atlas/ollama", 0.1, resident=False), out="cold")
    text = told(**(drawn | {"candidates": (candidate("@borg/vllm", 0.11), cold)}))
    assert "because it costs least" in text
    assert "cold, cold" not in text


def test_what_stood_in_and_what_left_the_mesh_is_said_so() -> None:
    far = replace(candidate("@tiny/ollama", 0.5), level=1, price=0.0123)
    kept = (
        Excluded(row="@a/x", code=Reason.LOCALITY, detail="not_needed"),
        Excluded(row="@b/y", code=Reason.MODEL_ABSENT, detail="better_match"),
    )
    text = told(action=Action.SPILL, chosen="@tiny/ollama", candidates=(far,), alternatives=(), excluded=kept)
    assert f"  as {far.model}: the same weights in another quantisation\n" in text
    assert "  outside the mesh, at a price of about 0.0123\n" in text
    assert "@a/x  is outside the mesh, which did well enough\n" in text
    assert "@b/y  has another model, and the one asked for did well enough\n" in text


def test_a_preferred_node_that_was_left_out_is_explained_by_its_reason() -> None:
    note = HintNote(hint="prefer", ref="@laptop", outcome=HintOutcome.EXCLUDED, detail="pressure")
    assert "hint prefer @laptop: not possible: it is under pressure\n" in told(hints=(note,))


def test_a_failover_shows_each_attempt() -> None:
    attempts = (
        Attempt(row="@borg/vllm", start_ms=1, connect_ms=2, result="reset"),
        Attempt(row="@cyan/vllm", start_ms=4, result="refused", refused="queue_full"),
        Attempt(row="@atlas/ollama", start_ms=9, connect_ms=10, first_byte_ms=300, result="done"),
    )
    text = told(attempts=attempts)
    assert "attempt 1: sent to @borg/vllm after 1 ms, connected after 2 ms, reset\n" in text
    assert "attempt 2: sent to @cyan/vllm after 4 ms, declined there: queue_full, refused\n" in text


@pytest.mark.parametrize(
    ("error", "said"),
    [(0.02, "as predicted"), (0.5, "65% longer"), (-0.5, "39% shorter"), (1.2, "3.3 times as long")],
)
def test_the_prediction_is_compared_with_what_happened(error: float, said: str) -> None:
    assert f"({said})" in told(outcome=Ending(status=200, total_ms=1, err_ttft=error))


def test_a_dominated_row_names_the_better_one() -> None:
    rows = (candidate("@a/x", 0.1), candidate("@b/x", 0.2, out="dominated:@a/x"))
    text = told(
        candidates=rows, chosen="@a/x", alternatives=(Alternative(row="@b/x", score=0.2, top_factor="speed"),)
    )
    assert "slower overall; @a/x is at least as good in everything\n" in text


def test_a_long_record_shows_the_best_candidates_and_counts_the_rest() -> None:
    rows = [candidate(f"@n{number:02}/x", number / 100) for number in range(30)]
    text = told(candidates=(rows.pop(3), *rows), chosen="@n03/x", alternatives=())
    assert "*  @n03/x" in text
    assert "@n15/x" in text
    assert "@n16/x" not in text
    assert "  and 14 more\n" in text
    assert "scores, lowest first; the nearest of 5 only:\n" in told(full=False)
    assert "rows besides could serve" not in text
    many = ViewFacts(gen=1, max_age_ms=0, m_r=3, rows=90, cut=40)
    assert "  40 candidates besides could serve, but would be done later than all of these\n" in told(
        view=many
    )


def test_what_was_asked_of_an_authority_is_told() -> None:
    note = AuthorityNote(
        mode=AuthorityMode.ADVISORY, outcome=AuthorityOutcome.USED, ms=12, reason="quota", first="@borg/vllm"
    )
    assert "authority (advisory): its answer counted, after 12 ms, saying: quota\n" in told(authority=note)
    assert "authority" not in told()


def test_a_dry_run_says_nothing_of_what_came_of_it() -> None:
    text = explain_dry(replace(record(), outcome=None, attempts=()))
    assert text.startswith("dry run AAAA")
    assert "outcome" not in text


def test_a_replay_says_whether_it_comes_to_the_same() -> None:
    before = record()
    assert ", by the policy that made it, comes to the same: llama3.2:3b at @atlas/ollama\n" in explain_again(
        before, before
    )
    borg, *rest = before.candidates[1], before.candidates[0]
    latency = {"policy": "latency", "policy_hash": "77" * 16}
    other = replace(before, chosen="@borg/vllm", candidates=(borg, *rest), **latency)
    head = explain_again(before, other).splitlines()[0]
    assert head.endswith(
        "by policy latency 77777777, comes to something else: llama3.2:3b at @borg/vllm instead of llama3.2:3b at @atlas/ollama"
    )


def test_names_of_others_cannot_repaint_the_screen() -> None:
    text = told(
        chosen="@x\x1b[2J/y\n", excluded=(Excluded(row="@z\r", code=Reason.PRESSURE, detail="\x9b1m"),)
    )
    assert text.replace("\n", "").isprintable()
    assert "\\x1b[2J" in text


def test_every_code_has_words() -> None:
    assert set(EXCLUSIONS) == set(FILTERS) == {*NOBODY, Reason.CAPABILITY}
    assert set(HINTS) == set(HintOutcome)
    assert {*AUTHORITY, AuthorityOutcome.OFF} == set(AuthorityOutcome)
    assert set(EXCLUSIONS) | set(CHOICES) | set(REFUSALS) == set(Reason)
    assert {*Factors.__struct_fields__, "adj", "draw"} == set(AGAINST)
