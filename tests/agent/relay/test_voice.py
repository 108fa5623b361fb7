"""What a client is told besides an answer, header by header: each only when it says something."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from agent.relay.dialects.facts import Facts
from agent.relay.dialects.relayed import tongue_of
from agent.relay.frontends.replies import ApiVoice
from agent.relay.http.frontend import Answer
from agent.relay.ports import Asked, Routed, Turned
from router_core.exchange.events import Reply
from router_core.placement.reasons import HintOutcome
from router_core.placement.request.request import HintNote
from router_core.policy.placement import Match
from router_core.record.state import Dialect
from router_core.router.failure import Cause
from tests.support.routes import a_choice, a_route

VOICE = ApiVoice(tongue_of(b"/v1/chat/completions"), [(b"vary", b"Origin")])
ASKED = Asked(
    request_id="r1",
    dialect=Dialect.CHAT,
    facts=Facts(model="m"),
    headers=(),
    caller="local",
    body_bytes=1,
    accepted_ms=0,
)
ROUTED = a_route()
HONOURED = HintNote(hint="class", outcome=HintOutcome.HONOURED)
TURNED = Turned(decision_id="d2", status=429, code="queue_full", retry_after_s=7, counts=(("queue_full", 3),))
PLAIN = {
    "x-request-id": "r1",
    "x-pairmesh-node": "@here/e",
    "x-pairmesh-model": "m",
    "x-pairmesh-decision-id": "d1",
    "x-pairmesh-reason": "native",
    "vary": "Origin",
}


def said(routed: Routed, attempts: int = 1, status: int = 200, asked: Asked = ASKED) -> dict[str, str]:
    lines = VOICE.lines(asked, routed, attempts, status).decode().removesuffix("\r\n").split("\r\n")
    return dict(line.split(": ") for line in lines)


def refused(code: str, status: int, **over: Any) -> tuple[Answer, dict[str, str]]:
    told = Reply(status=status, code=code, retry_after_s=over.pop("retry_after_s", None))
    how: dict[str, Any] = {"turned": None, "routed": None, "attempts": 0, "held_ms": None}
    answer = VOICE.refusal(told, ASKED, **how | over)
    return answer, {name.decode(): value.decode() for name, value in answer.headers}


def test_a_request_that_went_well_is_told_where_what_and_why_and_nothing_else() -> None:
    assert said(ROUTED) == PLAIN


@pytest.mark.parametrize(
    ("over", "header"),
    [
        ({"choice": a_choice("e", match=Match.QUANT)}, ("x-pairmesh-match", "quant")),
        ({"session": "moved"}, ("x-pairmesh-session", "moved")),
        (
            {"hints": (HintNote(hint="prefer", outcome=HintOutcome.OUTSCORED),)},
            ("x-pairmesh-hints", "prefer=outscored"),
        ),
        ({"held_ms": 40}, ("server-timing", "queue;dur=40")),
    ],
)
def test_each_further_word_has_its_header(over: dict[str, Any], header: tuple[str, str]) -> None:
    assert said(a_route(**over)) == PLAIN | dict([header])


def test_an_error_after_a_failover_is_not_to_be_retried() -> None:
    assert said(ROUTED, 2) == PLAIN | {"x-pairmesh-attempts": "2"}
    assert said(ROUTED, 2, 502) == PLAIN | {"x-pairmesh-attempts": "2", "x-should-retry": "false"}
    assert refused("tried", 502, routed=ROUTED, attempts=2)[1]["x-should-retry"] == "false"
    assert "x-should-retry" not in refused("deadline", 504)[1]


def test_a_mere_question_has_no_decision() -> None:
    asked = replace(ASKED, is_work=False)
    assert said(ROUTED, asked=asked).keys() == PLAIN.keys() - {"x-pairmesh-decision-id", "x-pairmesh-reason"}


@pytest.mark.parametrize(("code", "status"), [("pressure", 429), ("draining", 503)])
def test_who_may_come_back_is_told_when(code: str, status: int) -> None:
    assert refused(code, status, retry_after_s=9)[1]["retry-after"] == "9"
    assert int(refused(code, status)[1]["retry-after"]) >= 1
    assert "retry-after" not in refused("capability", 400)[1]


def test_counts_are_told_with_the_refusal_that_they_explain_and_with_no_other() -> None:
    answer, headers = refused("queue_full", 429, turned=TURNED)
    assert json.loads(answer.body)["error"]["message"].endswith("(queue_full 3)")
    assert headers["x-pairmesh-decision-id"] == "d2"
    answer, _ = refused("shutting_down", 503, turned=TURNED)
    assert "queue_full" not in json.loads(answer.body)["error"]["message"]


def test_a_refusal_tells_the_wait_and_the_hints_of_whoever_spoke_last() -> None:
    routed = a_route(hints=(HONOURED,))
    _, headers = refused("upstream_timeout", 504, routed=routed, attempts=1, held_ms=40)
    assert (headers["x-pairmesh-hints"], headers["server-timing"]) == ("class=honoured", "queue;dur=40")
    _, headers = refused(
        "tried", 502, routed=routed, turned=replace(TURNED, hints="class=clamped"), attempts=2
    )
    assert headers["x-pairmesh-hints"] == "class=clamped"
    assert "server-timing" not in headers


def test_an_error_of_our_own_after_a_try_says_where_and_how_often_it_was_tried() -> None:
    for code, status in (("upstream_unreachable", 502), ("upstream_timeout", 504), ("model_absent", 404)):
        _, headers = refused(code, status, routed=ROUTED, attempts=1)
        assert (headers["x-pairmesh-node"], headers["x-pairmesh-attempts"]) == ("@here/e", "1")
        _, headers = refused(code, status)
        assert not {"x-pairmesh-node", "x-pairmesh-attempts"} & headers.keys()
    _, headers = refused("queue_full", 429, routed=ROUTED, attempts=1, turned=TURNED)
    assert not {"x-pairmesh-node", "x-pairmesh-attempts"} & headers.keys()


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.IDLE])
def test_an_answer_that_never_began_is_told_by_what_happened(cause: Cause) -> None:
    """An engine that took the request and died was told as one that could not be reached."""
    told = message("upstream_unreachable", 502, routed=ROUTED, attempts=1, cause=cause)
    assert told != message("upstream_unreachable", 502)
    assert message("queue_full", 429, turned=TURNED, cause=cause) == message("queue_full", 429, turned=TURNED)


def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it() -> None:
    words = "This model's maximum context length is 4096 tokens."
    turned = replace(TURNED, status=400, code="context_too_small", words=words)
    answer, headers = refused("context_too_small", 400, turned=turned)
    error = json.loads(answer.body)["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert error["message"].startswith(words)
    assert headers["x-pairmesh-reason"] == "context_too_small"


def test_who_cannot_be_helped_by_waiting_is_told_no_time_to_come_back() -> None:
    assert "retry-after" not in refused("does_not_fit", 503, retry_after_s=9)[1]


def message(code: str, status: int, **over: Any) -> str:
    told: str = json.loads(refused(code, status, **over)[0].body)["error"]["message"]
    return told


@pytest.mark.parametrize("name", ["eng\u00fc", "e\r\nx-injected: 1", "e\x1b[31m", "e\x7f"])
def test_a_name_that_is_no_plain_text_is_left_out_of_every_reply(name: str) -> None:
    assert "x-pairmesh-node" not in said(a_route(a_choice(label=name)))
    assert "x-pairmesh-model" not in said(a_route(a_choice(model=name)))
    _, headers = refused("tried", 502, routed=a_route(a_choice(label=name)), attempts=2)
    assert not {"x-pairmesh-node", "x-injected"} & headers.keys()
    assert name not in headers.values()
