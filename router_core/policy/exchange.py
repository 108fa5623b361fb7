"""Tuning of one request's life: attempts, second attempts, the breaker."""

from dataclasses import dataclass
from enum import Enum

from router_core.errors import LocalMisuse


class Hedge(Enum):
    """When a second attempt is made while the first one goes on."""

    OFF = "off"
    HUNG = "hung"
    OVERDUE = "overdue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePolicy:
    """Milliseconds unless the name says otherwise.

    ``attempts`` counts dispatches that an engine may have begun to work on. Others are not counted, as nothing was lost
    but time: ``spared`` connections that failed, bodies that nobody asked for, and answers that only decline; and up to
    ``refusals`` by peers' ingresses. A second attempt is made beside one that is overdue and got no byte for ``hung_ms``, or
    however long that was expected to take in a third of the time that is left; if nobody has a free place then, it is
    looked for again every ``spare_retry_ms``.
    """

    attempts: int = 3
    spared: int = 20
    refusals: int = 20
    connect_ms: int = 2_000
    continue_ms: int = 2_000
    overdue_floor_ms: int = 10_000
    hung_ms: int = 55_000
    spare_retry_ms: int = 5_000
    idle_ms: int = 300_000
    suspect_after_commit_ms: int = 30_000
    busy_ms: int = 5_000
    overdue_kept_ms: int = 60_000
    overdue_suspects: int = 2
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
