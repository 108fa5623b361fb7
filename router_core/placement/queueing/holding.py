"""Drives a hold: who waits is told to try again when it may, one after another.

``news`` is looked at before it returns, so that nobody who comes later finds the room first. It knows nothing
of what trying means.
"""

from collections import deque
from collections.abc import Callable

from router_core.placement.queueing.hold import Hold, Joined, Left, NewsCame, Release, Stayed, Waiting
from router_core.placement.request.request import RequestClass
from router_core.policy.placement import PlacementPolicy


class Holding:
    """The queue of one router. Times are boot ms."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._retry: dict[int, Callable[[], None]] = {}
        self._releases: deque[Release] = deque()
        self._releasing = False

    def __len__(self) -> int:
        return len(self._retry)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._retry

    @property
    def policy(self) -> PlacementPolicy:
        """By which it is judged whose turn it is."""
        return self._hold.policy

    @policy.setter
    def policy(self, policy: PlacementPolicy) -> None:
        self._hold.policy = policy

    @property
    def body_bytes(self) -> int:
        """Bytes of the bodies that wait."""
        return self._hold.body_bytes

    def has_room(self, body_bytes: int, share: float = 1.0) -> bool:
        """Whether a request with a body of this size may join, if its class may fill ``share`` of the queue."""
        return self._hold.has_room(body_bytes, share)

    def depth(self, request_class: RequestClass) -> int:
        """How many requests of this class wait."""
        return self._hold.depth(request_class)

    def join(self, waiting: Waiting, retry: Callable[[], None], now: int) -> None:
        """Hold a request; ``retry`` has it decide again, upon which it may ``leave``."""
        self._hold.handle(Joined(waiting=waiting), now)
        self._retry[waiting.ticket] = retry

    def leave(self, ticket: int, now: int) -> None:
        """The request waits no longer; saying so twice is harmless."""
        if self._retry.pop(ticket, None) is not None:
            self._release(self._hold.handle(Left(ticket=ticket), now), now)

    def news(self, now: int) -> None:
        """There may be room somewhere."""
        if self._retry:
            self._release(self._hold.handle(NewsCame(), now), now)

    def _release(self, releases: list[Release], now: int) -> None:
        self._releases += releases
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._releases:
                ticket = self._releases.popleft().ticket
                self._retry[ticket]()
                if ticket in self._retry:
                    self._releases += self._hold.handle(Stayed(ticket=ticket), now)
        finally:
            self._releasing = False
