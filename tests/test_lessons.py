"""Every lesson that others paid for has a test here: what broke elsewhere, and what keeps it from breaking in pairmesh.

Named by project and issue.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parent
LAST = 29
COVERED: dict[int, tuple[str, str]] = {
    # vllm-project/router#179: a route that was never counted
    1: (
        "agent/relay/test_every_route.py",
        "test_a_request_counts_from_its_arrival_at_the_engine_until_its_end",
    ),
    # sgl-project/sglang#27547: a burst all to the first worker
    2: ("router_core/placement/test_decide.py", "test_a_burst_in_one_turn_spreads_over_equal_nodes"),
    # vllm-project/router#197: probes reset the load
    3: ("agent/node/test_books.py", "test_looking_at_engines_in_mid_burst_changes_no_count"),
    # sgl-project/sglang#14305: affinity that ignores load
    4: ("router_core/placement/test_decide.py", "test_a_pinned_session_stays_until_its_row_is_busy"),
    # kubernetes-sigs/gateway-api-inference-extension#189: routers that disagree
    5: ("router_core/placement/test_herd.py", "test_eight_routers_with_old_pictures_stay_near_an_oracle"),
    # kubernetes-sigs/gateway-api-inference-extension#2294: stale pictures trusted, or all dropped
    6: (
        "router_core/placement/test_eligibility.py",
        "test_when_every_picture_is_stale_the_backups_serve_and_say_so",
    ),
    # vllm-project/production-stack#420: a dead node dialled again and again
    7: (
        "agent/node/test_whole_way.py",
        "test_an_endpoint_that_refuses_is_dialled_once_and_then_left_alone",
    ),
    # llm-d/llm-d#1564: a kept connection reset on reuse
    8: ("agent/relay/test_failover.py", "test_a_reused_socket_that_was_closed_meanwhile_costs_no_attempt"),
    # BerriAI/litellm#30245: an engine that generates for nobody
    9: ("agent/relay/test_passing.py", "test_the_engine_is_cancelled_when_the_client_leaves"),
    # ai-dynamo/dynamo#475: tokens repeated after a failover
    10: ("router_core/exchange/test_machine.py", "test_after_commit_a_loss_is_told_and_never_retried"),
    # vllm-project/vllm-ascend#13140: 200, then nothing
    11: (
        "router_core/exchange/test_machine.py",
        "test_headers_then_death_is_a_failover_and_never_an_empty_answer",
    ),
    # BerriAI/litellm#40130: arithmetic of cool-downs
    12: ("router_core/router/test_breaker.py", "test_an_open_breakers_deadline_never_shortens"),
    # BerriAI/litellm#33214: 0 read as not told
    13: ("router_core/placement/test_hint_routing.py", "test_a_told_output_of_zero_stays_zero"),
    # a half-open node that wins on rank
    14: (
        "router_core/placement/test_eligibility.py",
        "test_an_open_breaker_excludes_and_a_half_open_one_is_the_last_resort",
    ),
    # thushan/olla#191: an alias of nothing that means everything
    15: (
        "router_core/placement/test_names.py",
        "test_an_alias_to_absent_models_is_absent_not_everything",
    ),
    # thushan/olla#139: stickiness that is silently off
    16: ("agent/node/test_whole_way.py", "test_every_path_keeps_a_session_where_it_was_and_says_so"),
    # ollama/ollama#17408: a list that is green while generation hangs
    17: ("agent/node/test_silence.py", "test_a_suspect_serves_only_if_nobody_else_can"),
    # ggml-org/llama.cpp#21678: a swap that kills what runs
    18: (
        "agent/engines/test_control.py",
        "test_a_model_with_a_request_in_it_is_not_unloaded_whoever_sent_it",
    ),
    # vllm-project/production-stack#687: tables that grow
    19: ("agent/node/test_books.py", "test_names_that_only_ever_come_once_fill_no_table"),
    # pictures counted as text
    20: ("agent/node/test_whole_way.py", "test_a_picture_costs_its_800_tokens_however_many_bytes_it_has"),
    # BerriAI/litellm#32202: a client's key that leaks
    21: ("agent/relay/test_passing.py", "test_credentials_hints_and_cookies_never_go_upstream"),
    # dstackai/dstack#4269: streams that are held back
    22: (
        "agent/relay/test_passing.py",
        "test_each_write_of_a_stream_arrives_before_the_next_is_sent",
    ),
    # bodies without a limit
    23: ("agent/relay/test_intake.py", "test_a_body_beyond_the_limit_is_refused_before_it_is_read"),
    # mem0ai/mem0#4101: the wrong model, or none, for a name
    24: ("router_core/placement/test_names.py", "test_case_tag_registry_and_prefix_twins"),
    # decisions swapped between requests
    25: ("agent/node/test_own_records.py", "test_64_concurrent_replies_name_their_own_records"),
    # exo-explore/exo#2180: a CPU before a GPU
    26: (
        "router_core/placement/test_fleet.py",
        "test_a_ram_host_is_ranked_below_a_gpu_host_by_priors_alone",
    ),
    # quadratic work per request
    27: (
        "router_core/placement/test_large_fields.py",
        "test_rows_that_nothing_tells_apart_are_not_each_held_against_each",
    ),
    # bodies written anew, and [DONE] after an error
    28: (
        "agent/relay/test_failover.py",
        "test_after_the_first_byte_a_loss_is_told_without_done_and_without_a_last_chunk",
    ),
    # mudler/LocalAI#9583: a load repeated every 30 s
    29: (
        "router_core/placement/residency/test_machine.py",
        "test_a_load_that_fails_again_and_again_is_tried_ever_less",
    ),
}


def test_every_lesson_has_a_test() -> None:
    assert COVERED.keys() == set(range(1, LAST + 1))
    for file, name in COVERED.values():
        assert re.search(rf"^(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE), (file, name)
