"""Claims about the questions of the admin API: what is asked is decided by what routes, and nothing is changed by it."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.admin.ports import NoRoute
from agent.admin.questions import ExplainBody, read_body
from agent.node.status.dry_run import DryRuns
from agent.relay.dialects.relayed import RELAYED
from router_core import limits
from router_core.placement.reasons import Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.request import Pin
from router_core.placement.sessions import session_key
from router_core.record.spelling import CAPABILITIES, DIALECTS
from tests.agent.admin.daemon import CANARY, Daemon
from tests.agent.node.rig import World, an_endpoint, key_of

JSON = {"Content_Type": "application/json"}


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    async with Daemon(tmp_path) as running:
        yield running


async def asked(daemon: Daemon, path: str = "/v1/explain", **facts: Any) -> tuple[int, dict[str, Any]]:
    code, _, body = await daemon.tcp(path, "POST", msgspec.json.encode(facts), **JSON)
    return code, json.loads(body)


async def supposed(daemon: Daemon, **facts: Any) -> DecisionRecord:
    code, told = await asked(daemon, **{"model": "tiny", **facts})
    assert code == 200, told
    return msgspec.convert(told, DecisionRecord)


async def test_a_dry_run_answers_with_the_record_of_the_decision_over_both_listeners(daemon: Daemon) -> None:
    ask: Callable[..., Awaitable[tuple[int, dict[str, str], bytes]]]
    for ask in (daemon.tcp, daemon.sock):
        code, _, body = await ask("/v1/explain", "POST", b'{"model":"tiny","prompt_tokens":700}', **JSON)
        assert code == 200
        record = msgspec.json.decode(body, type=DecisionRecord)
        assert record.chosen in (key_of("me"), key_of("beta"))
        assert (record.req.model_asked, record.req.prompt_tokens, record.full) == ("tiny", 700, True)


async def test_a_dry_run_decides_as_the_request_itself_would(daemon: Daemon) -> None:
    for number in range(16):
        request_id = f"req-{number}"
        record = await supposed(
            daemon, prompt_tokens=1_112, headers={"X-Request-Id": request_id, "X-Pairmesh-Class": "batch"}
        )
        choosing = daemon.world.ask(request_id, headers=(("x-pairmesh-class", "batch"),), body_bytes=4_003)
        daemon.world.route(choosing)
        assert choosing.decision is not None
        real = choosing.decision.record
        daemon.world.router.ledger.end(1 + number)
        same = ("chosen", "action", "reason", "request_id", "seed", "candidates", "alternatives", "req")
        assert [getattr(record, name) for name in same] == [getattr(real, name) for name in same]


async def test_a_dry_run_reserves_keeps_and_counts_nothing(daemon: Daemon) -> None:
    world = daemon.world
    before = "".join(str(family) for family in world.placing.metrics.collect())
    for _ in range(3):
        await supposed(daemon, headers={"x-session-id": "s"})
    assert (len(world.router.ledger), world.kept.records, world.placing.open, len(world.router.sessions)) == (
        0,
        [],
        {},
        0,
    )
    assert await daemon.journal.recent(10) == []
    assert "".join(str(family) for family in world.placing.metrics.collect()) == before


async def test_facts_are_taken_as_hints_and_a_header_beats_them(daemon: Daemon) -> None:
    facts = {"class": "batch", "slo_ttft_ms": 700, "output_tokens": 12, "ctx_need": 3_000, "images": 2}
    req = (await supposed(daemon, **facts)).req
    assert (req.request_class, req.slo_ttft_ms, req.output_tokens) == ("batch", 700, 12)
    assert (req.images, req.prompt_tokens) == (2, 1_000)
    assert abs(req.ctx_need - 3_000) <= 12 + 2, "the rest is for the answer"
    assert set(req.requires) == {"streaming", "vision"}
    headers = {"X-Pairmesh-Class": "background", "x-pairmesh-slo-ttft-ms": "900"}
    req = (await supposed(daemon, **facts, headers=headers)).req
    assert (req.request_class, req.slo_ttft_ms) == ("background", 900)


async def test_a_session_is_found_where_it_was_served(daemon: Daemon) -> None:
    world = daemon.world
    pin = Pin(endpoint=key_of("beta"), model="tiny", tokens=900, at_ms=world.clock.now)
    world.router.sessions.pin(session_key("chat-1", b"secret"), pin)
    record = await supposed(daemon, headers={"x-session-id": "chat-1"})
    assert {row.row: row.affinity > 0 for row in record.candidates} == {
        key_of("me"): False,
        key_of("beta"): True,
    }


async def test_a_refusal_is_an_answer_too(daemon: Daemon) -> None:
    record = await supposed(daemon, model="nobody-has-this")
    assert (record.action.value, record.reason.value, record.req.model_asked) == (
        "reject",
        "model_absent",
        "",
    )
    record = await supposed(daemon, headers={"x-pairmesh-require": "node=@nobody"})
    assert (record.action.value, record.reason.value) == ("reject", "not_in_subset")


async def test_every_fault_of_a_question_is_named_and_nothing_sent_comes_back(daemon: Daemon) -> None:
    code, told = await asked(
        daemon,
        prompt_tokens=-1,
        dialect=CANARY,
        requires=["tools", CANARY],
        stream=1,
        headers={"x-session-id": 3},
        deadline_ms=0,
        prompt=CANARY,
        **{"class": CANARY},
    )
    assert (code, told["error"]) == (400, "body_malformed")
    named = [fault.partition(":")[0] for fault in told["faults"]]
    assert sorted(named[:-1]) == sorted(
        ["model", "dialect", "stream", "requires", "prompt_tokens", "class", "deadline_ms", "headers"]
    )
    assert named[-1].startswith("1 unknown; known are model dialect")
    assert CANARY not in json.dumps(told)


@pytest.mark.parametrize(
    "facts",
    [
        {"model": ""},
        {"model": "x" * 129},
        {"model": None},
        {"model": "tiny", "dialect": "chat\n"},
        {"model": "tiny", "prompt_tokens": 10_000_001},
        {"model": "tiny", "prompt_tokens": 1.5},
        {"model": "tiny", "prompt_tokens": True},
        {"model": "tiny", "headers": {f"h{number}": "" for number in range(33)}},
        {"model": "tiny", "headers": {"": "x"}},
        {"model": "tiny", "headers": [["a", "b"]]},
        {"model": "tiny", "slo_tpot_ms": 60_001},
    ],
)
async def test_limits_hold_for_every_fact(daemon: Daemon, facts: dict[str, Any]) -> None:
    code, told = await asked(daemon, **facts)
    assert (code, len(told["faults"])) == (400, 1)


async def test_a_narrowing_hint_that_cannot_be_understood_is_told(daemon: Daemon) -> None:
    code, told = await asked(daemon, model="tiny", headers={"x-pairmesh-require": f"node={CANARY}?"})
    assert (code, told["error"]) == (400, "hint_malformed")
    (fault,) = told["faults"]
    assert fault.startswith("require: term 1: node takes @NAME")
    assert CANARY not in fault


async def test_a_dialect_without_a_route_is_told_so_as_the_api_would(daemon: Daemon) -> None:
    code, told = await asked(daemon, model="tiny", dialect="messages")
    assert (code, told["error"]) == (400, "route_unknown")
    assert "answers 404" in told["faults"][0]
    for name in ("chat", "completion", "embed", "ollama_chat", "ollama_generate", "ollama_embed"):
        assert (await asked(daemon, model="tiny", dialect=name))[0] == 200


async def test_a_dry_run_of_an_embedding_does_not_stream(daemon: Daemon) -> None:
    assert "streaming" not in (await supposed(daemon, dialect="embed")).req.requires


async def test_a_context_that_is_probably_too_small_refuses_a_dry_run_no_more_than_a_request(
    daemon: Daemon,
) -> None:
    assert (await supposed(daemon, ctx_need=10_000_000)).action.value == "route"


@pytest.mark.parametrize("path", ["/v1/explain", "/v1/replay"])
async def test_a_question_is_posted_as_json_and_bounded(daemon: Daemon, path: str) -> None:
    for ask in (daemon.tcp, daemon.sock):
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS"):
            code, headers, _ = await ask(path, method)
            assert (code, headers["Allow"]) == (405, "POST")
        assert (await ask(path, "POST", b"{}", Content_Type="text/plain"))[0] == 415
        assert (await ask(path, "POST", b"{" + b" " * limits.ADMIN_BODY + b"}", **JSON))[0] == 413
        for body in (b"", b"{", b"[]", b"null", b"\xff", b'{"a":' * 5_000, b'{"model":"tiny"}{}'):
            code, _, told = await ask(path, "POST", body, **JSON)
            assert (code, json.loads(told)["faults"]) == (400, ["the body must be one JSON object"])


@pytest.mark.threat("T36")
async def test_a_page_of_another_site_cannot_ask(tmp_path: Path) -> None:
    body = b'{"model":"tiny"}'
    async with Daemon(tmp_path, origins=["https://panel.lan"]) as daemon:
        for bad in (
            {"Host": "evil.example"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec_Fetch_Site": "cross-site"},
        ):
            assert (await daemon.tcp("/v1/explain", "POST", body, **JSON, **bad))[0] == 403, bad
        code, headers, _ = await daemon.tcp("/v1/explain", "POST", body, **JSON, Origin="https://panel.lan")
        assert (code, headers["Access-Control-Allow-Origin"]) == (200, "https://panel.lan")
        code, headers, _ = await daemon.tcp("/v1/explain", "OPTIONS", Origin="https://panel.lan")
        assert (code, headers["Access-Control-Allow-Methods"]) == (204, "POST")
        assert headers["Access-Control-Allow-Headers"] == "Content-Type"


facts = st.fixed_dictionaries(
    {"model": st.sampled_from(["tiny", "absent", "no name", "\x00"])},
    optional={
        "dialect": st.sampled_from(list(DIALECTS)),
        "stream": st.booleans(),
        "requires": st.lists(st.sampled_from(list(CAPABILITIES)), max_size=3),
        "prompt_tokens": st.integers(0, 10_000_000),
        "output_tokens": st.none() | st.integers(0, 1_000_000),
        "ctx_need": st.integers(1, 10_000_000),
        "class": st.sampled_from(["interactive", "batch", "background"]),
        "deadline_ms": st.integers(1, 3_600_000),
        "headers": st.dictionaries(
            st.sampled_from(["x-pairmesh-prefer", "X-Session-Id", "x-request-id", "accept"]) | st.text(),
            st.sampled_from(["@me", "@beta", "any"]) | st.text(max_size=30),
            max_size=3,
        ),
    },
)


@settings(max_examples=60, deadline=None)
@given(facts)
def test_any_facts_are_answered_or_refused_and_every_answer_replays_to_itself(told: dict[str, Any]) -> None:
    body = read_body(msgspec.json.encode(told), ExplainBody)
    if isinstance(body, tuple):
        assert "" in told.get("headers", {}) or any(len(name) > 64 for name in told["headers"])
        return
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    dry_runs = DryRuns(world.placing, Random(1))
    record = dry_runs.explain(body)
    if isinstance(record, NoRoute):
        assert DIALECTS[body.dialect] not in RELAYED.values()
        return
    assert isinstance(record, DecisionRecord)
    assert msgspec.json.decode(msgspec.json.encode(record), type=DecisionRecord) == record
    assert dry_runs.replay(record, None) == record


# --- replay ----------------------------------------------------------------------------------------------


async def test_a_stored_decision_replays_to_the_same_choice(daemon: Daemon) -> None:
    for number in range(8):
        record = await supposed(daemon, headers={"x-request-id": f"r{number}"})
        daemon.journal.put(record)
        code, told = await asked(daemon, "/v1/replay", id=record.id)
        assert (code, told["same"], told["was"]) == (200, True, record.chosen)
        again = msgspec.convert(told["record"], DecisionRecord)
        assert (again.chosen, again.candidates, again.reason) == (
            record.chosen,
            record.candidates,
            record.reason,
        )


async def test_a_stored_decision_replays_under_another_policy(daemon: Daemon) -> None:
    record = await supposed(daemon, headers={"x-pairmesh-prefer": "@beta"})
    assert record.reason is Reason.HINT
    daemon.journal.put(record)
    code, told = await asked(daemon, "/v1/replay", id=record.id, policy="[adj]\nhint = 0\n")
    assert (code, told["record"]["reason"], told["was"]) == (200, "native", record.chosen)
    for bad in ("[adj]\nhint = 7\n", "[", "\x00", 'preset = "fast"'):
        code, told = await asked(daemon, "/v1/replay", id=record.id, policy=bad)
        assert (code, told["error"], len(told["faults"])) == (400, "policy_refused", 1)
    surrogate = b'{"id":"%s","policy":"\\ud800"}' % record.id.encode()
    assert (await daemon.tcp("/v1/replay", "POST", surrogate, **JSON))[0] == 400
    code, told = await asked(daemon, "/v1/replay", id=record.id, policy="#" * 65_537)
    assert (code, told["error"]) == (400, "body_malformed")


async def test_what_cannot_be_replayed_is_told_apart_from_what_is_not_there(daemon: Daemon) -> None:
    code, told = await asked(daemon, "/v1/replay", id="a" * 26)
    assert (code, told) == (404, {"error": "not_found"})
    short = replace(await supposed(daemon), full=False)
    daemon.journal.put(short)
    code, told = await asked(daemon, "/v1/replay", id=short.id)
    assert (code, told["error"]) == (409, "not_replayable")
    assert "nearest" in told["detail"]
    code, told = await asked(daemon, "/v1/replay", id=7, what=1)
    assert (code, len(told["faults"])) == (400, 2)
