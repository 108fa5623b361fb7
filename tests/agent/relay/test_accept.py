"""The roll of one listener's connections, and who looks at their deadlines."""

import asyncio
import socket
from typing import Any

from agent.effects.clock import SystemClock
from agent.relay.http.acceptor import Roll
from agent.relay.http.connection import ServerConnection
from router_core import limits
from tests.agent.relay.client import Client, post
from tests.agent.relay.rig import running
from tests.support.recorder import Recorder
from tests.support.until import until


class Guest:
    def __init__(self) -> None:
        self.ticked: list[int] = []

    def tick(self, now: int) -> None:
        self.ticked.append(now)

    def close_when_idle(self) -> None: ...


async def test_a_roll_that_was_empty_looks_at_whoever_comes_and_at_nobody_who_left() -> None:
    roll = Roll(SystemClock())
    first: Any = Guest()
    second: Any = Guest()
    running = asyncio.create_task(roll.run())
    roll.join(first)
    roll.leave(first)
    roll.join(second)
    await until(lambda: second.ticked)
    running.cancel()
    assert first.ticked == []


async def test_no_socket_brings_more_than_a_bounded_piece_in_one_turn() -> None:
    """libuv reads up to 32 times in a row from a socket that fills its buffer of 256 KiB: what the kernel keeps is less."""

    seen: list[int] = []
    async with Recorder() as up, running(up.port) as relay:
        for _ in range(2):
            client = await Client.to(relay.port)
            await client.send(post(relay.port))
            assert (await client.heard()).status == 200
            [accepted] = [each for each in relay.roll if isinstance(each, ServerConnection)][:1]
            taken = accepted._transport.get_extra_info("socket")
            seen.append(taken.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
            client.close()
        for connections in relay.wiring.pool._idle.values():
            seen += [
                each.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
                for each in connections
            ]
    assert len(seen) >= 3
    assert max(seen) <= 2 * limits.RECEIVE_BUFFER
