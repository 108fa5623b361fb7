"""The one place where tasks are born: named, kept alive, and cancelled together."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

Failed = Callable[[str, BaseException], None]


class Tasks:
    """Background tasks of one owner.

    A task that raises is reported through ``failed(name, exc)`` exactly once; it never takes its siblings
    down by itself. ``aclose`` cancels what is left and waits for it.
    """

    def __init__(self, failed: Failed) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start ``coro`` as a task of this owner."""
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._failed(task.get_name(), exc)

    async def aclose(self) -> None:
        """Cancel every task and wait until all have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def keep_running(
    name: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    failed: Failed,
    *,
    pause_s: float = 1.0,
    pause_most_s: float = 60.0,
) -> None:
    """Run a part that others can do without, anew each time it fails, after a pause that doubles while it goes on failing.
    Ends only by being cancelled."""
    loop = asyncio.get_running_loop()
    wait_s = pause_s
    while True:
        began = loop.time()
        try:
            await run()
        except Exception as exc:
            failed(name, exc)
        if loop.time() - began > pause_most_s:
            wait_s = pause_s
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, pause_most_s)
