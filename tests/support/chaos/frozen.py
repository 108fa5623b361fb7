"""24 chats at once on two nodes, one of whose daemons is stopped in the middle: how long, and what became of each.

Only the daemon freezes; its engine goes on, which nobody can see from outside. Run as a program it measures with
longer chats and holds the ratio against ``RATIO_MOST``.
"""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.chaos import namespaces
from tests.support.chaos.capabilities import probe
from tests.support.chaos.mesh import Mesh, lines_of, meshed
from tests.support.chaos.waiting import hold, until

CHATS = 24
TOKENS = 1_000
"""Of one chat when this is run as a program: 5 s at the engine's 200 a second."""
RATIO_MOST = 2.1
WARM_UPS = 2
FREEZE_AT = 0.3
"""When the victim stops, as a share of the undisturbed time."""
WARM_CHATS = 8
"""Warm-ups stream: speeds and lengths are learned from streams."""
OUT_S = 6.0
"""A silent node is out of the candidates within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """``seconds`` from the first request to the last answer, ``out_s`` until nothing was placed on the victim."""

    healthy: list[dict[str, Any]]
    frozen: list[dict[str, Any]]
    healthy_s: float
    frozen_s: float
    out_s: float

    @property
    def ratio(self) -> float:
        return self.frozen_s / self.healthy_s


def span(lines: list[dict[str, Any]]) -> float:
    """Seconds from the first request to the last answer."""
    return float(max(line["ended"] for line in lines) - min(line["begun"] for line in lines))


async def freeze_one(mesh: Mesh, *, at: str, victim: str, tokens: int) -> Frozen:
    """Send the chats twice to ``at``: undisturbed, and with ``victim`` stopped in mid-run. It stays stopped."""
    for _ in range(WARM_UPS):
        await mesh.burst(at, WARM_CHATS, tokens=tokens, stream_share=1.0)
    await mesh.quiet()
    healthy = await mesh.burst(at, CHATS, tokens=tokens, timeout_s=300.0)
    await mesh.quiet()
    load = mesh.load(at, burst=CHATS, tokens=tokens, timeout_s=300.0)
    await load.start()
    await hold(span(healthy) * FREEZE_AT)
    mesh[victim].pause()
    began = time.monotonic()

    async def out() -> bool:
        return victim not in await mesh[at].routes_to()

    await until(out, OUT_S, f"{victim} is no candidate any more")
    out_s = time.monotonic() - began
    await load.ended()
    frozen = lines_of(load)
    return Frozen(healthy=healthy, frozen=frozen, healthy_s=span(healthy), frozen_s=span(frozen), out_s=out_s)


async def _measure(tokens: int) -> int:
    with tempfile.TemporaryDirectory(prefix="pmc-") as folder:
        async with meshed(Path(folder), "frozen", ("a", "b"), slots=4) as mesh:
            seen = await freeze_one(mesh, at="a", victim="b", tokens=tokens)
    answered = sum(line["outcome"] == "whole" for line in (*seen.healthy, *seen.frozen))
    figures = {
        "frozen.healthy_s": (seen.healthy_s, "s"),
        "frozen.one_frozen_s": (seen.frozen_s, "s"),
        "frozen.ratio": (seen.ratio, ""),
        "frozen.out_of_candidates_s": (seen.out_s, "s"),
        "frozen.answered": (answered, f"of {2 * CHATS}"),
    }
    for name, (value, unit) in figures.items():
        sys.stdout.write(json.dumps({"name": name, "value": round(value, 2), "unit": unit}) + "\n")
    return int(seen.ratio > RATIO_MOST or answered < 2 * CHATS)


def main() -> int:
    """Measure and print; the exit status says whether the gate holds."""
    missing = probe().missing
    if missing:
        sys.stderr.write(f"skipped: {missing}\n")
        return 0
    namespaces.reap()
    return asyncio.run(_measure(TOKENS))


if __name__ == "__main__":
    sys.exit(main())
