"""Clocks. Everything that orders or ages uses ``boot_ms``; wall time is for display alone."""

import time
from typing import Protocol

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """What the shell asks of a clock; tests inject their own."""

    def boot_ms(self) -> int:
        """Suspend-inclusive monotonic milliseconds."""

    def boot_us(self) -> int:
        """The same clock in microseconds."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970, for display only."""


class SystemClock:
    """The host's clocks: ``CLOCK_BOOTTIME`` where it exists, ``CLOCK_MONOTONIC`` elsewhere."""

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(_BOOT) // 1_000_000

    def boot_us(self) -> int:
        return time.clock_gettime_ns(_BOOT) // 1_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


def thread_us() -> int:
    """Microseconds of CPU that the calling thread has used, of any beginning."""
    return time.thread_time_ns() // 1_000
