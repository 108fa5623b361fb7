"""A token bucket in integers: tokens per second and a burst, in thousandths."""


class Bucket:
    """Starts full. ``rate_m`` is thousandths of a token per second, ``burst`` whole tokens."""

    __slots__ = ("_at", "_level", "_most", "_rate_m")

    def __init__(self, rate_m: int, burst: int, now: int) -> None:
        self._rate_m = rate_m
        self._most = burst * 1_000_000
        self._level = self._most
        self._at = now

    def take(self, now: int, tokens: int = 1) -> bool:
        """Take ``tokens`` if they are there."""
        self._refill(now)
        if self._level < tokens * 1_000_000:
            return False
        self._level -= tokens * 1_000_000
        return True

    def spend(self, now: int, tokens: int) -> None:
        """Take ``tokens``, into debt if need be."""
        self._refill(now)
        self._level -= tokens * 1_000_000

    def ready_at(self, now: int) -> int:
        """When one token is there, ``now`` if it is."""
        self._refill(now)
        missing = 1_000_000 - self._level
        return now if missing <= 0 else now + -(-missing // self._rate_m)

    def _refill(self, now: int) -> None:
        if now > self._at:
            self._level = min(self._most, self._level + (now - self._at) * self._rate_m)
            self._at = now
