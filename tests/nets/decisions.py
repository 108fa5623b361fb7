"""Net 1: 10,000 random decisions, each with its record and with what was reserved."""

from random import Random
from typing import Any, Final

from tests.nets.adapter.router import POLICIES, DecidingRouter
from tests.nets.draw import NOW, a_fleet, a_request
from tests.nets.net import Net

BLOCKS: Final = 100
_FLEETS: Final = 5
_TURNS: Final = 20
_POLICIES: Final = ("balanced", "balanced", "latency", "pack", "wide", "wide", "curious")


def block(label: str) -> list[dict[str, Any]]:
    """A hundred decisions: five fleets, and on each twenty requests one after the other, some of which end in between."""
    rng = Random(f"decisions/{label}")
    found = []
    for _ in range(_FLEETS):
        policy = rng.choice([name for name in _POLICIES if name in POLICIES])
        told = a_fleet(rng)
        router = DecidingRouter(told, policy)
        offers = [
            (node["name"], node["static"]["engines"][model["engine"]]["name"], model["name"])
            for node in told["nodes"]
            for model in node["static"]["models"]
        ]
        now, reserved = NOW, []
        for turn in range(_TURNS):
            document = router.decided(a_request(rng, turn, offers), now)
            found.append({"policy": policy} | document)
            if document.get("reserved") is not None:
                reserved.append(document["reserved"]["seq"])
            now += rng.choice((0, 0, 3, 40, 700))
            if reserved and rng.random() < 0.3:
                router.ended(reserved.pop(rng.randrange(len(reserved))), well=rng.random() < 0.8)
    return found


DECISIONS: Final = Net(
    name="decisions",
    about="10,000 random decisions: choice, alternatives, scores, exclusions, reason, reservation",
    labels=lambda: [f"{number:03}" for number in range(BLOCKS)],
    run=block,
    whole=200,
)
