"""What daemons learn of engines that tell little: servers that report ``usage`` alone, answer whole, or answer briefly."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.field import OpenAiEngine, Reply, chat, mesh, served_by

SLOW, FAST = 10.0, 56.0


def engines(scale: float = 0.7) -> tuple[OpenAiEngine, OpenAiEngine]:
    """Engines of 10 and of 56 tokens per second, in a time that passes ``1 / scale`` times as fast: slow enough that a busy
    machine does not show."""
    slow, fast = (OpenAiEngine(first_s=scale / speed, token_s=scale / speed) for speed in (SLOW, FAST))
    return slow, fast


async def one_by_one(cluster: Cluster, count: int, **more: Any) -> list[Reply]:
    return [
        await chat(cluster["alpha"], max_tokens=60 if n % 8 == 7 and not more else 20, **more)
        for n in range(count)
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streams"])
async def test_nearly_all_of_twenty_answers_come_from_the_fast_one_of_two_unlike_engines(
    tmp_path: Path, stream: bool
) -> None:
    """NVIDIA/Personal-AI-Router#7, with servers that report usage alone, short answers and no warming up."""
    slow, fast = engines()
    async with (
        slow.serving() as near,
        fast.serving() as far,
        mesh(tmp_path, alpha=[near], beta=[far]) as cluster,
    ):
        replies = await one_by_one(cluster, 20, **({"stream": True} if stream else {}))
    assert [reply.status for reply in replies] == [200] * 20
    assert [served_by(reply) for reply in replies].count("beta") >= 19
    assert (slow.count(), fast.count()) == (20 - fast.count(), fast.count())


async def test_an_engine_that_batches_and_tells_nothing_gets_all_at_once(tmp_path: Path) -> None:
    """24 requests of half a second at a server that works on 32 at a time, and at once after it began."""
    engine = OpenAiEngine(whole_s=0.5, slots=32)
    async with engine.serving() as url, mesh(tmp_path, alpha=[url]) as cluster:
        began = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(chat(cluster["alpha"], max_tokens=20) for _ in range(24)))
        took = asyncio.get_running_loop().time() - began
        (shown,) = (await cluster["alpha"].members())["alpha"]["engines"]
    assert [reply.status for reply in replies] == [200] * 24
    assert (engine.most, shown["slots"]) == (24, 32)
    assert took < 1.5
