"""What placement promises for any input, each promise with the test that tries to break it."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
HELD: dict[str, tuple[str, str]] = {
    "equal inputs and seed give one decision": (
        "router_core/placement/test_decide.py",
        "test_equal_inputs_give_equal_decisions",
    ),
    "a worse row never ranks better": (
        "router_core/placement/test_decide.py",
        "test_a_worse_row_never_ranks_better",
    ),
    "with speed alone the unit of time leaves the order": (
        "router_core/placement/test_decide.py",
        "test_with_speed_alone_the_unit_of_time_changes_no_order",
    ),
    "an excluded row is never chosen, and empty is never all": (
        "router_core/placement/test_decide.py",
        "test_an_excluded_row_is_never_chosen_and_empty_stays_empty",
    ),
    "nor is it by an authority": (
        "router_core/placement/test_advice.py",
        "test_an_authority_never_gets_an_excluded_row_chosen_and_adds_none",
    ),
    "a replay chooses what was chosen": (
        "router_core/placement/test_replay.py",
        "test_p6_a_replay_chooses_what_was_chosen_and_tells_the_same",
    ),
    "match and locality are never looser than a cap": (
        "router_core/placement/test_looseness.py",
        "test_effective_match_and_locality_are_never_looser_than_a_cap",
    ),
    "factors are numbers from 0 to 1": (
        "router_core/placement/test_decide.py",
        "test_factors_stay_in_bounds_and_the_record_can_be_written",
    ),
    "the ledger returns to zero": (
        "router_core/placement/test_ledger.py",
        "test_the_ledger_is_empty_after_any_interleaving",
    ),
    "nothing is in flight after any mix of endings": (
        "agent/node/test_whole_way.py",
        "test_any_mix_of_success_error_cancel_and_kill_leaves_nothing_in_flight",
    ),
    "no bonus beats the veto": ("router_core/placement/test_decide.py", "test_no_bonus_beats_the_veto"),
    "equal callers get equal seconds": (
        "router_core/placement/test_hold.py",
        "test_callers_that_always_have_something_waiting_get_equal_seconds",
    ),
    "an attempt has one outcome, a request at most one reply": (
        "router_core/exchange/test_machine.py",
        "test_every_attempt_has_one_outcome_and_every_request_at_most_one_reply",
    ),
    "a breaker's deadline never shortens": (
        "router_core/router/test_breaker.py",
        "test_an_open_breakers_deadline_never_shortens",
    ),
    "a short list chooses as all rows do": (
        "router_core/placement/test_large_fields.py",
        "test_the_choice_from_a_short_list_is_that_from_all_rows",
    ),
    "names with a common prefix are different models": (
        "router_core/placement/test_names.py",
        "test_names_with_a_common_prefix_never_match",
    ),
    "of a body only two spans ever change": (
        "agent/relay/test_spans.py",
        "test_only_the_models_value_changes_and_only_the_member_goes",
    ),
    "what is odd in a body passes as it came": (
        "agent/relay/test_passing.py",
        "test_a_request_body_arrives_byte_for_byte",
    ),
}


def test_every_promise_has_a_test() -> None:
    for promise, (file, name) in HELD.items():
        text = (TESTS / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), (promise, name)
