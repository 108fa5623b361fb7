"""The page about the data plane tells routes, limits, headers and the failover table as the code has them."""

import re

import pytest

from agent.identity import routes
from agent.relay.dialects import ollama, openai
from agent.relay.dialects.relayed import RELAYED, SHOW
from agent.relay.dialects.tail import HEAD_WINDOW, TAIL_WINDOW
from agent.relay.frontends.codes import message_of, status_of
from agent.relay.http.headers import REPLY_FAMILIES, REPLY_PASSED, REQUEST_PASSED
from agent.relay.ports import RouteHeader
from agent.relay.upstream.route_header import format_route
from router_core import limits
from router_core.placement.request.request import RequestClass
from router_core.policy.exchange import ExchangePolicy
from router_core.router.failure import (
    OWN,
    UNBEGUN,
    Cause,
    FailureClass,
    Verdict,
    declines,
    exhausted_code,
    judge,
)
from tests.docs.tables import page, plain, table

PAGE = page("data-plane.md")
POLICY = ExchangePolicy()
DONE = {
    "next endpoint": Verdict.NEXT,
    "next endpoint, once per request": Verdict.NEXT_ONCE,
    "passed on": Verdict.COMMIT,
}
ANSWERS = table(PAGE, "### Answers before commit")

LIMITS = {
    "request target, bytes": limits.REQUEST_TARGET,
    "request head, bytes": limits.REQUEST_HEAD,
    "headers": limits.REQUEST_HEADERS,
    "time for the head, ms": limits.REQUEST_HEAD_TIME,
    "body, bytes": limits.REQUEST_BODY,
    "pace of a body, bytes/s": limits.BODY_PACE_PER_S,
    "grace before the pace counts, ms": limits.BODY_PACE_GRACE,
    "all bodies in memory, bytes": limits.BODIES_BUFFERED,
    "of them, of queued requests, bytes": limits.HELD_BODIES,
    "queued requests": limits.HELD_REQUESTS,
    "requests in flight": limits.REQUESTS_IN_FLIGHT,
    "API connections": limits.API_CONNECTIONS,
    "ingress connections": limits.INGRESS_CONNECTIONS,
    "ingress connections per member": limits.INGRESS_PER_ID,
    "idle connection kept, ms": limits.KEEP_ALIVE_IDLE,
    "head of an upstream's answer, bytes": limits.RESPONSE_HEAD,
    "headers of an upstream's answer": limits.RESPONSE_HEADERS,
    "interim answers before it": limits.INTERIM_RESPONSES,
    "buffered toward one client, high, bytes": limits.WRITE_HIGH,
    "buffered toward one client, low, bytes": limits.WRITE_LOW,
    "client takes nothing, ms": limits.WRITE_STALL,
    "hints in headers, bytes": limits.HINT_HEADERS,
}
TIMEOUTS = {
    "connect, by default": POLICY.connect_ms,
    "100 Continue of a peer": POLICY.continue_ms,
    "overdue, at least": POLICY.overdue_floor_ms,
    "second attempt beside a hung one": POLICY.hung_ms,
    "without progress after the first byte": POLICY.idle_ms,
    "peer SUSPECT after the first byte": POLICY.suspect_after_commit_ms,
}


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


def names(cell: str) -> set[bytes]:
    return {name.encode() for name in re.findall(r"`([^`]+)`", cell)}


def test_the_page_lists_every_relayed_path_with_its_dialect() -> None:
    told = {plain(row[0]).encode(): plain(row[1]) for row in table(PAGE, "## Dialects")}
    assert told == {
        path: "any of Ollama's" if path == SHOW else str(dialect.name).lower()
        for path, dialect in RELAYED.items()
    }


def test_every_relayed_path_is_one_of_the_ingress() -> None:
    told = {plain(row[0]) for row in table(PAGE, "## Dialects") if row[2] == "yes"}
    assert told == {path for port, _, path in routes.ROUTES if port is routes.Port.INGRESS}


def test_the_page_tells_every_limit_with_the_status_of_its_breach() -> None:
    rows = table(PAGE, "## Limits")
    assert {row[0]: number(row[1]) for row in rows} == LIMITS
    breaches = [found for row in rows if (found := re.fullmatch(r"(\d+) `(\w+)`", row[2]))]
    assert len(breaches) > 10
    for found in breaches:
        assert status_of(found[2]) == int(found[1]), found[0]


def test_the_page_tells_every_timeout() -> None:
    told = {plain(row[0]): row[1] for row in table(PAGE, "### Timeouts")}
    assert {what: number(ms) for what, ms in told.items() if ms[0].isdigit()} == TIMEOUTS


def test_the_page_lists_the_headers_that_pass() -> None:
    up, down, families = [names(row[1]) for row in table(PAGE, "## Headers")]
    assert up == REQUEST_PASSED
    assert down == REPLY_PASSED
    assert families == set(REPLY_FAMILIES)


def test_the_page_lists_the_fields_of_a_route_in_order() -> None:
    route = RouteHeader(
        decision_id="d",
        attempt=1,
        endpoint="e",
        inst=1,
        seq=1,
        prompt_tokens=1,
        output_tokens=1,
        request_class=RequestClass.INTERACTIVE.value,
        wait_ms=1,
        left_ms=1,
        resident=True,
        ahead=None,
    )
    fields = [part.partition("=")[0] for part in format_route(route).split(";")]
    assert [plain(row[0]) for row in table(PAGE, "### Route fields")] == fields


@pytest.mark.parametrize("row", ANSWERS, ids=lambda row: f"{plain(row[0])} {row[1]}")
def test_an_answer_leads_to_what_the_page_says(row: list[str]) -> None:
    failure = FailureClass(plain(row[0]))
    statuses = [400, 404, 429, 500, 503] if row[1] == "any" else [number(each) for each in row[1].split(",")]
    for status in statuses:
        assert judge(status, failure) is DONE[row[2]], status
        assert declines(status, failure) is (row[3] == "no"), status


def test_the_page_tells_of_every_class_of_answer() -> None:
    assert {plain(row[0]) for row in ANSWERS} == {failure.value for failure in FailureClass}


def test_the_page_tells_of_every_cause_what_follows() -> None:
    told = {plain(row[0]): tuple(map(plain, row[1:])) for row in table(PAGE, "### Without an answer")}
    assert told == {
        cause.value: (
            "no" if cause in UNBEGUN else "yes",
            "no" if cause in OWN else "yes",
            " ".join(map(str, exhausted_code(cause))),
        )
        for cause in Cause
    }


def test_the_page_tells_how_many_attempts_there_are() -> None:
    assert POLICY.attempts == 3
    assert "At most three attempts" in PAGE
    assert POLICY.spared == POLICY.refusals
    assert f"({POLICY.spared} each)" in PAGE


def test_the_page_shows_how_a_broken_stream_ends() -> None:
    code = "upstream_lost"
    ends = [dialect.stream_error(code, message_of(code), mid_event=False) for dialect in (openai, ollama)]
    assert re.findall(r"^```\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL) == [
        end.decode().rstrip("\n") for end in ends
    ]


def test_the_page_tells_the_windows_of_an_answer() -> None:
    assert f"the first {HEAD_WINDOW // 1024} KiB, the last {TAIL_WINDOW // 1024} KiB" in PAGE
