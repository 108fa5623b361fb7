"""How old a record is, told by two clocks that were never compared.

For one origin and epoch, ``base`` is the least ``receive time - origin's time`` of the last 10 minutes, kept in
two rotating 5-minute buckets so that drift is followed. ``age = now - mono_ms - base`` can only err by the least
path delay and the drift in between; a relay can make a record look older, never younger.
"""


class Base:
    """The offset between one origin's boot clock and ours, in milliseconds."""

    __slots__ = ("_bucket_ms", "_current", "_previous", "_turn_at")

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        self._current: int | None = None
        self._previous: int | None = None
        self._turn_at = 0

    @property
    def value(self) -> int | None:
        """None before the first sample."""
        if self._current is None or self._previous is None:
            return self._previous if self._current is None else self._current
        return min(self._current, self._previous)

    def sample(self, received_ms: int, origin_ms: int) -> None:
        """The origin's clock showed ``origin_ms`` at the latest when ours showed ``received_ms``."""
        if received_ms >= self._turn_at:
            if self._current is not None:
                self._previous, self._current = self._current, None
            self._turn_at = received_ms + self._bucket_ms
        offset = received_ms - origin_ms
        if self._current is None or offset < self._current:
            self._current = offset

    def age(self, now: int, origin_ms: int) -> int:
        """Milliseconds since the origin's clock showed ``origin_ms``. A negative result lowers the base to 0."""
        base = self.value
        if base is None:
            return 0
        age = now - origin_ms - base
        if age < 0:
            self.sample(now, origin_ms)
            return 0
        return age
