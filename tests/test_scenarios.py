"""What NVIDIA/Personal-AI-Router#7 wants to see of routing hints and placement: each scenario with its tests on real
daemons, and with real engines wherever an engine has a part in it."""

import re
from pathlib import Path

import pytest

E2E = Path(__file__).parent / "e2e"
SHOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "a preferred node serves only if it is reachable, trusted and owns the model": (
        (
            "test_pair_scenarios.py",
            "test_a_preferred_node_serves_only_if_it_owns_the_model_is_reachable_and_trusted",
        ),
    ),
    "the fall-back is the same every time when it, or the authority, is away": (
        (
            "test_pair_scenarios.py",
            "test_a_preferred_node_serves_only_if_it_owns_the_model_is_reachable_and_trusted",
        ),
        ("test_pair_scenarios.py", "test_without_its_authority_the_choice_is_the_native_one_every_time"),
        ("test_authority.py", "test_when_it_is_away_the_choice_is_the_native_one_and_nothing_is_lost"),
    ),
    "hints of requests at the same time do not interfere": (
        ("test_hints_live.py", "test_two_concurrent_requests_with_opposite_hints_never_mix"),
    ),
    "profiles, costs and warm models move the ranking": (
        ("test_pair_scenarios.py", "test_the_rank_follows_measured_speed_and_then_what_is_loaded"),
    ),
    "pressure takes a node out and its end brings it back": (
        (
            "test_pressure.py",
            "test_a_node_whose_gpu_others_use_leaves_placement_with_the_reason_and_returns",
        ),
    ),
    "OpenAI and Ollama requests without hints are as they were": (
        ("test_hints_live.py", "test_a_request_without_hints_behaves_as_if_the_feature_were_not_there"),
        ("test_openai_client.py", "test_a_streamed_chat_arrives_in_many_events_and_ends"),
        ("test_ollama_client.py", "test_without_hints_bytes_pass_and_the_reply_says_who_served"),
    ),
    "telemetry explains and holds nothing of what was said": (
        ("test_explain_live.py", "test_what_was_routed_replays_to_the_same_choice"),
        ("test_canary.py", "test_no_sink_holds_a_word_of_a_request_or_an_answer"),
        ("test_canary.py", "test_asking_real_engines_about_their_work_keeps_none_of_it"),
    ),
    "malformed hints fail safely, and telemetry is for those with a role": (
        (
            "test_hints_live.py",
            "test_a_malformed_narrowing_hint_refuses_and_a_malformed_advisory_one_does_not",
        ),
        ("test_roles.py", "test_telemetry_is_behind_neither_door_whatever_the_role"),
        ("test_roles.py", "test_the_link_on_which_state_is_told_needs_a_role_for_it"),
    ),
    "on three unlike nodes less is loaded than by PAIR": (
        ("test_pair_scenarios.py", "test_on_unlike_nodes_fewer_loads_are_caused_than_by_pair"),
    ),
}


@pytest.mark.parametrize("scenario", SHOWN)
def test_every_scenario_has_its_tests(scenario: str) -> None:
    for file, name in SHOWN[scenario]:
        text = (E2E / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), (file, name)
