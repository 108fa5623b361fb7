"""Whatever the authority does, the request goes on in time, with the outcome its record tells."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.authority.asking import Authority, AuthorityBreaker
from agent.authority.call import Caller
from agent.node.routing.placement import Choosing
from agent.relay.ports import Routed
from router_core.errors import LocalMisuse
from router_core.placement.decision.decision import record_of
from router_core.placement.record import AuthorityNote
from router_core.policy.authority import AuthorityMode, AuthorityPolicy
from tests.agent.authority.scripted import (
    Script,
    Scripted,
    answers,
    http,
    listening,
    says,
    says_and_hangs,
    says_without_end,
)
from tests.agent.node.rig import World, an_endpoint, key_of
from tests.support.until import until

AMPLE_MS = 30_000
SHORT_MS = 30


def three_nodes() -> World:
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    world.peer("gamma", an_endpoint())
    return world


@asynccontextmanager
async def asking(world: World, url: str, **over: Any) -> AsyncIterator[None]:
    """``world`` asks the authority at ``url``."""
    fields: dict[str, Any] = {"mode": AuthorityMode.AUTHORITATIVE, "budget_ms": AMPLE_MS}
    token = over.pop("token", None)
    policy = AuthorityPolicy(url=url, **(fields | over))
    world.placing.authority = Authority(policy, token=token, clock=world.clock, log=world.log)
    yield


def reason_of(route: Routed) -> str:
    assert route.decision is not None
    return route.decision.reason.value


async def routed(world: World, request_id: str = "r1", **over: Any) -> tuple[Routed, AuthorityNote]:
    """One request on its way, and what its record says of the authority."""
    choosing = world.ask(request_id, **over)
    await consulted(choosing)
    route = world.route(choosing)
    choosing.end(route.attempt)
    return route, note_of(choosing)


async def consulted(choosing: Choosing) -> None:
    waiting = choosing.consult()
    if waiting is not None:
        await waiting


def note_of(choosing: Choosing) -> AuthorityNote:
    assert choosing.decision is not None
    return record_of(choosing.decision).authority


def told(note: AuthorityNote) -> tuple[str, str | None]:
    return note.outcome.value, note.reason


async def test_the_first_eligible_id_of_the_answer_serves_and_the_record_says_so() -> None:
    world = three_nodes()
    script = answers(order=["nobody/here", key_of("gamma"), key_of("beta")], reason="gamma is cheap")
    async with listening(script) as authority, asking(world, authority.url, token="secret"):
        route, note = await routed(world)
    assert (route.choice.endpoint, reason_of(route)) == (key_of("gamma"), "authority")
    assert told(note) == ("used", "gamma is cheap")
    (head,) = authority.heads
    assert head.startswith(b"POST /place HTTP/1.1\r\n")
    assert b"authorization: bearer secret\r\n" in head.lower()
    (question,) = authority.questions
    assert question["decision_id"] == route.decision_id
    assert {row["id"] for row in question["candidates"]} == {key_of(name) for name in ("me", "beta", "gamma")}
    assert AuthorityPolicy().budget_ms < question["budget_ms"] <= AMPLE_MS


async def test_an_authority_at_a_unix_socket_is_asked_too(tmp_path: Path) -> None:
    world = three_nodes()
    async with (
        listening(answers(order=[key_of("beta")]), tmp_path / "a.sock") as authority,
        asking(world, authority.url),
    ):
        route, note = await routed(world)
    assert (route.choice.endpoint, note.outcome.value) == (key_of("beta"), "used")


async def test_nothing_a_client_wrote_is_in_the_question() -> None:
    world = three_nodes()
    async with listening(answers(order=[])) as authority, asking(world, authority.url):
        await routed(
            world,
            "canary-id",
            headers=(("x-session-id", "canary-session"), ("x-pairmesh-prefer", "@beta")),
            caller="key:canary",
            text_bytes=12_345,
        )
    (raw,) = authority.raw
    assert b"canary" not in raw
    assert b"12345" not in raw
    assert b"beta" not in raw


@pytest.mark.threat("T39")
async def test_two_requests_whose_sizes_round_to_the_same_are_asked_about_alike() -> None:
    world = three_nodes()
    async with listening(answers(order=[], ttl_ms=0)) as authority, asking(world, authority.url):
        await routed(world, text_bytes=4_000, body_bytes=9_000)
        await routed(world, text_bytes=7_000, body_bytes=16_000)
        await routed(world, text_bytes=8_000, body_bytes=16_000)
    first, second, third = [
        {name: told for name, told in question.items() if name not in ("decision_id", "budget_ms")}
        for question in authority.questions
    ]
    assert first == second
    assert first["candidates"] != third["candidates"]


HOSTILE: list[tuple[str, Script, int, str, str | None]] = [
    ("silent", says_and_hangs(b""), SHORT_MS, "timeout", None),
    ("stops in its head", says_and_hangs(b"HTTP/1.1 200 OK\r\nConte"), SHORT_MS, "timeout", None),
    ("stops in its body", says_and_hangs(http(b"{}")[:-1]), SHORT_MS, "timeout", None),
    (
        "never gets to the point",
        says_without_end(b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
        AMPLE_MS,
        "invalid",
        "too_large",
    ),
    (
        "headers without end",
        says_without_end(b"HTTP/1.1 200 OK\r\n", b"X-More: x\r\n" * 100),
        AMPLE_MS,
        "invalid",
        "too_large",
    ),
    ("closes", says(b""), AMPLE_MS, "error", "closed"),
    (
        "goes on to talk otherwise",
        says(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"),
        AMPLE_MS,
        "error",
        "not_http",
    ),
    ("closes in its body", says(http(b"{}")[:-1]), AMPLE_MS, "invalid", "not_json"),
    ("no HTTP", says(b"220 ready\r\n\r\n"), AMPLE_MS, "error", "not_http"),
    ("500", says(http(b"{}", "500 Oops")), AMPLE_MS, "error", "status_500"),
    ("204", says(b"HTTP/1.1 204 No Content\r\n\r\n"), AMPLE_MS, "error", "status_204"),
    ("401", says(http(b"{}", "401 Unauthorized")), AMPLE_MS, "error", "status_401"),
    ("no JSON", says(http(b"<html>")), AMPLE_MS, "invalid", "not_json"),
    ("empty", says(http(b"")), AMPLE_MS, "invalid", "not_json"),
    (
        "packed",
        says(http(gzip.compress(b"{}"), "200 OK", "Content-Encoding: gzip")),
        AMPLE_MS,
        "invalid",
        "not_json",
    ),
    ("another version", says(http(b'{"v":2,"order":[]}')), AMPLE_MS, "invalid", "version"),
    ("wrong weights", answers(order=[key_of("beta")], weights=[-1]), AMPLE_MS, "invalid", "weights"),
    ("ids without end", answers(order=[f"{i}/x" for i in range(65)]), AMPLE_MS, "invalid", "order"),
    ("lies", answers(order=["nobody/here", "@beta/llama"]), AMPLE_MS, "empty_intersection", None),
    ("no opinion", answers(order=[]), AMPLE_MS, "empty_intersection", None),
    ("10 MB", says(http(b" " * 10_000_000)), AMPLE_MS, "invalid", "too_large"),
    (
        "a body without end",
        says_without_end(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b" " * 4096 + b"\r\n"
        ),
        AMPLE_MS,
        "invalid",
        "too_large",
    ),
    (
        "a line without end",
        says_without_end(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 4096),
        AMPLE_MS,
        "invalid",
        "too_large",
    ),
]


@pytest.mark.threat("T42")
@pytest.mark.parametrize(
    ("script", "budget_ms", "outcome", "why"),
    [case[1:] for case in HOSTILE],
    ids=[case[0] for case in HOSTILE],
)
async def test_an_authority_that_is_of_no_use_leaves_the_choice_as_it_is_and_loses_nothing(
    script: Script, budget_ms: int, outcome: str, why: str | None
) -> None:
    native = three_nodes().route(three_nodes().ask())
    world = three_nodes()
    async with listening(script) as authority, asking(world, authority.url, budget_ms=budget_ms):
        route, note = await routed(world)
        await until(lambda: authority.now == 0)
    assert told(note) == (outcome, why)
    assert (route.choice.endpoint, reason_of(route)) == (native.choice.endpoint, "native")
    assert len(world.router.ledger) == 0
    assert len(authority.questions) == 1


@pytest.mark.threat("T42")
async def test_an_authority_that_is_away_leaves_the_choice_as_it_is() -> None:
    world = three_nodes()
    async with listening(answers(order=[])) as authority:
        pass
    async with asking(world, authority.url):
        route, note = await routed(world)
    assert told(note) == ("error", "connect")
    assert reason_of(route) == "native"


async def test_a_body_may_end_with_its_connection_or_come_in_chunks() -> None:
    body = json.dumps({"v": 1, "order": [key_of("beta")]}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, body[i : i + 1]) for i in range(len(body)))
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    for raw in (b"HTTP/1.0 200 OK\r\n\r\n" + body, chunked, b"HTTP/1.1 100 Continue\r\n\r\n" + http(body)):
        world = three_nodes()
        async with listening(says(raw)) as authority, asking(world, authority.url):
            route, _ = await routed(world)
        assert route.choice.endpoint == key_of("beta")


def test_a_token_that_would_be_more_than_a_header_is_refused() -> None:
    policy = AuthorityPolicy(mode=AuthorityMode.ADVISORY, url="http://127.0.0.1:9")
    for token in ("a b", "a\r\nX: y", "\u00e9"):
        with pytest.raises(LocalMisuse):
            Caller(policy, token)


async def test_a_redirect_is_not_followed() -> None:
    world = three_nodes()
    async with listening(answers(order=[key_of("beta")])) as elsewhere:
        moved = says(http(b"", "307 Temporary Redirect", f"Location: {elsewhere.url}"))
        async with listening(moved) as authority, asking(world, authority.url):
            _, note = await routed(world)
    assert told(note) == ("error", "status_307")
    assert not elsewhere.heads


async def test_bytes_nobody_asked_for_are_taken_by_nobody() -> None:
    world = three_nodes()
    answer = http(json.dumps({"v": 1, "order": [key_of("beta")], "ttl_ms": 0}).encode())
    async with listening(says_without_end(b"", answer)) as authority, asking(world, authority.url):
        for number in range(3):
            _, note = await routed(world, f"r{number}")
            assert note.outcome.value == "used"
        await until(lambda: authority.now == 0)
    assert len(authority.heads) == 3


# --- how often it is asked -----------------------------------------------------------------------------------


async def test_an_answer_is_used_again_as_long_as_it_may_be() -> None:
    world = three_nodes()
    script = answers(order=[key_of("beta")], ttl_ms=500)
    async with listening(script) as authority, asking(world, authority.url):
        outcomes: list[str] = []
        for later_ms in (0, 499, 1, 499):
            world.clock.now += later_ms
            outcomes.append((await routed(world, f"r{len(outcomes)}"))[1].outcome.value)
    assert outcomes == ["used", "cached", "used", "cached"]
    assert len(authority.heads) == 2


async def test_an_answer_is_for_its_model_class_locality_and_rows_alone() -> None:
    world = three_nodes()
    asked_for: list[dict[str, Any]] = [
        {},
        {"headers": (("x-pairmesh-class", "batch"),)},
        {"headers": (("x-pairmesh-require", "!node=@gamma"),)},
        {"text_bytes": 50},
    ]
    async with listening(answers(order=[key_of("beta")])) as authority, asking(world, authority.url):
        outcomes = [(await routed(world, "r1", **over))[1].outcome.value for over in asked_for]
    assert outcomes == ["used", "used", "used", "cached"]
    assert len(authority.heads) == 3


async def test_answers_kept_are_bounded_and_the_oldest_goes_first() -> None:
    world = three_nodes()
    classes = [{"headers": (("x-pairmesh-class", name),)} for name in ("interactive", "batch", "background")]
    async with (
        listening(answers(order=[key_of("beta")])) as authority,
        asking(world, authority.url, answers_kept=2),
    ):
        outcomes = [(await routed(world, "r1", **classes[i]))[1].outcome.value for i in (0, 1, 2, 1, 0)]
    assert outcomes == ["used", "used", "used", "cached", "used"]
    assert len(authority.heads) == 4


async def test_an_answer_that_may_not_be_kept_is_not_kept() -> None:
    world = three_nodes()
    async with (
        listening(answers(order=[key_of("beta")], ttl_ms=0)) as authority,
        asking(world, authority.url),
    ):
        assert [(await routed(world, name))[1].outcome.value for name in ("r1", "r2")] == ["used", "used"]


async def test_a_request_asks_once_whatever_becomes_of_its_attempts() -> None:
    world = three_nodes()
    script = answers(order=[key_of("gamma"), key_of("beta")], ttl_ms=0)
    async with listening(script) as authority, asking(world, authority.url):
        choosing = world.ask()
        await consulted(choosing)
        tried: dict[str, None] = {}
        for attempt, name in enumerate(("gamma", "beta", "me"), start=1):
            route = world.route(choosing, attempt=attempt, tried=tried)
            assert route.choice.endpoint == key_of(name)
            choosing.end(route.attempt)
            tried[route.choice.endpoint] = None
    assert len(authority.heads) == 1


async def test_where_there_is_nothing_to_choose_nobody_is_asked() -> None:
    world = World()
    world.own(an_endpoint())
    async with listening(answers(order=[])) as authority, asking(world, authority.url):
        _, note = await routed(world)
    assert (note.mode.value, note.outcome.value) == ("authoritative", "off")
    assert not authority.heads


async def test_nothing_is_reserved_while_it_is_asked() -> None:
    world = three_nodes()
    held: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(len(world.router.ledger))
        await answers(order=[key_of("beta")])(reader, writer)

    async with listening(script) as authority, asking(world, authority.url):
        await routed(world)
    assert held == [0]


async def test_64_requests_at_once_keep_at_most_32_questions_in_flight() -> None:
    world = three_nodes()
    full = asyncio.Event()
    authority: Scripted

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if authority.most == 32:
            full.set()
        await full.wait()
        await answers(order=[key_of("beta")], ttl_ms=0)(reader, writer)

    async with listening(script) as authority, asking(world, authority.url):
        done = await asyncio.gather(*(routed(world, f"r{number}") for number in range(64)))
    assert authority.most == 32
    assert {(route.choice.endpoint, note.outcome.value) for route, note in done} == {(key_of("beta"), "used")}
    assert len({route.decision_id for route, _ in done}) == len(authority.heads) == 64


async def test_requests_that_get_no_turn_in_time_go_on_and_are_not_held_against_it() -> None:
    world = three_nodes()
    over = {"budget_ms": SHORT_MS, "in_flight": 1, "failures": 2}
    async with listening(says_and_hangs(b"")) as authority, asking(world, authority.url, **over):
        done = await asyncio.gather(*(routed(world, f"r{number}") for number in range(8)))
        _, last = await routed(world, "r9")
    assert sorted(told(note)[1] or "" for _, note in done) == ["", *["busy"] * 7]
    assert {note.outcome.value for _, note in done} == {"timeout"}
    assert told(last) == ("timeout", None)
    assert authority.most == 1


async def test_a_client_that_leaves_ends_the_question() -> None:
    world = three_nodes()
    async with listening(says_and_hangs(b"")) as authority, asking(world, authority.url, failures=1):
        waiting = world.ask().consult()
        assert waiting is not None
        task = asyncio.create_task(waiting)
        await until(lambda: authority.now == 1)
        task.cancel()
        await until(lambda: authority.now == 0)
        again = world.ask().consult()
        assert again is not None
        again.close()
    assert task.cancelled()


# --- leaving it alone ----------------------------------------------------------------------------------------


async def test_after_five_failures_in_a_row_it_is_left_alone_for_30_s_and_tried_once() -> None:
    world = three_nodes()
    replies = [says(b"")] * 6 + [answers(order=[key_of("beta")], ttl_ms=0)] * 2

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replies.pop(0)(reader, writer)

    async with listening(script) as authority, asking(world, authority.url):
        outcomes: list[str] = []
        for later_ms in (0, 0, 0, 0, 0, 0, 29_999, 1, 0, 30_000, 0):
            world.clock.now += later_ms
            world.peer("beta", an_endpoint())
            world.peer("gamma", an_endpoint())
            outcomes.append((await routed(world, f"r{len(outcomes)}"))[1].outcome.value)
    shut = "breaker_open"
    assert outcomes == [*["error"] * 5, shut, shut, "error", shut, "used", "used"]
    assert len(authority.heads) == 8
    assert [json.loads(line)["event"] for line in world.lines] == ["authority.left_alone", "authority.back"]


async def test_an_answer_at_hand_is_used_even_while_it_is_left_alone() -> None:
    world = three_nodes()
    batch = {"headers": (("x-pairmesh-class", "batch"),)}
    replies = [answers(order=[key_of("beta")], ttl_ms=10_000), says(b"")]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await replies.pop(0)(reader, writer)

    async with listening(script) as authority, asking(world, authority.url, failures=1):
        outcomes = [(await routed(world, "r1", **over))[1].outcome.value for over in ({}, batch, batch, {})]
    assert outcomes == ["used", "error", "breaker_open", "cached"]


POLICY = AuthorityPolicy(failures=3, open_ms=100)


def test_only_failures_in_a_row_shut_it() -> None:
    breaker = AuthorityBreaker(POLICY)
    for good in (False, False, True, False, False):
        assert breaker.claim(0) is False
        assert not breaker.ended(0, trial=False, good=good)
    assert breaker.ended(5, trial=False, good=False)
    assert (breaker.claim(104), breaker.shut(104), breaker.shut(105)) == (None, True, False)


def test_while_one_tries_again_all_others_wait() -> None:
    breaker = AuthorityBreaker(POLICY)
    for _ in range(3):
        breaker.ended(0, trial=False, good=False)
    assert breaker.claim(100) is True
    assert breaker.claim(100) is None
    assert not breaker.ended(100, trial=True, good=None)
    assert breaker.claim(100) is True
    assert not breaker.ended(110, trial=True, good=False)
    assert breaker.claim(209) is None
    assert breaker.claim(210) is True
    assert breaker.ended(211, trial=True, good=True)
    assert breaker.claim(211) is False


def test_what_was_asked_before_it_shut_neither_opens_nor_prolongs_it() -> None:
    breaker = AuthorityBreaker(POLICY)
    for _ in range(3):
        breaker.ended(0, trial=False, good=False)
    assert not breaker.ended(50, trial=False, good=False)
    assert not breaker.ended(60, trial=False, good=True)
    assert breaker.shut(99)
    assert not breaker.shut(100)
