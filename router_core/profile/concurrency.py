"""How many requests an engine that does not tell works on at a time: one limit, moved by what requests met and how they went.

An engine that batches serves thirty as fast as three, one that does not lets them wait: that shows in the time to the
first token, or in the time per token of whole answers, of requests that met many others compared with those that met
few. Rules: the limit moves at most once per window, and only if it was reached in it; without requests of both kinds it
stays.
"""

from bisect import bisect_right
from collections import deque
from statistics import median

from msgspec import Struct

FIRST = 32
MOST = 256
WINDOW_MS = 10_000
LESS = 0.7
RISE, RISE_MS = 2.0, 300.0
MANY, FEW = 0.5, 0.25
CHANGES_KEPT = 1_024
SAMPLES_KEPT = 256


class _Sample(Struct, frozen=True, gc=False):
    met: int
    took_ms: float
    per: float


class ConcurrencyLimit:
    """The limit of one endpoint. ``changed`` at every change of its requests in hand, ``ended`` for each that ended well,
    ``busy`` when the engine refused one for its load; each returns True if ``value`` moved."""

    def __init__(self, now: int) -> None:
        self.value = FIRST
        self._since_ms = now
        self._reached = self._was_busy = self._rose = False
        self._times: deque[int] = deque(maxlen=CHANGES_KEPT)
        self._counts: deque[int] = deque(maxlen=CHANGES_KEPT)
        self._samples: dict[bool, deque[_Sample]] = {
            streamed: deque(maxlen=SAMPLES_KEPT) for streamed in (True, False)
        }

    def changed(self, in_flight: int, now: int) -> bool:
        """From ``now`` on there are ``in_flight`` requests."""
        self._times.append(now)
        self._counts.append(in_flight)
        moved = self._step(now)
        self._reached = self._reached or in_flight >= self.value
        return moved

    def ended(self, sent_ms: float, now: int, *, took_ms: float, tokens: int | None = None) -> bool:
        """A request sent at ``sent_ms`` ended well: a stream whose first token took so long, or a whole answer of
        ``tokens``."""
        place = bisect_right(self._times, sent_ms)
        if place and took_ms >= 0:
            per = took_ms / tokens if tokens else took_ms
            self._samples[tokens is None].append(_Sample(self._counts[place - 1], took_ms, per))
        return self._step(now)

    def busy(self, now: int) -> bool:
        """The engine refused a request because it has enough of them."""
        self._was_busy = self._reached = True
        return self._step(now)

    def _step(self, now: int) -> bool:
        if now - self._since_ms < WINDOW_MS:
            return False
        before = self.value
        if self._reached:
            rise = True if self._was_busy else self._is_rise()
            if rise:
                self._rose = True
                self.value = max(1, int(LESS * self.value))
            elif rise is False:
                self.value = min(MOST, self.value + 1 if self._rose else 2 * self.value)
        self._since_ms = now
        self._reached = bool(self._counts) and self._counts[-1] >= self.value
        self._was_busy = False
        for samples in self._samples.values():
            samples.clear()
        return self.value != before

    def _is_rise(self) -> bool | None:
        """Whether those that met many took clearly longer; None if nobody can tell."""
        told = None
        for samples in self._samples.values():
            many = [each for each in samples if each.met > MANY * self.value]
            few = [each for each in samples if each.met <= max(1, FEW * self.value)]
            if not many or not few:
                continue
            longer = median(each.per for each in many) > RISE * median(each.per for each in few)
            later = median(each.took_ms for each in many) > RISE_MS + median(each.took_ms for each in few)
            if longer and later:
                return True
            told = False
        return told
