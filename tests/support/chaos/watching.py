"""What nodes said of each other while a fault lasted."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from tests.support.chaos.node import NodeProc

PICTURE_S = 0.1


@dataclass(kw_only=True)
class Watched:
    """``states[(seer, seen)]`` are the liveness states seen, each once per change, in order."""

    states: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def note(self, seer: str, picture: Mapping[str, str]) -> None:
        for seen, state in picture.items():
            told = self.states.setdefault((seer, seen), [])
            if not told or told[-1] != state:
                told.append(state)


@contextlib.asynccontextmanager
async def watching(*nodes: NodeProc) -> AsyncIterator[Watched]:
    """Read the picture of each node every ``PICTURE_S`` while the block runs."""
    watched = Watched()

    async def look() -> None:
        while True:
            for node in nodes:
                watched.note(node.name, await node.sees())
            await asyncio.sleep(PICTURE_S)

    looking = asyncio.create_task(look())
    try:
        yield watched
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
