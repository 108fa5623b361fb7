"""Filters between a reading and a threshold. Each takes ``(value, taken_ms)`` and gives the filtered value, or
None while it has seen too little.

Means, rates and shares restart by themselves after a gap of more than 10 s between values.
"""

from collections import deque
from typing import Final, Protocol

from router_core.policy.pressure import Filtering, FilterKind

GAP_MS: Final = 10_000


class Filter(Protocol):
    """Smooths or reduces the values of one signal."""

    def feed(self, value: float, taken_ms: int) -> float | None:
        """Take one value; return the filtered one."""

    def clear(self) -> None:
        """Forget everything, as after a suspend."""


class Ewma:
    """Exponentially weighted mean by elapsed time: a(dt) = 1 - 0.65^(dt / 1 s), dt at most 5 s."""

    KEEP: Final = 0.65
    LONGEST_MS: Final = 5_000

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def feed(self, value: float, taken_ms: int) -> float:
        if self._last is not None and taken_ms - self._last[1] <= GAP_MS:
            mean, before = self._last
            gain = 1 - self.KEEP ** (min(taken_ms - before, self.LONGEST_MS) / 1_000)
            value = mean + gain * (value - mean)
        self._last = (value, taken_ms)
        return value

    def clear(self) -> None:
        self._last = None


class WindowMin:
    """The least value of the last ``window_ms``."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._seen: deque[tuple[float, int]] = deque()

    def feed(self, value: float, taken_ms: int) -> float:
        seen = self._seen
        while seen and (seen[0][1] <= taken_ms - self._window_ms):
            seen.popleft()
        while seen and seen[-1][0] >= value:
            seen.pop()
        seen.append((value, taken_ms))
        return seen[0][0]

    def clear(self) -> None:
        self._seen.clear()


class CounterRate:
    """Growth per second of a rising counter, over the shortest span that covers ``window_ms``, or over what there
    is. A counter that falls was reset: what came before is forgotten."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._seen: deque[tuple[float, int]] = deque()

    def feed(self, value: float, taken_ms: int) -> float | None:
        seen = self._seen
        if seen and (value < seen[-1][0] or taken_ms - seen[-1][1] > GAP_MS):
            seen.clear()
        while len(seen) > 1 and seen[1][1] <= taken_ms - self._window_ms:
            seen.popleft()
        seen.append((value, taken_ms))
        oldest, since = seen[0]
        return None if taken_ms == since else (value - oldest) * 1_000 / (taken_ms - since)

    def clear(self) -> None:
        self._seen.clear()


class Rise:
    """How much a counter grew since the value before: 0 while it stands still."""

    def __init__(self) -> None:
        self._last: float | None = None

    def feed(self, value: float, taken_ms: int) -> float | None:
        last, self._last = self._last, value
        return None if last is None else max(0.0, value - last)

    def clear(self) -> None:
        self._last = None


class NofM:
    """How many of the last ``of`` values were not 0."""

    def __init__(self, of: int = 10) -> None:
        self._seen: deque[bool] = deque(maxlen=of)
        self._taken_ms: int | None = None

    def feed(self, value: float, taken_ms: int) -> float:
        if self._taken_ms is not None and taken_ms - self._taken_ms > GAP_MS:
            self._seen.clear()
        self._taken_ms = taken_ms
        self._seen.append(value != 0)
        return float(sum(self._seen))

    def clear(self) -> None:
        self._seen.clear()


def make_filter(filtering: Filtering) -> Filter:
    """The filter a row asks for."""
    match filtering.kind:
        case FilterKind.EWMA:
            return Ewma()
        case FilterKind.WINDOW_MIN:
            return WindowMin(filtering.window_ms)
        case FilterKind.COUNTER_RATE:
            return CounterRate(filtering.window_ms)
        case FilterKind.RISE:
            return Rise()
        case FilterKind.N_OF_M:
            return NofM()
