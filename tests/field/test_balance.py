"""Work over several machines: equal ones share it, and a fast one that has room is not passed over for a slow one."""

import asyncio
from collections import Counter
from pathlib import Path

from tests.support.field import Endpoint, OpenAiEngine, Reply, chat, mesh, served_by

SLOTS = 4
AT_ONCE = 24


def told(url: str) -> Endpoint:
    """An engine of which the owner tells how many requests it serves at a time."""
    return Endpoint(url=url, extra=f"slots = {SLOTS}\nmax_queue = {4 * SLOTS}\n")


async def test_24_equal_requests_over_two_equal_idle_nodes_are_shared_about_evenly(tmp_path: Path) -> None:
    """Field trial F3 of NVIDIA/Personal-AI-Router#6's burst: 24 whole answers at once at one of two equal nodes."""
    one, other = (OpenAiEngine(whole_s=0.5, slots=SLOTS) for _ in range(2))
    async with (
        one.serving() as first,
        other.serving() as second,
        mesh(tmp_path, alpha=[told(first)], beta=[told(second)]) as cluster,
    ):
        replies = await asyncio.gather(*(chat(cluster["alpha"], max_tokens=8) for _ in range(AT_ONCE)))
    assert Counter(reply.status for reply in replies) == {200: AT_ONCE}
    shares = Counter(served_by(reply) for reply in replies)
    assert min(shares["alpha"], shares["beta"]) >= AT_ONCE // 2 - 3, shares


async def test_a_partly_full_fast_node_is_not_left_idle_for_a_slow_one(tmp_path: Path) -> None:
    fast, slow = (OpenAiEngine(token_s=token_s, slots=SLOTS, length=20) for token_s in (0.004, 0.04))
    async with (
        fast.serving() as quick,
        slow.serving() as lame,
        mesh(tmp_path, alpha=[], fast=[told(quick)], slow=[told(lame)]) as cluster,
    ):
        alpha = cluster["alpha"]
        for name in ("fast", "slow") * 4:
            await chat(alpha, headers={"x-pairmesh-require": f"node=@{name}"}, max_tokens=20)
        only = {"x-pairmesh-require": "node=@fast"}
        long = [asyncio.create_task(chat(alpha, headers=only, max_tokens=1_000)) for _ in range(SLOTS - 2)]
        try:
            while fast.count() < 4 + len(long):
                await asyncio.sleep(0.02)
            replies: list[Reply] = [await chat(alpha, max_tokens=20) for _ in range(10)]
        finally:
            for each in long:
                each.cancel()
            await asyncio.gather(*long, return_exceptions=True)
    assert Counter(reply.status for reply in replies) == {200: 10}
    assert Counter(served_by(reply) for reply in replies)["fast"] >= 9
