"""Numbers that loading and unloading models by their worth is tuned by, validated on construction.

Start values, but for the limits that keep a host calm. It does not know where the numbers were read from.
"""

from dataclasses import dataclass

from router_core.errors import LocalMisuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPolicy:
    """Milliseconds unless the name says otherwise.

    A model is loaded ahead of requests if it is worth ``hysteresis`` times what makes room for it, once all levels
    were NONE for ``calm_ms``; a further replica once the best wait exceeded the load by ``replica_margin_s`` for
    ``replica_hold_ms``. ``turn_ms`` is the jitter, and what each node that could load sooner adds.
    """

    tick_ms: int = 15_000
    tick_jitter: float = 0.2
    hysteresis: float = 1.5
    calm_ms: int = 60_000
    replica_margin_s: float = 2.0
    replica_hold_ms: int = 10_000
    turn_ms: int = 5_000
    turns_most: int = 3
    resident_least_ms: int = 60_000
    unused_ms: int = 5_000
    drain_ms: int = 300_000
    unload_ms: int = 60_000
    freed_share: float = 0.8
    freed_ms: int = 5_000
    load_factor: float = 4.0
    load_least_ms: int = 5_000
    load_unknown_ms: int = 600_000
    loads_per_hour: int = 6
    retry_ms: int = 60_000
    retry_most_ms: int = 3_600_000
    share_ms: int = 1_800_000
    share_weight: float = 5.0
    watch_ms: int = 1_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "tick_jitter" and getattr(self, name) <= 0:
                raise LocalMisuse(f"residency policy: {name} is {getattr(self, name)}, must be above 0")
        if not 0.0 <= self.tick_jitter < 1.0:
            raise LocalMisuse(f"residency policy: tick_jitter is {self.tick_jitter}, allowed is 0 to below 1")
        if self.hysteresis < 1.0:
            raise LocalMisuse(f"residency policy: hysteresis is {self.hysteresis}, at least 1")
        if self.freed_share > 1.0:
            raise LocalMisuse(f"residency policy: freed_share is {self.freed_share}, at most 1")
        if self.retry_ms > self.retry_most_ms:
            raise LocalMisuse(f"residency policy: retry_ms is above retry_most_ms {self.retry_most_ms}")
