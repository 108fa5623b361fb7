"""What holds for each path that infers, not for the usual one alone."""

import asyncio
import json

import pytest

from agent.relay.dialects.relayed import RELAYED, SHOW
from tests.agent.relay.client import Client, ask, post
from tests.agent.relay.rig import running
from tests.support.recorder import Exchange, Recorder

INFERRING = sorted(path for path in RELAYED if path != SHOW)
BODY = json.dumps(
    {"model": "m", "prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
).encode()


@pytest.mark.lesson("vllm-project/router#179: a route that was never counted")
@pytest.mark.parametrize("path", INFERRING)
async def test_a_request_counts_from_its_arrival_at_the_engine_until_its_end(path: bytes) -> None:
    answered = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await answered.wait()
        await exchange.answer(b'{"ok":true}')

    async with Recorder(script) as up, running(up.port) as relay:
        client = await Client.to(relay.port)
        await client.send(post(relay.port, BODY, path=path))
        await up.arrived()
        assert len(relay.fleet.open_seqs) == len(relay.wiring.in_hand) == 1
        answered.set()
        assert (await client.heard()).status == 200
        client.close()
    relay.assert_idle()


@pytest.mark.parametrize("path", INFERRING)
async def test_a_named_session_is_heard(path: bytes) -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, BODY, path=path, headers=b"X-Session-Id: s1\r\n"))
        assert heard.status == 200
        assert [asked.headers for asked in relay.fleet.asked] == [(("x-session-id", "s1"),)]
