"""Virtual time: a heap of (t, n, call). Equal times run in the order in which they were asked for."""

from collections.abc import Callable
from heapq import heappop, heappush


class Timeline:
    """Milliseconds that pass only when something is due."""

    def __init__(self) -> None:
        self.now = 0
        self._n = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def at(self, t: int, call: Callable[[], None]) -> None:
        """Run ``call`` at ``t``, at once if that is past."""
        self._n += 1
        heappush(self._heap, (max(t, self.now), self._n, call))

    def after(self, delay: int, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def run_until(self, end: int) -> None:
        """Run everything due up to ``end``, and be at ``end``."""
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heappop(self._heap)
            call()
        self.now = end
