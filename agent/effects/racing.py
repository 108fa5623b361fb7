"""Several tries for one thing, begun one after the other, of which the first to succeed counts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def first_of(
    tries: Sequence[Callable[[], Awaitable[T]]], *, after_s: float, unused: Callable[[T], None]
) -> T:
    """What the first try to succeed gives; if none does, what the first one raised.

    The next begins ``after_s`` after the one before it, or as soon as one failed. When one has succeeded the others are
    cancelled; ``unused`` gets what a late one still gave.
    """
    if len(tries) == 1:
        return await tries[0]()
    running: list[asyncio.Task[T]] = []
    faults: dict[int, BaseException] = {}
    won: asyncio.Task[T] | None = None
    try:
        while True:
            if len(running) < len(tries):
                running.append(asyncio.ensure_future(_run(tries[len(running)])))
            open_ones = [task for number, task in enumerate(running) if number not in faults]
            if not open_ones:
                raise faults[0]
            after = after_s if len(running) < len(tries) else None
            await asyncio.wait(open_ones, timeout=after, return_when=asyncio.FIRST_COMPLETED)
            for number, task in enumerate(running):
                if number in faults or not task.done():
                    continue
                fault = task.exception()
                if fault is None:
                    won = task
                    return task.result()
                faults[number] = fault
    finally:
        for task in running:
            task.cancel()
        for task, given in zip(running, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if task is not won and not isinstance(given, BaseException):
                unused(given)


async def _run(attempt: Callable[[], Awaitable[T]]) -> T:
    return await attempt()
