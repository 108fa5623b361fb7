"""The roll of one listener's connections, and who looks at their deadlines."""

import asyncio
from typing import Any

from agent.effects.clock import SystemClock
from agent.relay.accept import Roll
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
