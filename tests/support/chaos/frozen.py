"""24 chats at once on two nodes, one of whose daemons is stopped in the middle: how long, and what became of each.

Only the daemon freezes; its engine goes on, which nobody can see from outside.
"""

import time
from dataclasses import dataclass
from typing import Any

from tests.support.chaos.mesh import Mesh, lines_of
from tests.support.chaos.waiting import hold, until

CHATS = 24
WARM_UPS = 2
FREEZE_AT = 0.3
"""When the victim stops, as a share of the undisturbed time."""
WARM_TOKENS = 40
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
        await mesh.burst(at, CHATS, tokens=WARM_TOKENS)
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
