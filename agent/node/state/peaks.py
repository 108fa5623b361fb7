"""The most requests that were in hand lately, to tell own work in an engine's report from that of others.

Rules: a falling count stays visible for as long as it is asked about; as many entries as there are different counts,
never one per request. Refuses to read a clock.
"""

from collections import deque


class Peaks:
    """Counts over time. ``note`` each change, ``most`` since a moment; times (ms) must not fall."""

    def __init__(self) -> None:
        self._falling: deque[tuple[int, int]] = deque([(0, 0)])
        """(count, until when): counts fall strictly, the last one still holds."""

    @property
    def size(self) -> int:
        """Counts remembered."""
        return len(self._falling)

    def note(self, count: int, now: int) -> bool:
        """From ``now`` on there are ``count``; whether that is more than before."""
        falling = self._falling
        before = falling.pop()[0]
        if count < before:
            falling.append((before, now))
        while falling and falling[-1][0] <= count:
            falling.pop()
        falling.append((count, now))
        return count > before

    def most(self, since: int) -> int:
        """The highest count at any time from ``since`` on; earlier ones are forgotten."""
        falling = self._falling
        while len(falling) > 1 and falling[0][1] < since:
            falling.popleft()
        return falling[0][0]
