"""The only two ways a chaos test waits: for a condition with a deadline, or through a counted part of a fault."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.05


async def until(pred: Callable[[], Awaitable[T]], within_s: float, what: str) -> T:
    """The first truthy value of ``await pred()``; AssertionError with the last value after ``within_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not (value := await pred()):
        if loop.time() > deadline:
            raise AssertionError(f"not within {within_s} s: {what}; last seen: {value!r}")
        await asyncio.sleep(POLL_S)
    return value


async def hold(seconds: float) -> None:
    """Let a fault last."""
    await asyncio.sleep(seconds)
