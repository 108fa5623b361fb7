"""The level of one signal: two thresholds per level, a hold on each side, and what becomes of it when the signal
goes missing.

Up: the highest level whose enter condition lasted its hold; jumps are allowed. Down: once the exit condition of
the present level lasted its hold, to the highest lower level whose own exit condition is false, else to NONE.
While a signal is stale, unknown or frozen, no time counts towards a hold; after 30 s unknown the level is None,
and the first known value then sets it at once.
"""

from typing import Final

from msgspec import Struct

from router_core.policy.pressure import UNKNOWN_HELD_MS, Bound, Danger, LevelRule, SignalRow
from router_core.pressure.filters import make_filter
from router_core.pressure.samples import Reading, ReadingStatus
from router_core.record.state import Level

FLAG_SCORES: Final = {Level.NONE: 0.0, Level.ELEVATED: 0.5, Level.HIGH: 1.0, Level.CRITICAL: 1.0}


class Input(Struct, frozen=True, gc=False, kw_only=True):
    """One signal at one step. ``whole`` is what shares in its thresholds refer to, ``scale`` corrects its value,
    ``counts`` is False while its gate is shut, ``frozen`` True while it must not move."""

    reading: Reading[int] | Reading[float]
    whole: float | None = None
    scale: float = 1.0
    counts: bool = True
    frozen: bool = False


class Transition(Struct, frozen=True, gc=False, kw_only=True):
    """One signal changed its level. ``threshold`` is the bound that was passed; where ``reason`` is not empty
    (``first``, ``unknown``, ``unsupported``) no threshold decided. ``gpu`` is the key of the GPU, None for the host."""

    signal: str
    resource: str
    before: Level | None
    after: Level | None
    value: float | None
    threshold: float | None
    unit: str
    held_ms: int
    reason: str = ""
    gpu: str | None = None


class Pressed(Struct, frozen=True, gc=False, kw_only=True):
    """A signal that holds its resource at ``level`` now, with its value and the bound it passed."""

    signal: str
    resource: str
    level: Level
    value: float | None
    threshold: float | None
    unit: str
    gpu: str | None = None


class SignalLevel:
    """The machine of one row, of the host or of one GPU. ``level``, ``score`` and ``value`` are None while the signal is unknown."""

    def __init__(self, row: SignalRow, gpu: str | None = None) -> None:
        self.row = row
        self.gpu = gpu
        self.level: Level | None = None
        self.score: float | None = None
        self.value: float | None = None
        self.taken_ms = 0
        self.counts = True
        self._filter = make_filter(row.filtering)
        self._whole: float | None = None
        self._fed_ms: int | None = None
        self._enter_since: dict[int, int] = {}
        self._exit_since: int | None = None
        self._unknown_since: int | None = None
        self._live_ms: int | None = None
        self._halted = False

    def adopt(self, row: SignalRow) -> None:
        """Go on under new numbers: the level is kept, timers start anew."""
        if row.filtering != self.row.filtering:
            self._filter = make_filter(row.filtering)
            self._fed_ms = None
        self.row = row
        self._restart()

    def resume(self) -> None:
        """Drop what the filter remembers and every running hold, as after a suspend; the level stands."""
        self._filter.clear()
        self._restart()

    @property
    def deadline(self) -> int | None:
        """When the level changes if nothing else does."""
        if self._unknown_since is not None and self.level is not None:
            return self._unknown_since + UNKNOWN_HELD_MS
        if self._halted or self.level is None:
            return None
        due = [
            since + rule.hold_in_ms
            for rule in self.row.rules
            if rule.level > self.level and (since := self._enter_since.get(rule.level)) is not None
        ]
        rule = self._rule(self.level)
        if self._exit_since is not None and rule is not None:
            due.append(self._exit_since + rule.hold_out_ms)
        return min(due, default=None)

    def pressed(self, least: Level) -> Pressed | None:
        """What this signal says if it counts and is at ``least`` or above."""
        level = self.level
        if level is None or level < least or not self.counts:
            return None
        rule = self._rule(level)
        return Pressed(
            signal=self.row.signal,
            resource=self.row.resource,
            level=level,
            value=self.value,
            threshold=None if rule is None else rule.enter.at(self._whole),
            unit=self.row.unit,
            gpu=self.gpu,
        )

    def step(self, entry: Input, now: int) -> Transition | None:
        """Take the signal as it stands at ``now``."""
        self.counts = entry.counts
        status = entry.reading.status
        if status is ReadingStatus.UNSUPPORTED:
            return self._forget("unsupported")
        value = self._filtered(entry)
        if status is ReadingStatus.UNKNOWN or value is None or not self._bounded(entry.whole):
            return self._unknown(now)
        self._unknown_since = None
        self._whole = entry.whole
        self.value, self.taken_ms = value, entry.reading.taken_ms
        before = self.level
        if before is None:
            self._restart()
            change = self._first(value)
        elif entry.frozen or status is ReadingStatus.STALE:
            self._halted = True
            change = None
        else:
            self._thaw(now)
            change = self._moved(before, value, now)
        if not self._halted:
            self._live_ms = now
        self._rate(value)
        return change

    def _filtered(self, entry: Input) -> float | None:
        reading = entry.reading
        if reading.value is None:
            return None
        if self._fed_ms is None or reading.taken_ms > self._fed_ms:
            self._fed_ms = reading.taken_ms
            fed = self._filter.feed(float(reading.value), reading.taken_ms)
            return None if fed is None else fed * self.row.filtering.scale * entry.scale
        return self.value

    def _bounded(self, whole: float | None) -> bool:
        bounds = [bound for rule in self.row.rules for bound in (rule.enter, rule.exit)]
        return whole is not None or not any(bound.relative for bound in (*bounds, *(self.row.score or ())))

    def _unknown(self, now: int) -> Transition | None:
        self._halted = True
        if self._unknown_since is None:
            self._unknown_since = now
        if self.level is None or now - self._unknown_since < UNKNOWN_HELD_MS:
            return None
        return self._forget("unknown")

    def _forget(self, reason: str) -> Transition | None:
        before, self.level = self.level, None
        self.score = self.value = None
        self._filter.clear()
        self._restart()
        return None if before is None else self._transition(before, None, None, 0, reason)

    def _restart(self) -> None:
        self._enter_since.clear()
        self._exit_since = None
        self._halted = False
        self._live_ms = None

    def _thaw(self, now: int) -> None:
        """Take the time without a live value out of every running hold."""
        if self._halted and self._live_ms is not None:
            gap = now - self._live_ms
            self._enter_since = {level: since + gap for level, since in self._enter_since.items()}
            self._exit_since = None if self._exit_since is None else self._exit_since + gap
        self._halted = False

    def _first(self, value: float) -> Transition:
        entered = [rule.level for rule in self.row.rules if self._entered(rule, value)]
        self.level = Level(max(entered, default=Level.NONE))
        return self._transition(None, self.level, None, 0, "first")

    def _moved(self, before: Level, value: float, now: int) -> Transition | None:
        risen = self._risen(before, value, now)
        if risen is not None:
            held = now - self._enter_since[risen.level]
            return self._change(before, Level(risen.level), risen.enter, held)
        if before is Level.NONE:
            return None
        rule = self._rule(before)
        if rule is not None and not self._left(rule, value):
            self._exit_since = None
            return None
        if self._exit_since is None:
            self._exit_since = now
        held = now - self._exit_since
        if rule is not None and held < rule.hold_out_ms:
            return None
        lower = [r.level for r in self.row.rules if r.level < before and not self._left(r, value)]
        return self._change(before, Level(max(lower, default=Level.NONE)), rule.exit if rule else None, held)

    def _risen(self, before: Level, value: float, now: int) -> LevelRule | None:
        """The highest rule above ``before`` whose enter condition lasted its hold."""
        risen = None
        for rule in self.row.rules:
            if not self._entered(rule, value):
                self._enter_since.pop(rule.level, None)
            elif (
                now - self._enter_since.setdefault(rule.level, now) >= rule.hold_in_ms and rule.level > before
            ):
                risen = rule
        return risen

    def _change(self, before: Level, after: Level, bound: Bound | None, held_ms: int) -> Transition:
        self.level = after
        self._exit_since = None
        return self._transition(before, after, bound, held_ms, "")

    def _transition(
        self, before: Level | None, after: Level | None, bound: Bound | None, held_ms: int, reason: str
    ) -> Transition:
        return Transition(
            signal=self.row.signal,
            resource=self.row.resource,
            before=before,
            after=after,
            value=self.value,
            threshold=None if bound is None else bound.at(self._whole),
            unit=self.row.unit,
            held_ms=held_ms,
            reason=reason,
            gpu=self.gpu,
        )

    def _rule(self, level: Level) -> LevelRule | None:
        return next((rule for rule in self.row.rules if rule.level == level), None)

    def _entered(self, rule: LevelRule, value: float) -> bool:
        bound = rule.enter.at(self._whole)
        return bound is not None and (value >= bound if self.row.danger is Danger.ABOVE else value < bound)

    def _left(self, rule: LevelRule, value: float) -> bool:
        bound = rule.exit.at(self._whole)
        return bound is not None and (value <= bound if self.row.danger is Danger.ABOVE else value > bound)

    def _rate(self, value: float) -> None:
        if self.row.score is None:
            self.score = FLAG_SCORES[self.level or Level.NONE]
            return
        lo, hi = (bound.at(self._whole) for bound in self.row.score)
        if lo is not None and hi is not None:
            self.score = scored(value, lo, hi)


def scored(value: float, lo: float, hi: float) -> float:
    """``value`` on the way from ``lo`` (0) to ``hi`` (1), clipped; ``hi`` may be the smaller one."""
    return min(1.0, max(0.0, (value - lo) / (hi - lo)))
