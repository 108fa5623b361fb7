"""Numbers that placement is tuned by, validated on construction.

The defaults are the preset ``balanced``. Every policy knows its own hash, so that a decision can say what it was made
by. What the numbers stand on, and what else was tried, is told in ``scripts/scenarios/README.md``. It does
not know which file a number was read from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Final, Self

from router_core.errors import LocalMisuse
from router_core.policy.authority import AuthorityPolicy
from router_core.policy.canonical import hash_of
from router_core.policy.exchange import Hedge


class _Wider(Enum):
    """Cases in the order of definition, each wider than the one before."""

    level: int

    def __init__(self, _text: str) -> None:
        self.level = len(type(self).__members__)

    def within(self, cap: Self) -> Self:
        """This, or ``cap`` if that is stricter."""
        return self if self.level <= cap.level else cap


class Match(_Wider):
    """How loosely a model may be matched, from the model itself to any that the operator put into the pool."""

    EXACT = "exact"
    QUANT = "quant"
    FAMILY = "family"
    ANY = "any"


class Locality(_Wider):
    """How far a request may go: this node, paired nodes, or (where allowed) out of the mesh."""

    HOST = "host"
    MESH = "mesh"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the factors in the sum; ``spill`` and ``speed`` come on top of the other four. ``total`` is the most that
    scores can differ by, bonuses aside."""

    slo: float = 0.50
    memory: float = 0.20
    switch: float = 0.15
    pressure: float = 0.5
    spill: float = 0.25
    speed: float = 1.0
    total: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        for name, weight in weights.items():
            if not 0.0 <= weight <= 1.0:
                raise LocalMisuse(f"weight {name} is {weight}, allowed is 0..1")
        object.__setattr__(self, "total", sum(weights.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTargets:
    """What one request class promises by default. ``tpot_s`` None: no target per token. Its requests fill ``share`` of
    an endpoint's room and of the hold queue at most, and are held for ``hold_ms`` at most."""

    ttft_s: float
    tpot_s: float | None
    deadline_ms: int
    hold_ms: int = 600_000
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or (self.tpot_s is not None and self.tpot_s <= 0) or self.deadline_ms <= 0:
            raise LocalMisuse("targets of a request class must be positive")
        if self.hold_ms < 0:
            raise LocalMisuse(f"hold_ms of a request class is {self.hold_ms}, must be at least 0")
        if not 0.0 < self.share <= 1.0:
            raise LocalMisuse(f"share of a request class is {self.share}, allowed is above 0 up to 1")
        if self.deadline_ms < 1000.0 * self.ttft_s:
            raise LocalMisuse(
                f"a deadline of {self.deadline_ms} ms ends before the first token is due, at {self.ttft_s} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPolicy:
    """Everything a decision is tuned by. Seconds, bytes and tokens unless the name says otherwise.

    ``match_penalties`` are those of ``quant``, ``family`` and ``any``. One of these levels opens if no row of a stricter
    one risks its targets by less than ``match_opens_at``. ``match_min_bits`` per weight is the least that may stand in
    for another quantisation. Held requests take turns by ``hold_quantum_s`` and rise one class per ``hold_promote_ms``;
    ``background`` is put off from a saturation of ``shed_above``, and all of it at ``shed_range`` more.
    Above ``scored_all`` rows those ``scored_best`` are scored that would be done first, and the ``scored_calm`` least
    pressed.
    A share ``explore_share`` of requests tries a row with fewer than ``explore_samples`` own samples, if neither it nor
    the chosen one risks the targets by ``explore_risk``.
    ``hedge``: when a second attempt is made while the first one goes on.
    ``realloc_enabled``: this node may load and unload models of its own engines by their worth.
    ``pack_below``: rows whose ``slo`` factor is less go by how full they are, 0 packs nothing. ``hash`` is that of all
    other fields.
    """

    name: str = "balanced"
    weights: Weights = field(default_factory=Weights)
    interactive: ClassTargets = ClassTargets(
        ttft_s=2.0, tpot_s=0.100, deadline_ms=1_800_000, hold_ms=600_000, share=1.0
    )
    batch: ClassTargets = ClassTargets(
        ttft_s=60.0, tpot_s=None, deadline_ms=3_600_000, hold_ms=900_000, share=0.9
    )
    background: ClassTargets = ClassTargets(
        ttft_s=600.0, tpot_s=None, deadline_ms=3_600_000, hold_ms=1_800_000, share=0.7
    )
    hold_quantum_s: float = 5.0
    hold_promote_ms: int = 30_000
    shed_above: float = 0.8
    shed_range: float = 0.4
    aliases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    alias_step: float = 0.05
    alias_most: float = 0.20
    match_cap: Match = Match.ANY
    match_min_bits: float = 4.0
    match_any_pool: tuple[str, ...] = ()
    match_penalties: tuple[float, float, float] = (0.1, 0.3, 0.5)
    match_opens_at: float = 0.5
    spill_cap: Locality = Locality.MESH
    spill_on_above: float = 0.3
    spill_off_below: float = 0.1
    spill_price: float = 0.01
    spill_privacy: float = 0.5
    hint_bonus: float = 0.5
    context_most: float = 0.3
    affinity_bonus: float = 0.15
    affinity_ms: int = 600_000
    veto_above: float = 0.98
    veto_needs_below: float = 0.90
    pareto_eps: float = 0.02
    tie_fixed: float = 0.01
    tie_per_period: float = 0.02
    explore_share: float = 0.02
    explore_samples: int = 5
    explore_risk: float = 0.1
    wait_doubt: float = 0.05
    wait_doubt_each: float = 0.3
    wait_by_size: float = 3.0
    decode_share: float = 0.1
    cost_least_s: float = 0.1
    herd_share: float = 0.15
    ahead_least: float = 0.1
    patient_after: int = 4
    herd_floor: float = 1.0
    herd_cap: float = 8.0
    herd_cap_crowd: float = 16.0
    herd_crowd: int = 8
    image_tokens: int = 800
    audio_tokens: int = 500
    prompt_slack: float = 1.15
    output_tokens: int = 256
    unknown_factor: float = 0.33
    rtt_s: float = 0.001
    link_bytes_per_s: float = 100e6
    debt_scale_s: float = 20.0
    debt_horizon_s: float = 600.0
    least_fit_gib: float = 0.3
    session_headers: tuple[str, ...] = ("x-claude-code-session-id",)
    nearest_names: int = 3
    candidates_kept: int = 16
    scored_all: int = 64
    scored_best: int = 48
    scored_calm: int = 8
    authority: AuthorityPolicy = field(default_factory=AuthorityPolicy)
    hedge: Hedge = Hedge.HUNG
    realloc_enabled: bool = False
    pack_below: float = 0.0
    hash: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        faults = list(self._contradictions())
        if faults:
            raise LocalMisuse("; ".join(faults))
        object.__setattr__(self, "hash", hash_of(self))

    def _contradictions(self) -> Iterable[str]:
        if not 1.0 <= self.herd_floor <= self.herd_cap <= self.herd_cap_crowd:
            yield "herd multipliers must satisfy 1 <= floor <= cap <= crowd cap"
        if not 0.0 <= self.veto_needs_below <= self.veto_above:
            yield "a veto needs a row below a limit that is not above the one it vetoes from"
        for name in (
            "rtt_s",
            "debt_scale_s",
            "debt_horizon_s",
            "least_fit_gib",
            "link_bytes_per_s",
            "hold_quantum_s",
            "hold_promote_ms",
            "shed_above",
            "shed_range",
        ):
            if getattr(self, name) <= 0:
                yield f"{name} is {getattr(self, name)}, must be above 0"
        for name in ("explore_share", "explore_risk"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                yield f"{name} is {getattr(self, name)}, allowed is 0..1"
        for name in ("pareto_eps", "pack_below"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name} is {getattr(self, name)}, allowed is 0..1"
        if not 0.0 <= self.match_min_bits <= 64.0:
            yield f"match_min_bits is {self.match_min_bits}, allowed is 0..64"
        if list(self.match_penalties) != sorted(self.match_penalties) or self.match_penalties[0] < 0.0:
            yield f"match_penalties are {self.match_penalties}, must rise from 0 or more"
        if not 0.0 <= self.spill_off_below <= self.spill_on_above <= 1.0:
            yield (
                f"spill_off_below is {self.spill_off_below} and spill_on_above {self.spill_on_above}, "
                "allowed is 0..1, the first no greater"
            )
        if self.spill_price <= 0.0 or self.spill_privacy < 0.0:
            yield f"spill_price is {self.spill_price}, must be above 0; spill_privacy not below"
        if not 0.0 <= self.match_opens_at <= 1.0:
            yield f"match_opens_at is {self.match_opens_at}, allowed is 0..1"
        for alias, names in self.aliases:
            if not names:
                yield f"alias {alias!r} names no model"


PRESETS: Final[Mapping[str, PlacementPolicy]] = {
    policy.name: policy
    for policy in (
        PlacementPolicy(),
        PlacementPolicy(
            name="latency", weights=Weights(slo=0.7, memory=0.1, switch=0.1, pressure=0.1, speed=0.3)
        ),
        PlacementPolicy(name="pack", pack_below=0.05, explore_share=0.0),
    )
}
"""What an operator can start from."""
