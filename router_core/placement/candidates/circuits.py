"""The circuit breakers of a router, as far as placement needs them."""

from typing import Protocol

from router_core.placement.request.request import Endpoint


class Breaking(Protocol):
    """The circuit breakers of this router, as far as choosing needs them."""

    def __len__(self) -> int:
        """How many are not closed."""

    def state(self, endpoint: Endpoint, now: int) -> int:
        """0 closed, 1 half-open (ready for one trial), 2 open."""

    def last_fault_ms(self, endpoint: Endpoint) -> int | None:
        """When the endpoint last failed, boot ms; None if it never did."""

    def is_on_trial(self, endpoint: Endpoint) -> bool:
        """Whether a request is under way that shows if it can be used again."""


class NoBreakers:
    """Every breaker closed, always."""

    def __len__(self) -> int:
        return 0

    def state(self, endpoint: Endpoint, now: int) -> int:
        return 0

    def last_fault_ms(self, endpoint: Endpoint) -> int | None:
        return None

    def is_on_trial(self, endpoint: Endpoint) -> bool:
        return False
