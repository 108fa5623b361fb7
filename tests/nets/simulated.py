"""Net 3: every scenario of both simulators, small, one seed each, all figures."""

from typing import Any, Final

from tests.nets.adapter.simulators import (
    mesh_calm,
    mesh_faults,
    mesh_history,
    placement_cases,
    placement_figures,
)
from tests.nets.net import Net

_REQUESTS: Final = 60
_SEED: Final = 3
_NODES: Final = 3


def labels() -> list[str]:
    placement = [f"placement {scenario} {policy}" for scenario, policy in placement_cases()]
    return [*placement, "mesh calm", *[f"mesh {fault}" for fault in mesh_faults()]]


def figures(label: str) -> list[dict[str, Any]]:
    """All figures of one scenario under one policy, or of one mesh under one kind of fault."""
    kind, _, rest = label.partition(" ")
    if kind == "placement":
        scenario, policy = rest.split(" ")
        return [placement_figures(scenario, policy, seed=_SEED, requests=_REQUESTS)]
    return [mesh_calm(_NODES) if rest == "calm" else mesh_history(rest, seed=_SEED, nodes=_NODES)]


SIMULATED: Final = Net(
    name="simulated",
    about="every scenario of the placement simulator and of the mesh simulator: all figures",
    labels=labels,
    run=figures,
    whole=1,
)
