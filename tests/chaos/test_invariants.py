"""Each checker passes a good run and finds a planted violation. Needs neither root nor a network."""

import json
from typing import Any

import msgspec

from tests.support.chaos import invariants as inv
from tests.support.chaos.load import CANARY, judged
from tests.support.chaos.node import Usage
from tests.support.fleets import a_fleet, a_request, a_row, decided

BEGAN: dict[str, Any] = {"e": "began", "at": 0, "pid": 1}


def placed(seq: int = 1, **facts: object) -> dict[str, Any]:
    line = {"e": "placed", "decision": "d1", "attempt": 1, "seq": seq, "target": "aa", "own": False}
    return line | {"member": True, "serves": True, "lists": True, "state": "fresh"} | facts


def record(epoch: int, seq: int, origin: str = "aa") -> dict[str, Any]:
    return {"e": "record", "origin": origin, "state": "fresh", "epoch": epoch, "inst": 1, "seq": seq}


def request(name: str = "load-0", **facts: object) -> dict[str, Any]:
    return {"request": name, "outcome": "whole", "status": 200, "first_byte": 2.0} | facts


def begun(at: float, name: str = "load-0") -> dict[str, Any]:
    return {"e": "begun", "at": at, "execution": "1-1", "request": name}


def decision(**facts: object) -> dict[str, Any]:
    row = {"row": "n/fake", "out": None}
    record = {"id": "d1", "reason": "native", "chosen": "n/fake", "full": True, "candidates": [row]}
    return record | {"excluded": [], "excluded_counts": {"draining": 1}, "view": {"rows": 2}} | facts


def test_a_dispatch_to_a_node_that_may_not_have_it_is_found() -> None:
    assert inv.sent_only_where_allowed([BEGAN, placed(), record(1, 1)]) == []
    for fault in ({"member": False}, {"serves": False}, {"lists": False}, {"state": "gone"}, {"state": None}):
        assert inv.sent_only_where_allowed([BEGAN, placed(**fault)])


def test_a_stamp_that_falls_is_found() -> None:
    good = [
        BEGAN,
        record(1, 1),
        record(1, 2),
        record(1, 2),
        record(2, 1),
        record(1, 9, "bb"),
        record(2, 0),
        BEGAN,
        record(2, 1),
    ]
    assert inv.stamps_only_rise(good) == []
    assert inv.stamps_only_rise([BEGAN, record(1, 2), record(1, 1)])
    assert inv.stamps_only_rise([BEGAN, record(2, 1), record(1, 5)])
    assert inv.stamps_only_rise([BEGAN, record(2, 1), BEGAN, record(1, 9)])


def test_a_request_with_two_ends_or_an_execution_after_its_first_byte_is_found() -> None:
    assert inv.one_request_one_end([request()], [begun(1.0)]) == []
    assert inv.one_request_one_end([request()], [begun(0.5), begun(1.0)]) == []
    assert inv.one_request_one_end([request(), request()], [begun(1.0)])
    assert inv.one_request_one_end([request()], [begun(1.0), begun(2.5)])
    assert inv.one_request_one_end([request()], [])
    assert inv.one_request_one_end([request(outcome="vanished")], [begun(1.0)])


def test_a_reservation_that_never_ends_is_found_unless_its_process_was_killed() -> None:
    end = {"e": "reserved_end", "seq": 1}
    attempt = {"e": "attempt", "side": "api", "seq": 1}
    assert inv.reservations_end([BEGAN, placed(), attempt, end]) == []
    assert inv.reservations_end([BEGAN, placed(), BEGAN]) == []
    assert inv.reservations_end([BEGAN, placed(), attempt])
    assert inv.reservations_end([BEGAN, placed(), end])
    assert inv.reservations_end([BEGAN, placed(), attempt, end, end])


def test_members_that_disagree_are_found() -> None:
    good = {"a": {"a": "fresh", "b": "fresh"}, "b": {"a": "fresh", "b": "fresh"}}
    assert inv.members_agree(good) == []
    assert inv.members_agree(good | {"b": {"a": "suspect", "b": "fresh"}})
    assert inv.members_agree(good | {"b": {"b": "fresh"}})


def test_content_in_a_sink_is_found_in_any_spelling() -> None:
    assert inv.no_content({"log": b"an ordinary line"}, CANARY) == []
    for spelled in (CANARY.encode(), CANARY[4:16].encode(), CANARY.encode().hex().encode()):
        assert inv.no_content({"log": b"x " + spelled}, CANARY) == ["log holds the canary"]


def test_a_leak_is_found() -> None:
    before = Usage(fds=20, threads=5, children=0, rss_mib=60.0)
    assert inv.nothing_leaks(before, Usage(fds=22, threads=9, children=0, rss_mib=75.0)) == []
    for after in (
        Usage(fds=23, threads=5, children=0, rss_mib=60.0),
        Usage(fds=20, threads=10, children=0, rss_mib=60.0),
        Usage(fds=20, threads=5, children=1, rss_mib=60.0),
        Usage(fds=20, threads=5, children=0, rss_mib=85.0),
    ):
        assert len(inv.nothing_leaks(before, after)) == 1


def test_a_decision_that_does_not_explain_itself_is_found() -> None:
    assert inv.decisions_explain_themselves([decision()]) == []
    for fault in (
        {"reason": "because"},
        {"excluded_counts": {"mood": 1}},
        {"chosen": "n/other"},
        {"candidates": [{"row": "n/fake", "out": "veto"}]},
        {"view": {"rows": 3}},
        {"view": {"rows": 1}},
    ):
        assert inv.decisions_explain_themselves([decision(**fault)]), fault


def test_a_decision_that_replays_to_another_choice_is_found() -> None:
    record = decided(a_request(), a_fleet(a_row("a"), a_row("b", tg=20))).record
    line = json.loads(msgspec.json.encode(record))
    assert inv.decisions_replay([line]) == []
    assert len(inv.decisions_replay([line | {"chosen": a_row("b").key}])) == 1
    assert len(inv.decisions_replay([line | {"reason": "hint"}])) == 1
    assert inv.decisions_replay([line | {"chosen": a_row("b").key, "full": False}]) == []


def test_answers_are_judged_by_what_a_client_would_make_of_them() -> None:
    chunk = b'data: {"choices": []}\n\n'
    assert judged(200, chunk + b"data: [DONE]\n\n", True, False)["outcome"] == "whole"
    assert judged(200, chunk, True, True)["outcome"] == "cut"
    told = judged(200, chunk + b'data: {"error": {"code": "upstream_lost"}}\n\n', True, True)
    assert (told["outcome"], told["code"], told["events"]) == ("told", "upstream_lost", 1)
    assert judged(200, b"{}", False, False)["outcome"] == "whole"
    assert judged(200, b"{", False, False)["outcome"] == "cut"
    refused = judged(429, b'{"error": {"code": "queue_full"}}', False, False)
    assert (refused["outcome"], refused["code"]) == ("refused", "queue_full")
