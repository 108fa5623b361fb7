"""What is to be known before the first decision is waited for, and whatever comes of it the request goes on."""

import asyncio
import json

from tests.agent.relay.client import Client, post
from tests.agent.relay.rig import Relay, running
from tests.support.ports import HeldPort
from tests.support.recorder import Recorder, say_ok
from tests.support.until import until


class Consulted:
    """What a relay waits for: it ends when the test says so."""

    def __init__(self, relay: Relay) -> None:
        self.asked = 0
        self.given_up = 0
        self.answer = asyncio.Event()
        self.fault: Exception | None = None
        relay.fleet.consult = self.wait

    async def wait(self) -> None:
        self.asked += 1
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.fault is not None:
            raise self.fault


async def test_nothing_is_decided_before_the_answer_and_it_is_waited_for_once() -> None:
    closed = HeldPort()
    async with Recorder(say_ok) as engine, running(closed.port, engine.port) as relay:
        consulted = Consulted(relay)
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await until(lambda: consulted.asked == 1)
        assert relay.fleet.decisions == 0
        assert not relay.fleet.open_seqs
        consulted.answer.set()
        assert (await client.heard()).status == 200
        assert relay.watch.results() == ["failed", "done"]
        assert consulted.asked == 1
        client.close()
        relay.assert_idle()


async def test_a_client_that_leaves_meanwhile_ends_the_waiting_and_nothing_is_dispatched() -> None:
    async with Recorder(say_ok) as engine, running(engine.port) as relay:
        consulted = Consulted(relay)
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await until(lambda: consulted.asked == 1)
        client.close()
        await until(lambda: relay.watch.lines)
        await until(lambda: consulted.given_up == 1)
        assert (relay.watch.lines[0].status, relay.watch.lines[0].code) == (499, "client_gone")
        assert relay.fleet.decisions == 0
        assert engine.requests == []
        relay.assert_idle()


async def test_a_node_that_stops_meanwhile_says_so() -> None:
    async with Recorder(say_ok) as engine, running(engine.port) as relay:
        consulted = Consulted(relay)
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        await until(lambda: consulted.asked == 1)
        for courier in tuple(relay.wiring.in_hand):
            courier.shut_down()
        heard = await client.heard()
        assert (heard.status, json.loads(heard.body)["error"]["code"]) == (503, "shutting_down")
        await until(lambda: consulted.given_up == 1)
        client.close()
        relay.assert_idle()


async def test_a_fault_of_our_own_while_waiting_is_told_and_the_request_goes_on() -> None:
    async with Recorder(say_ok) as engine, running(engine.port) as relay:
        consulted = Consulted(relay)
        consulted.fault = RuntimeError("on purpose")
        consulted.answer.set()
        client = await Client.to(relay.port)
        await client.send(post(relay.port))
        assert (await client.heard()).status == 200
        client.close()
        faults, relay.watch.faults = relay.watch.faults, []
        assert [(where, str(fault)) for where, fault in faults] == [("consult", "on purpose")]
        relay.assert_idle()
