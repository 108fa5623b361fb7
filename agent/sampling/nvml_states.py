"""The life of the process that talks to the driver: when it is started, asked, given up on, stopped, tried again.

Rules: never two at a time; one question outstanding; TERM always comes before KILL, since a killed client can leave
a GPU hung; nothing latches, a failed start is tried again for ever. A pure machine: it starts no process, reads no
clock and knows no GPU.
"""

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Final

from msgspec import Struct

from agent.sampling.nvml_wire import BINDING_MISSING


class ProbeState(Enum):
    """The state of the NVML child process, as its parent knows it."""

    OFF = "off"
    STARTING = "starting"
    READY = "ready"
    HUNG = "hung"
    STOPPING = "stopping"
    UNDEAD = "undead"
    BACKOFF = "backoff"
    ENDED = "ended"


class Absence(Enum):
    """Why the process is not there: each has its own wait before the next start."""

    CRASH = "crash"
    HANG = "hang"
    INIT = "init"
    BINDING = "binding"
    RECYCLE = "recycle"
    DENIED = "denied"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTimes:
    """Deadlines and waits in milliseconds. Tests shorten them."""

    hello_ms: int = 20_000
    fast_ms: int = 2_000
    list_ms: int = 5_000
    hung_ms: int = 10_000
    quit_ms: int = 700
    grace_ms: int = 2_000
    grace_hung_ms: int = 5_000
    kill_ms: int = 5_000
    end_grace_ms: int = 1_500
    end_ms: int = 1_800
    crash_ms: tuple[int, int] = (1_000, 60_000)
    hang_ms: tuple[int, int] = (5_000, 300_000)
    init_ms: tuple[int, int] = (5_000, 3_600_000)
    binding_ms: tuple[int, int] = (300_000, 300_000)
    well_ms: int = 600_000

    def wait(self, cause: Absence, failures: int) -> int:
        """The wait before start number ``failures`` + 1: it doubles from the first to the second figure."""
        least, most = {
            Absence.CRASH: self.crash_ms,
            Absence.HANG: self.hang_ms,
            Absence.INIT: self.init_ms,
            Absence.DENIED: self.init_ms,
            Absence.BINDING: self.binding_ms,
            Absence.RECYCLE: (0, 0),
        }[cause]
        return min(most, least << min(20, failures - 1))


class HardwareSeen(Struct, frozen=True):
    """Whether there is a driver, card or library to ask; ``changed``: driver, cards or device files are not what they
    were, so that a start which failed may succeed now."""

    present: bool
    changed: bool = False


class HelloAnswered(Struct, frozen=True):
    """The process is up, or could not come up for the reason ``code``."""

    code: int = 0


class QuestionSent(Struct, frozen=True):
    """A question was sent; the answer is wanted within ``within_ms``."""

    within_ms: int


class ReplyReceived(Struct, frozen=True):
    """The outstanding question was answered."""


class Unwanted(Struct, frozen=True):
    """The process must go: it broke the protocol, its library is beyond use, or access was revoked."""

    cause: Absence


class Exited(Struct, frozen=True):
    """The process has ended and was reaped; ``more``: there is another library that was not tried since the last
    wait."""

    more: bool = False


class EndRequested(Struct, frozen=True):
    """The daemon ends."""


class WaitPassed(Struct, frozen=True):
    """``deadline`` was reached."""


Event = (
    HardwareSeen
    | HelloAnswered
    | QuestionSent
    | ReplyReceived
    | Unwanted
    | Exited
    | EndRequested
    | WaitPassed
)


class Start(Struct, frozen=True):
    """Start the process and say hello."""


class Quit(Struct, frozen=True):
    """Ask the process to end."""


class Terminate(Struct, frozen=True):
    """Send SIGTERM."""


class Kill(Struct, frozen=True):
    """Send SIGKILL."""


class StateChanged(Struct, frozen=True):
    """Tell people: the state is ``state`` now, by ``cause`` if something failed. ``code`` is the driver's."""

    state: ProbeState
    cause: Absence | None = None
    code: int = 0


Action = Start | Quit | Terminate | Kill | StateChanged

NO_PERMISSION: Final = 4
MISMATCH: Final = 18
_TELLING: Final = (MISMATCH, NO_PERMISSION, 999)
_DULL: Final = (9, 12)
_JITTER: Final = 0.2


def more_telling(one: int, other: int) -> int:
    """Which of two reasons why the driver's library refused says more; 0 is none. That there is no driver or no library
    says least: any stub does."""

    def dullness(code: int) -> int:
        if code in _TELLING:
            return _TELLING.index(code)
        return len(_TELLING) + (1 + _DULL.index(code) if code in _DULL else 0) if code else 99

    return min(one, other, key=dullness)


def _cause_of(code: int) -> Absence:
    return {BINDING_MISSING: Absence.BINDING, NO_PERMISSION: Absence.DENIED}.get(code, Absence.INIT)


class Supervisor:
    """``state``; ``alive``: whether a process may exist; ``served``: whether it was ever ready; ``code``: why the last
    start failed, 0 if it did not, the most telling one of all libraries tried; ``cause`` of the present absence."""

    def __init__(self, rng: Random, times: ProbeTimes | None = None) -> None:
        self._rng = rng
        self._times = times or ProbeTimes()
        self.state = ProbeState.OFF
        self.deadline: int | None = None
        self.alive = False
        self.served = False
        self.code = 0
        self.cause: Absence | None = None
        self._failures = 0
        self._ready_ms = 0
        self._greeted = False
        self._refused = 0
        self._asked_ms = 0
        self._steps: list[tuple[Action, int]] = []
        self._then = ProbeState.BACKOFF

    def handle(self, event: Event, now: int) -> list[Action]:
        match event:
            case HardwareSeen():
                return self._hardware(event, now)
            case HelloAnswered():
                return self._hello(event.code, now)
            case QuestionSent():
                self._asked_ms, self.deadline = now, now + event.within_ms
                return []
            case ReplyReceived():
                return self._answered()
            case Unwanted():
                return self._stop(event.cause, now) if self._serving() else []
            case Exited():
                return self._exited(event.more, now)
            case EndRequested():
                return self._end(now)
            case WaitPassed():
                due = self.deadline is not None and now >= self.deadline
                return self._late(now) if due else []

    def _serving(self) -> bool:
        return self.state in (ProbeState.STARTING, ProbeState.READY, ProbeState.HUNG)

    def _hardware(self, event: HardwareSeen, now: int) -> list[Action]:
        if self.state is ProbeState.OFF:
            return self._start(now) if event.present else []
        if self.state is ProbeState.BACKOFF and not event.present:
            self._failures = 0
            return self._to(ProbeState.OFF)
        if self.state is ProbeState.BACKOFF and event.changed:
            self._failures = 0
            return self._start(now)
        return []

    def _start(self, now: int) -> list[Action]:
        self.alive, self._greeted = True, False
        changed = self._to(ProbeState.STARTING)
        self.deadline = now + self._times.hello_ms
        return [*changed, Start()]

    def _hello(self, code: int, now: int) -> list[Action]:
        if self.state is not ProbeState.STARTING:
            return []
        if code:
            self._refused = more_telling(self._refused, code)
            return self._stop(_cause_of(code), now)
        self.served, self.cause, self._ready_ms = True, None, now
        self.code, self._refused, self._greeted = 0, 0, True
        return self._to(ProbeState.READY)

    def _answered(self) -> list[Action]:
        if self.state is ProbeState.HUNG:
            return self._to(ProbeState.READY)
        if self.state is ProbeState.READY:
            self.deadline = None
        return []

    def _late(self, now: int) -> list[Action]:
        if self.state is ProbeState.READY:
            changed = self._to(ProbeState.HUNG)
            self.deadline = max(now, self._asked_ms + self._times.hung_ms)
            return changed
        if self.state in (ProbeState.STARTING, ProbeState.HUNG):
            return self._stop(Absence.HANG, now)
        if self.state is ProbeState.BACKOFF:
            return self._start(now)
        return self._next_step(now)

    def _stop(self, cause: Absence, now: int) -> list[Action]:
        """A process that answers is asked first, one that does not is terminated; then patience, then SIGKILL."""
        times = self._times
        self._forgive(now)
        self.cause = cause
        asked: list[tuple[Action, int]] = [(Quit(), times.quit_ms), (Terminate(), times.grace_ms)]
        if cause is Absence.HANG:
            asked = [(Terminate(), times.grace_hung_ms)]
        self._steps = [*asked, (Kill(), times.kill_ms)]
        self._then = ProbeState.BACKOFF
        changed = self._to(ProbeState.STOPPING)
        return [*changed, *self._next_step(now)]

    def _forgive(self, now: int) -> None:
        """After a good while earlier failures no longer lengthen the wait."""
        served = self.state in (ProbeState.READY, ProbeState.HUNG)
        if served and now - self._ready_ms >= self._times.well_ms:
            self._failures = 0

    def _end(self, now: int) -> list[Action]:
        times = self._times
        if not self.alive:
            return self._to(ProbeState.ENDED)
        self._then = ProbeState.ENDED
        self._steps = [(Terminate(), times.end_grace_ms), (Kill(), times.end_ms - times.end_grace_ms)]
        changed = self._to(ProbeState.STOPPING)
        return [*changed, *self._next_step(now)]

    def _next_step(self, now: int) -> list[Action]:
        if self._steps:
            action, patience_ms = self._steps.pop(0)
            self.deadline = now + patience_ms
            return [action]
        if self.state is ProbeState.STOPPING:
            return self._to(ProbeState.UNDEAD if self._then is ProbeState.BACKOFF else ProbeState.ENDED)
        self.deadline = None
        return []

    def _exited(self, more: bool, now: int) -> list[Action]:
        self.alive = False
        if self.state is ProbeState.ENDED:
            return []
        if self._then is ProbeState.ENDED:
            return self._to(ProbeState.ENDED)
        if self._serving():
            self._forgive(now)
            self.cause = Absence.CRASH
        if more and not self._greeted and self.cause is not Absence.BINDING:
            return self._start(now)
        if self._refused:
            self.code, self._refused = self._refused, 0
            self.cause = _cause_of(self.code)
        cause = self.cause or Absence.CRASH
        if cause is not Absence.RECYCLE:
            self._failures += 1
        changed = self._to(ProbeState.BACKOFF)
        wait = self._times.wait(cause, max(1, self._failures))
        self.deadline = now + round(wait * (1 + _JITTER * (2 * self._rng.random() - 1)))
        return changed

    def _to(self, state: ProbeState) -> list[Action]:
        self.deadline = None
        if state is self.state:
            return []
        self.state = state
        failed = self.cause if state not in (ProbeState.READY, ProbeState.OFF) else None
        return [StateChanged(state=state, cause=failed, code=self.code)]
