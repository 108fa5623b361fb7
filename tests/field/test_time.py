"""How long things may take: guesses rank, and end nothing.

Black box: whole daemons, real sockets, scripted engines.
"""

import asyncio
from pathlib import Path
from typing import Any

from tests.support.field import Endpoint, OpenAiEngine, chat, mesh

LATE_S = 12.0
"""Beyond what anything was ever given by a prediction."""


def wide(url: str, extra: str = "", name: str = "engine") -> Endpoint:
    """An endpoint that takes eight requests at a time."""
    return Endpoint(url=url, name=name, extra=f"slots = 8\n{extra}")


async def taught(engine: OpenAiEngine, *nodes: Any, count: int = 5) -> None:
    """Let every router learn that answers here are short and quick."""
    engine.length = 3
    for node in nodes:
        for _ in range(count):
            assert (await chat(node)).status == 200


async def test_an_answer_that_is_far_later_than_any_before_it_is_served(tmp_path: Path) -> None:
    """ggml-org/llama.cpp router mode, long prompts: five answers of 3 tokens, then whole ones and streams without a byte
    for 12 s, here and through a peer."""
    engine = OpenAiEngine()
    async with engine.serving() as url, mesh(tmp_path, alpha=[wide(url)], beta=[]) as cluster:
        alpha, beta = cluster["alpha"], cluster["beta"]
        await taught(engine, alpha, beta)
        engine.first_s = LATE_S
        asked = [chat(node, stream=stream) for node in (alpha, beta) for stream in (False, True)]
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 4
        assert [b"[DONE]" in reply.raw for reply in replies] == [False, True, False, True]
        assert engine.hung_up == 0
        assert engine.count() == 14, "each was asked once"
        engine.first_s = 0.0
        assert [(await chat(node)).status for node in (alpha, beta)] == [200, 200], (
            "nobody holds it against the engine"
        )
