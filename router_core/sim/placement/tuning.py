"""What each number of the placement policy is worth: one number changed at a time, against the shipped policy.

Rules: both play the same requests of the same seed, so that differences are of the policy alone; what is chosen on the
training part of the traces is judged on the held-out part. Refuses to run and to print.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from msgspec import Struct

from router_core.errors import LocalMisuse
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement.report import Mean, mean_of
from router_core.sim.placement.trial import Result, Supply

_SLO_FLOOR = 0.01
_LOADS_FLOOR = 10.0


class Part(Enum):
    """Of every trace the first half trains and the second is held out; of clients every other one."""

    TRAINING = "training"
    HELD_OUT = "held-out"


KNOBS: tuple[str, ...] = (
    "weights.slo",
    "weights.memory",
    "weights.switch",
    "weights.speed",
    "wait_doubt",
    "wait_doubt_each",
    "wait_by_size",
    "decode_share",
    "cost_least_s",
    "herd_share",
    "ahead_least",
    "patient_after",
    "veto_above",
    "pareto_eps",
    "tie_fixed",
    "tie_per_period",
    "herd_floor",
    "herd_cap",
    "debt_scale_s",
    "debt_horizon_s",
)
"""Numbers of the policy that are tried, by their dotted names."""


class Try(Struct, frozen=True, kw_only=True):
    """One value of one knob; ``path`` None is the shipped policy."""

    path: str | None
    value: float = 0.0


SHIPPED = Try(path=None)


class Effect(Struct, frozen=True, kw_only=True):
    """What a try did in one scenario: the change of the logarithm of its cost, and of some figures, mean over seeds with
    half its 95 % interval. ``same``: not one run differed."""

    tried: Try
    scenario: str
    change: Mean
    figures: dict[str, Mean] = {}
    same: bool = False


def value_of(policy: PlacementPolicy, path: str) -> float:
    """The number at ``path``. Raises LocalMisuse if there is none."""
    found: Any = policy
    for name in path.split("."):
        if not is_dataclass(found) or name not in {field.name for field in fields(found)}:
            raise LocalMisuse(f"{path} is no number of the policy")
        found = getattr(found, name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise LocalMisuse(f"{path} is no number of the policy")
    return found


def changed(policy: PlacementPolicy, values: Mapping[str, float]) -> PlacementPolicy:
    """``policy`` with other numbers at some paths. Raises LocalMisuse as the policy itself does."""
    for path, value in values.items():
        value_of(policy, path)
        outer, dot, inner = path.partition(".")
        new: dict[str, Any] = {outer: replace(getattr(policy, outer), **{inner: value}) if dot else value}
        policy = replace(policy, **new)
    return policy


def halved_and_doubled(policy: PlacementPolicy, path: str) -> list[Try]:
    """The tries of one number: half and twice of what is shipped, as far as the policy allows them."""
    shipped = value_of(policy, path)
    tries = []
    for value in (shipped / 2, 2 * shipped):
        try:
            changed(policy, {path: value})
        except LocalMisuse:
            continue
        tries.append(Try(path=path, value=value))
    return tries


def part_of(supply: Supply, part: Part) -> Supply:
    """The requests of one part; measurements belong to both."""
    second = part is Part.HELD_OUT
    halves = {
        name: lengths[len(lengths) // 2 :] if second else lengths[: len(lengths) // 2]
        for name, lengths in supply.lengths.items()
    }
    return Supply(lengths=halves, clients=supply.clients[int(second) :: 2], measured=supply.measured)


FIGURES: Mapping[str, Callable[[Result], float]] = {
    "p50": lambda one: math.log(one.ttft_p50),
    "p95": lambda one: math.log(one.ttft_p95),
    "whole p95": lambda one: math.log(one.total_p95),
    "misses": lambda one: math.log(_SLO_FLOOR + one.slo_misses),
    "loads": lambda one: math.log(_LOADS_FLOOR + one.cold_loads),
}
"""What is told of a try beside its cost: logarithms, so that differences are ratios."""


def cost(result: Result) -> float:
    """What the gates are made of, in one number: ln of the geometric mean of TTFT p95, SLO misses and cold loads.

    1 % of misses and 10 loads are added, so that next to nothing is not infinitely better than nothing.
    """
    return sum(FIGURES[name](result) for name in ("p95", "misses", "loads")) / 3.0


def effects(results: Mapping[Try, Sequence[Result]]) -> list[Effect]:
    """Every try against ``SHIPPED``, by scenario. Results of one scenario and seed are compared with each other."""
    base = {(one.scenario, one.rho, one.seed): one for one in results[SHIPPED]}
    found = []
    for tried, played in results.items():
        if tried == SHIPPED:
            continue
        pairs: dict[str, list[tuple[Result, Result]]] = {}
        for one in played:
            pairs.setdefault(one.scenario, []).append((base[one.scenario, one.rho, one.seed], one))
        found += [
            Effect(
                tried=tried,
                scenario=name,
                change=_change(cost, both),
                figures={figure: _change(measure, both) for figure, measure in FIGURES.items()},
                same=all(before == after for before, after in both),
            )
            for name, both in pairs.items()
        ]
    return found


def _change(measure: Callable[[Result], float], pairs: Iterable[tuple[Result, Result]]) -> Mean:
    return mean_of([measure(after) - measure(before) for before, after in pairs])


def better(found: Iterable[Effect]) -> dict[str, float]:
    """The values to take over: per knob the one of least mean cost, if it is surely better in some scenario and surely
    worse in none. Sure is what the interval says; one seed says nothing."""
    by_try: dict[Try, list[Effect]] = {}
    for effect in found:
        by_try.setdefault(effect.tried, []).append(effect)
    best: dict[str, tuple[float, float]] = {}
    for tried, ones in by_try.items():
        assert tried.path is not None
        total = sum(one.change.value for one in ones)
        if any(surely(one.change) == 1 for one in ones) or not any(surely(one.change) == -1 for one in ones):
            continue
        if total < best.get(tried.path, (0.0, 0.0))[0]:
            best[tried.path] = (total, tried.value)
    return {path: value for path, (_, value) in best.items()}


def surely(change: Mean) -> int:
    """-1 surely cheaper, 1 surely dearer, 0 who knows."""
    if change.half is None or abs(change.value) <= change.half:
        return 0
    return -1 if change.value < 0 else 1
