"""Drives a hold: who waits is told to try again when it may, one after another.

``news`` is looked at before it returns, so that nobody who comes later finds the room first. Time is given by whoever
embeds it. Refuses to know what trying is.
"""

from collections import deque
from collections.abc import Callable

from router_core.placement.hold import Hold, Joined, Left, NewsCame, Release, Stayed, Waiting


class Holding:
    """``now`` gives boot ms."""

    def __init__(self, hold: Hold, now: Callable[[], int]) -> None:
        self._hold = hold
        self._now = now
        self._retry: dict[int, Callable[[], None]] = {}
        self._releases: deque[Release] = deque()
        self._releasing = False

    def __len__(self) -> int:
        return len(self._retry)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._retry

    def join(self, waiting: Waiting, retry: Callable[[], None]) -> None:
        """Hold a request; ``retry`` has it decide again, upon which it may ``leave``."""
        self._hold.handle(Joined(waiting=waiting), self._now())
        self._retry[waiting.ticket] = retry

    def leave(self, ticket: int) -> None:
        """The request waits no longer; saying so twice is harmless."""
        if self._retry.pop(ticket, None) is not None:
            self._release(self._hold.handle(Left(ticket=ticket), self._now()))

    def news(self) -> None:
        """There may be room somewhere."""
        if self._retry:
            self._release(self._hold.handle(NewsCame(), self._now()))

    def _release(self, releases: list[Release]) -> None:
        self._releases += releases
        if self._releasing:
            return
        self._releasing = True
        try:
            while self._releases:
                ticket = self._releases.popleft().ticket
                self._retry[ticket]()
                if ticket in self._retry:
                    self._releases += self._hold.handle(Stayed(ticket=ticket), self._now())
        finally:
            self._releasing = False
