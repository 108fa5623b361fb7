"""Parts that others can do without: they fail, are told of, and begin anew."""

import asyncio

from agent.effects.tasks import keep_running


async def test_a_part_that_fails_is_told_and_begun_anew_until_it_is_cancelled() -> None:
    runs: list[int] = []
    failures: list[tuple[str, str]] = []
    lasting = asyncio.Event()

    async def part() -> None:
        runs.append(1)
        if len(runs) < 3:
            raise OSError(24, "too many open files")
        lasting.set()
        await asyncio.Event().wait()

    kept = asyncio.create_task(
        keep_running(
            "watcher", part, lambda name, exc: failures.append((name, type(exc).__name__)), pause_s=0.001
        )
    )
    await asyncio.wait_for(lasting.wait(), 5.0)
    assert failures == [("watcher", "OSError")] * 2
    assert not kept.done()
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    assert kept.cancelled()
