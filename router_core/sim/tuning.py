"""What each number of the placement policy is worth: one number changed at a time, against the shipped policy.

Rules: both play the same requests of the same seed, so that differences are of the policy alone; what is chosen on the
training part of the traces is judged on the held-out part. Refuses to run and to print.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from msgspec import Struct

from router_core.errors import LocalMisuse
from router_core.policy.placement import PlacementPolicy
from router_core.sim.placement_report import Mean, mean_of
from router_core.sim.trial import Result, Supply

_SLO_FLOOR = 0.01
_LOADS_FLOOR = 10.0


class Part(Enum):
    """Of every trace the first half trains and the second is held out; of clients every other one."""

    TRAINING = "training"
    HELD_OUT = "held-out"


class Knob(Struct, frozen=True, kw_only=True):
    """One number of the policy by its dotted name, and the values to try instead of the shipped one."""

    path: str
    values: tuple[float, ...]


KNOBS: tuple[Knob, ...] = (
    Knob(path="weights.slo", values=(0.25, 1.0)),
    Knob(path="weights.memory", values=(0.1, 0.4)),
    Knob(path="weights.switch", values=(0.05, 0.3)),
    Knob(path="weights.speed", values=(0.5, 0.75)),
    Knob(path="wait_doubt", values=(0.02, 0.15)),
    Knob(path="wait_doubt_each", values=(0.15, 0.6)),
    Knob(path="wait_by_size", values=(1.0, 6.0)),
    Knob(path="decode_share", values=(0.05, 0.2)),
    Knob(path="herd_share", values=(0.0, 0.3)),
    Knob(path="ahead_least", values=(0.0, 0.6)),
    Knob(path="veto_above", values=(0.95, 1.0)),
    Knob(path="pareto_eps", values=(0.01, 0.05)),
    Knob(path="tie_fixed", values=(0.0, 0.03)),
    Knob(path="tie_per_period", values=(0.0, 0.06)),
    Knob(path="herd_floor", values=(2.0, 3.0)),
    Knob(path="herd_cap", values=(4.0, 16.0)),
    Knob(path="debt_scale_s", values=(10.0, 40.0)),
    Knob(path="debt_horizon_s", values=(300.0, 1200.0)),
)


class Try(Struct, frozen=True, kw_only=True):
    """One value of one knob; ``path`` None is the shipped policy."""

    path: str | None
    value: float = 0.0


SHIPPED = Try(path=None)


class Effect(Struct, frozen=True, kw_only=True):
    """What a try did in one scenario: the relative change of its cost, mean over seeds with half its 95 % interval."""

    tried: Try
    scenario: str
    change: Mean


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


def part_of(supply: Supply, part: Part) -> Supply:
    """The requests of one part; measurements belong to both."""
    second = part is Part.HELD_OUT
    halves = {
        name: lengths[len(lengths) // 2 :] if second else lengths[: len(lengths) // 2]
        for name, lengths in supply.lengths.items()
    }
    return Supply(lengths=halves, clients=supply.clients[int(second) :: 2], measured=supply.measured)


def cost(result: Result) -> float:
    """What the gates are made of, in one number: ln of the geometric mean of TTFT p95, SLO misses and cold loads.

    1 % of misses and 10 loads are added, so that next to nothing is not infinitely better than nothing.
    """
    return (
        math.log(result.ttft_p95)
        + math.log(_SLO_FLOOR + result.slo_misses)
        + math.log(_LOADS_FLOOR + result.cold_loads)
    ) / 3.0


def effects(results: Mapping[Try, Sequence[Result]]) -> list[Effect]:
    """Every try against ``SHIPPED``, by scenario. Results of one scenario and seed are compared with each other."""
    base = {(one.scenario, one.rho, one.seed): cost(one) for one in results[SHIPPED]}
    found = []
    for tried, played in results.items():
        if tried == SHIPPED:
            continue
        gaps: dict[str, list[float]] = {}
        for one in played:
            gaps.setdefault(one.scenario, []).append(cost(one) - base[one.scenario, one.rho, one.seed])
        found += [Effect(tried=tried, scenario=name, change=mean_of(values)) for name, values in gaps.items()]
    return found


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
