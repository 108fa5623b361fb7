"""Waiting for a condition with a deadline: the only way a test of the shell waits."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.01


async def until(
    pred: Callable[[], T],
    within_s: float = 10.0,
    *,
    picture: Callable[[], object] | None = None,
) -> T:
    """The first truthy value of ``pred()``; fails with the last ``picture()`` after ``within_s`` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not (value := pred()):
        if loop.time() > deadline:
            seen = f"; last picture: {picture()!r}" if picture is not None else f"; last value: {value!r}"
            raise AssertionError(f"condition not reached within {within_s} s{seen}")
        await asyncio.sleep(_POLL_S)
    return value
