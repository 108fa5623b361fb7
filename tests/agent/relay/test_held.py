"""A request for which nobody has room waits in the router: served in turn, told the truth in time, gone with its client.
Real sockets on both sides."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from tests.agent.relay.client import Client, Heard, ask, post
from tests.agent.relay.rig import Relay, running
from tests.support.recorder import Exchange, Recorder, say_ok
from tests.support.until import until

BODIES = [b'{"model":"m","messages":[],"n":%d}' % number for number in range(4)]


@dataclass(slots=True)
class Scene:
    """A relay before ``engine``, which takes one request at a time and answers when it is told to."""

    relay: Relay
    engine: Recorder
    may_answer: asyncio.Semaphore
    clients: list[Client] = field(default_factory=list)

    def answer(self, times: int = 1) -> None:
        for _ in range(times):
            self.may_answer.release()

    async def sent(self, body: bytes, *, held: int) -> Client:
        """A client whose request has come in, after which ``held`` requests wait."""
        client = await Client.to(self.relay.port)
        self.clients.append(client)
        await client.send(post(self.relay.port, body))
        relay = self.relay
        await until(lambda: len(relay.wiring.in_hand) > held and len(relay.wiring.router.queue) == held)
        return client


@asynccontextmanager
async def one_at_a_time(
    *, before: tuple[int, ...] = (), hold_ms: int | None = 60_000
) -> AsyncIterator[Scene]:
    """``before``: ports of endpoints that are tried where the engine is full."""
    may_answer = asyncio.Semaphore(0)

    async def when_told(exchange: Exchange) -> None:
        await may_answer.acquire()
        await say_ok(exchange)

    async with Recorder(when_told) as engine, running(engine.port, *before) as relay:
        relay.fleet.room["e0"] = 1
        relay.fleet.hold_ms = hold_ms
        scene = Scene(relay, engine, may_answer)
        try:
            yield scene
            relay.assert_idle()
        finally:
            for client in scene.clients:
                client.close()


async def eof(exchange: Exchange) -> None:
    exchange.close()


def code_of(heard: Heard) -> str:
    code: str = json.loads(heard.body)["error"]["code"]
    return code


def waited_ms(heard: Heard) -> int:
    """The wait for room that the reply tells."""
    return int(heard.headers["server-timing"].removeprefix("queue;dur="))


async def test_held_requests_are_served_in_turn_as_soon_as_there_is_room() -> None:
    async with one_at_a_time() as scene:
        clients = [await scene.sent(body, held=held) for held, body in enumerate(BODIES)]
        assert len(scene.engine.requests) == 1
        scene.answer(4)
        heard = [await client.heard() for client in clients]
        assert [each.status for each in heard] == [200] * 4
        assert [request.body for request in scene.engine.requests] == BODIES
        assert "server-timing" not in heard[0].headers
        assert min(map(waited_ms, heard[1:])) >= 0
        assert all("x-pairmesh-attempts" not in each.headers for each in heard)
        assert scene.relay.watch.results() == ["done"] * 4


async def test_who_waited_in_vain_is_told_to_come_back() -> None:
    async with one_at_a_time(hold_ms=50) as scene:
        first = await scene.sent(BODIES[0], held=0)
        heard = await ask(scene.relay.port, post(scene.relay.port, BODIES[1]))
        assert (heard.status, code_of(heard)) == (429, "queue_full")
        assert (heard.headers["retry-after"], heard.headers["x-pairmesh-reason"]) == ("7", "queue_full")
        assert heard.headers["x-pairmesh-decision-id"] == "full"
        assert waited_ms(heard) >= 50
        scene.answer()
        assert (await first.heard()).status == 200
        assert [request.body for request in scene.engine.requests] == BODIES[:1]
        lines = scene.relay.watch.lines
        assert [(line.status, line.decision_id, line.attempts) for line in lines] == [
            (429, "full", 0),
            (200, "d1", 1),
        ]


@pytest.mark.parametrize("leave", [Client.close, Client.reset, lambda client: client.writer.write_eof()])
async def test_a_client_that_leaves_while_held_is_forgotten_at_once(leave: Callable[[Client], None]) -> None:
    async with one_at_a_time() as scene:
        relay = scene.relay
        first = await scene.sent(BODIES[0], held=0)
        gone = await scene.sent(BODIES[1], held=1)
        last = await scene.sent(BODIES[2], held=2)
        leave(gone)
        await until(lambda: len(relay.wiring.router.queue) == 1)
        assert relay.buffered.held == len(BODIES[0]) + len(BODIES[2])
        assert [(line.status, line.code, line.decision_id) for line in relay.watch.lines] == [
            (499, "client_gone", "full")
        ]
        scene.answer(2)
        assert [(await client.heard()).status for client in (first, last)] == [200, 200]
        assert [request.body for request in scene.engine.requests] == [BODIES[0], BODIES[2]]


async def test_after_a_failure_a_request_waits_for_the_endpoint_that_is_only_full() -> None:
    async with Recorder(eof) as bad, one_at_a_time(before=(bad.port,)) as scene:
        first = await scene.sent(BODIES[0], held=0)
        second = await scene.sent(BODIES[1], held=1)
        assert len(bad.requests) == 1
        scene.answer(2)
        assert (await first.heard()).status == 200
        heard = await second.heard()
        assert (heard.status, heard.headers["x-pairmesh-attempts"]) == (200, "2")
        assert scene.relay.watch.results() == ["failed", "done", "done"]


async def test_who_waited_and_was_then_failed_is_told_of_both_and_of_its_hints() -> None:
    async with one_at_a_time() as scene:
        first = await scene.sent(BODIES[0], held=0)
        second = await scene.sent(BODIES[1], held=1)
        scene.answer()
        assert (await first.heard()).status == 200
        await until(lambda: len(scene.engine.requests) == 2)
        for request in tuple(scene.relay.wiring.in_hand):
            request.shut_down()
        heard = await second.heard()
        assert (heard.status, heard.headers["x-pairmesh-hints"]) == (503, "class=honoured")
        assert waited_ms(heard) >= 0


async def test_after_a_failure_full_endpoints_are_no_bad_gateway() -> None:
    async with Recorder(eof) as bad, one_at_a_time(before=(bad.port,), hold_ms=None) as scene:
        first = await scene.sent(BODIES[0], held=0)
        heard = await ask(scene.relay.port, post(scene.relay.port, BODIES[1]))
        assert (heard.status, code_of(heard), heard.headers["retry-after"]) == (429, "queue_full", "7")
        assert "server-timing" not in heard.headers
        scene.answer()
        assert (await first.heard()).status == 200


async def test_a_node_that_stops_answers_whoever_waits() -> None:
    async with one_at_a_time() as scene:
        first = await scene.sent(BODIES[0], held=0)
        second = await scene.sent(BODIES[1], held=1)
        for request in tuple(scene.relay.wiring.in_hand):
            if request.is_held:
                request.shut_down()
        heard = await second.heard()
        assert (heard.status, code_of(heard)) == (503, "shutting_down")
        assert int(heard.headers["retry-after"]) >= 1
        scene.answer()
        assert (await first.heard()).status == 200
        assert len(scene.engine.requests) == 1


async def test_whoever_waits_and_finds_everybody_gone_is_told_so() -> None:
    async with one_at_a_time() as scene:
        first = await scene.sent(BODIES[0], held=0)
        second = await scene.sent(BODIES[1], held=1)
        scene.relay.fleet.order.clear()
        scene.relay.wiring.router.queue.news(0)
        heard = await second.heard()
        assert (heard.status, code_of(heard)) == (502, "tried")
        scene.answer()
        assert (await first.heard()).status == 200


async def test_a_fault_of_our_own_while_held_gives_everything_back() -> None:
    async with one_at_a_time() as scene:
        relay = scene.relay
        first = await scene.sent(BODIES[0], held=0)
        second = await scene.sent(BODIES[1], held=1)
        relay.fleet.break_at = "decide"
        relay.wiring.router.queue.news(0)
        assert (await second.heard()).status == 502
        relay.fleet.break_at = ""
        assert [where for where, _ in relay.watch.faults] == ["exchange"]
        relay.watch.faults.clear()
        scene.answer()
        assert (await first.heard()).status == 200
