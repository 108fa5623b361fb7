"""Large bodies: the same facts and spans as a small one's, in short steps, within a budget, and beside everybody else."""

import asyncio
import itertools
import json
import time
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.relay.dialects import large, ollama, relayed, spans, walk
from agent.relay.dialects.facts import BodyFault, Facts
from agent.relay.forwarding.body import Parcel, is_heavy
from router_core import limits
from router_core.record.state import Dialect
from tests.agent.relay.client import BODY, Client, ask, get, post
from tests.agent.relay.rig import running
from tests.support.recorder import Exchange, Recorder
from tests.support.until import until

DIALECTS = (
    Dialect.CHAT,
    Dialect.COMPLETION,
    Dialect.EMBED,
    Dialect.OLLAMA_CHAT,
    Dialect.OLLAMA_GENERATE,
    Dialect.OLLAMA_EMBED,
    ollama.NATIVE,
)


def never() -> bool:
    return False


def drive(steps: Generator[None, None, large.Large | BodyFault]) -> large.Large | BodyFault:
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            found: large.Large | BodyFault = ended.value
            return found


def facts(dialect: Dialect, body: bytes) -> Facts:
    read = drive(large.read(dialect, body, never))
    assert isinstance(read, large.Large)
    return read.facts


SCALARS = st.sampled_from(
    [None, True, False, 0, 1, 7, -1, 2.0, 10**30, "", "x", 'q"\\', "\u20ac\n", "5m", "0s"]
)
PARTS = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["text", "image_url", "input_audio", "odd", None, 7]),
            "text": SCALARS,
            "image_url": st.just({"url": "data:[{"}),
        },
    ),
)
MESSAGES = st.one_of(
    SCALARS,
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.just("user"),
            "content": st.one_of(SCALARS, st.lists(PARTS, max_size=4)),
            "images": st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
        },
    ),
)
INPUTS = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=4), st.lists(st.lists(st.integers(), max_size=3), max_size=3)
)
MEMBERS = {
    "model": st.sampled_from(["m", "m", "m", "", "a\u20ac", None, 7]),
    "name": st.sampled_from(["n", None]),
    "messages": st.one_of(SCALARS, st.lists(MESSAGES, max_size=4)),
    "prompt": INPUTS,
    "input": INPUTS,
    "system": SCALARS,
    "images": st.one_of(SCALARS, st.lists(SCALARS, max_size=3)),
    "stream": SCALARS,
    "max_tokens": SCALARS,
    "max_completion_tokens": SCALARS,
    "n": SCALARS,
    "tools": st.one_of(SCALARS, st.lists(st.just({"a": 1}), max_size=2)),
    "logprobs": SCALARS,
    "response_format": st.sampled_from([None, {}, {"type": "json_schema"}, {"type": 7}, [], "json_schema"]),
    "format": st.sampled_from([None, {}, "json", ["x"]]),
    "options": st.one_of(
        SCALARS, st.fixed_dictionaries({}, optional={"num_ctx": SCALARS, "num_predict": SCALARS})
    ),
    "keep_alive": SCALARS,
    "pairmesh": st.sampled_from([None, {}, {"prefer": ["a"]}]),
    "Model": st.just("z"),
    "other": st.just([[], {"model": "}"}]),
}


@given(st.sampled_from(DIALECTS), st.fixed_dictionaries({}, optional=MEMBERS), st.booleans())
@settings(max_examples=300, deadline=None)
@example(
    Dialect.CHAT, {"model": "m", "messages": [{"content": [1, "ab", {"type": "image_url"}]}, "cd", 7]}, True
)
def test_a_large_body_reads_as_a_small_one_does(dialect: Dialect, told: dict[str, Any], spaced: bool) -> None:
    body = json.dumps(told, indent=1 if spaced else None).encode()
    small = Parcel.read(relayed.read, dialect, body)
    read = drive(large.read(dialect, body, never))
    if isinstance(small, BodyFault):
        assert read is small
        return
    assert isinstance(read, large.Large)
    assert read.facts == small.facts
    assert Parcel.of(body, read).as_model("other") == small.as_model("other")


NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(
    st.dictionaries(st.text(max_size=9), NESTED, max_size=6), st.integers(0, 70_000), st.sampled_from(' x\\"')
)
@settings(max_examples=150, deadline=None)
def test_every_member_is_found_where_it_lies_however_the_steps_fall(
    told: dict[str, Any], size: int, filler: str
) -> None:
    told = {"f": filler * size} | told
    body = json.dumps(told).encode()
    found = walk.found(walk.top(body))
    assert [member.key.decode("utf-8", "surrogatepass") for member in found] == list(told)
    assert [json.loads(body[slice(*member.value)]) for member in found] == list(told.values())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a":1 2}',
        b'{"a":1}x',
        b'{"a":1}{}',
        b"{'a':1}",
        b'{"a":[}',
        b'{"a":[1',
        b'{"a":["',
        b'{"a":["\\',
        b'{"a":"\\',
        b'{"a":"b',
        b'{"a":[/* " */]}',
        b'{"\\x":1}',
        b"{1:1}",
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    assert drive(large.read(Dialect.CHAT, body, never)) is BodyFault.BAD_REQUEST


def test_a_mark_before_the_text_is_stepped_over() -> None:
    body = walk.BOM + b'{"model":"m"}'
    read = drive(large.read(Dialect.CHAT, body, never))
    assert isinstance(read, large.Large)
    assert Parcel.of(body, read).as_model("n") == walk.BOM + b'{"model":"n"}'


@pytest.mark.parametrize("more", [0, 1])
def test_members_at_their_limit_pass_and_one_more_does_not(more: int) -> None:
    body = b'{"model":"m"' + b',"k":1' * (limits.BODY_KEYS - 1 + more) + b"}"
    read = drive(large.read(Dialect.CHAT, body, never))
    assert isinstance(read, BodyFault) is bool(more)
    assert isinstance(spans.find(body), BodyFault) is bool(more)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("before", [b"", b"[],"])
def test_depth_at_its_limit_passes_and_one_more_does_not(more: int, before: bytes) -> None:
    depth = limits.JSON_DEPTH + more
    body = b'{"model":"m","x":[' + before + b"[" * (depth - 1) + b"]" * depth + b"}"
    assert isinstance(drive(large.read(Dialect.CHAT, body, never)), BodyFault) is bool(more)


@pytest.mark.parametrize(
    "body",
    [b'{"model":"a","model":"b"}', b'{"model":"a","mo\\u0064el":"b"}', b'{"Model":"a","model":"b"}'],
)
def test_a_key_that_stands_twice_is_refused(body: bytes) -> None:
    assert drive(large.read(Dialect.CHAT, body, never)) is BodyFault.DUPLICATE_KEY


def test_past_its_budget_sizes_come_from_bytes_and_the_rest_is_not_told() -> None:
    picture = {"content": [{"type": "image_url"}] * 2_000}
    messages = [{"content": "hello"}] * 1_000 + [picture]
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages}).encode()
    read = drive(large.read(Dialect.CHAT, body, lambda: True))
    assert isinstance(read, large.Large)
    assert (read.facts.model, read.facts.max_tokens, read.facts.images) == ("m", 5, 0)
    assert len(body) - 5_000 < read.facts.text_bytes < len(body)
    assert facts(Dialect.CHAT, body).images == 2_000


def test_a_name_beyond_all_measure_is_nobodys() -> None:
    assert len(facts(Dialect.CHAT, b'{"model":"' + b"m" * 300_000 + b'"}').model) == 1_023


SIZE = limits.MIB
HOSTILE: dict[str, bytes] = {
    "keys": b'{"pairmesh":{},"model":"m","messages":[],' + b'"k":1,' * (SIZE // 6) + b'"k":1}',
    "messages": b'{"model":"m","messages":[' + b'{"role":"user","content":"x"},' * (SIZE // 30) + b"{}]}",
    "odd": b'{"model":"m","messages":[' + b"1," * (SIZE // 2) + b"1]}",
    "parts": b'{"model":"m","messages":[{"content":[' + b"1," * (SIZE // 2) + b"1]}]}",
    "strings": b'{"model":"m","messages":[' + b'"",' * (SIZE // 3) + b"1]}",
    "brackets": b'{"model":"m","messages":[' + b"[]," * (SIZE // 3) + b"1]}",
    "towers": b'{"model":"m","messages":[' + (b"[" * 900 + b"]" * 900 + b",") * (SIZE // 1801) + b"1]}",
    "deep": b'{"model":"m","messages":' + b"[" * SIZE + b"}",
    "values": b'{"model":"m",' + (b'"k":[' + b"[]," * (SIZE // 12_000) + b"1],") * 4_000 + b'"n":1}',
    "escapes": b'{"model":"m","messages":[{"content":"' + b'\\"' * (SIZE // 2) + b'"}]}',
    "backslashes": b'{"model":"m","messages":[{"content":"' + b"\\\\" * (SIZE // 2) + b'"}]}',
    "string": b'{"model":"m","messages":[{"content":"' + b"x" * SIZE + b'"}]}',
    "number": b'{"model":"m","max_tokens":' + b"9" * SIZE + b"}",
    "key": b'{"model":"m","' + b"k" * SIZE + b'":1}',
    "space": b'{"model":"m",' + b" " * SIZE + b'"k":1}',
    "name": b'{"model":"' + b"m" * SIZE + b'"}',
}


@pytest.mark.parametrize("kind", list(HOSTILE))
@pytest.mark.parametrize("dialect", [Dialect.CHAT, Dialect.OLLAMA_CHAT])
def test_no_step_of_a_hostile_body_takes_long(kind: str, dialect: Dialect) -> None:
    asked = itertools.count()
    steps = large.read(dialect, HOSTILE[kind], lambda: next(asked) > 200)
    assert max(timed(steps)) < 0.03, "a step is some ms of CPU, and a loaded machine has its caches cold"


def timed(steps: Iterable[None]) -> Generator[float, None, None]:
    """The CPU time of each step."""
    began = time.thread_time()
    for _ in steps:
        yield time.thread_time() - began
        began = time.thread_time()
    yield time.thread_time() - began


def test_what_is_intricate_counts_as_heavy_and_ordinary_bodies_do_not() -> None:
    assert not is_heavy(BODY)
    assert not is_heavy(b'{"model":"m","messages":[{"content":"' + b"so, " * 4_000 + b'"}]}')
    assert is_heavy(b'{"model":"m","messages":[' + b"1," * 5_000 + b"1]}")
    assert is_heavy(b'{"model":"m","x":"' + b"x" * limits.BODY_INLINE + b'"}')


async def test_hostile_bodies_do_not_hold_up_others() -> None:
    """Three at once, and meanwhile small requests are served one after another."""

    async def send() -> int:
        return (await ask(relay.port, post(relay.port, body))).status

    body = b'{"model":"m","messages":[' + b"1," * 30_000 + b"1]" + b',"k":1' * 1_000 + b"}"
    async with Recorder() as up, running(up.port) as relay:
        asked = [asyncio.create_task(send()) for _ in range(3)]
        served = 0
        while not all(task.done() for task in asked):
            assert (await ask(relay.port, get(relay.port))).status == 200
            served += 1
            await asyncio.sleep(0.002)
        assert {task.result() for task in asked} == {200}
        assert served > 20
        relay.assert_idle()


async def test_large_bodies_reach_the_engine_as_they_came_and_under_its_own_name() -> None:
    head = b'{"model" : "m", "pairmesh":{"class":"batch"},"messages":[{"content":"'
    body = head + b"\\u00e4\\n" * 100_000 + b'"}], "big":12345678901234567890}'
    async with Recorder() as up, running(up.port) as relay:
        relay.fleet.locals["e0"].spelled = "mine"
        assert (await ask(relay.port, post(relay.port, body))).status == 200
        sent = body.replace(b'"pairmesh":{"class":"batch"},', b"").replace(b'"m"', b'"mine"', 1)
        assert up.requests[0].body == sent
        assert relay.fleet.asked[0].facts.hints == b'{"class":"batch"}'
        assert relay.fleet.asked[0].body_bytes == len(body)
        relay.assert_idle()


async def test_a_client_that_leaves_while_its_body_is_read_leaves_nothing_behind() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, HOSTILE["odd"]))
        await until(lambda: relay.wiring.in_hand)
        client.reset()
        await until(lambda: not relay.wiring.in_hand)
        assert (await ask(relay.port, post(relay.port))).status == 200
        assert len(up.requests) == 1
        relay.assert_idle()


async def test_a_node_that_stops_while_a_body_is_read_says_so() -> None:
    async with Recorder() as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, HOSTILE["odd"]))
        await until(lambda: relay.wiring.in_hand)
        for request in tuple(relay.wiring.in_hand):
            request.shut_down()
        heard = await client.heard()
        assert (heard.status, heard.headers["connection"]) == (503, "close")
        client.close()
        assert up.requests == []
        relay.assert_idle()


async def test_a_request_behind_a_large_one_waits_for_it() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b"%d" % len(exchange.request.body))

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, HOSTILE["string"]) + post(relay.port))
        answers = [(await client.heard()).body for _ in range(2)]
        assert answers == [b"%d" % len(HOSTILE["string"]), b"%d" % len(BODY)]
        client.close()
