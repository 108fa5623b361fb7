"""Tuning of one request's life: attempts, patience, the breaker."""

from dataclasses import dataclass

from router_core.errors import LocalMisuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePolicy:
    """Milliseconds unless the name says otherwise.

    ``attempts`` counts dispatches; the first refusal by a peer's ingress is not one of them, nor are the first
    ``refused_connects`` connections that a host refused at once: they took no time and began nothing. After each wait in
    the hold queue one more refusal is spared, up to ``refusals`` in all.
    """

    attempts: int = 3
    refused_connects: int = 5
    refusals: int = 20
    connect_ms: int = 2_000
    continue_ms: int = 2_000
    first_byte_floor_ms: int = 10_000
    idle_ms: int = 300_000
    suspect_before_commit_ms: int = 5_000
    suspect_after_commit_ms: int = 30_000
    breaker_in_a_row: int = 5
    breaker_least: int = 5
    breaker_share: float = 0.5
    breaker_window_ms: int = 30_000
    breaker_open_ms: int = 5_000
    breaker_open_max_ms: int = 60_000

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise LocalMisuse(f"exchange policy: {name} is {getattr(self, name)}, must be positive")
        if self.breaker_share > 1:
            raise LocalMisuse(f"exchange policy: breaker_share is {self.breaker_share}, at most 1")
        if self.breaker_open_ms > self.breaker_open_max_ms:
            raise LocalMisuse(
                f"exchange policy: breaker_open_ms is {self.breaker_open_ms}, "
                f"above breaker_open_max_ms {self.breaker_open_max_ms}"
            )
