"""The one thread that reads the host, and what is asked of it.

A slow or stuck kernel file never holds up the event loop: questions go into a queue, answers come back into the
loop, and while the thread is stuck nobody waits for it.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from agent.sampling.driver import DriverSeen
from router_core.pressure.samples import HostSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One question: read the host, the cgroups of these units, and if wanted the platform profile and what there is
    of a GPU driver, whose library was loaded from ``library``."""

    units: tuple[str, ...] = ()
    want_profile: bool = False
    want_driver: bool = False
    library: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """The answer to one question to the host sampler."""

    sample: HostSample
    profile: str | None = None
    driver: DriverSeen | None = None


Answered = Callable[[HostAnswer], None]
Failed = Callable[[Exception], None]


class HostThread:
    """The thread ``pairmesh-host`` for the life of the process: one question outstanding, answers in the loop.

    A read that raises is told through ``failed`` and the thread goes on. ``stop`` does not wait: a thread stuck
    in a kernel call ends with the process.
    """

    def __init__(self, read: Callable[[Tick], HostAnswer], *, answered: Answered, failed: Failed) -> None:
        self._read = read
        self._answered = answered
        self._failed = failed
        self._asked: queue.SimpleQueue[Tick | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outstanding = False

    @property
    def outstanding(self) -> bool:
        """Whether a question waits for its answer."""
        return self._outstanding

    def start(self) -> None:
        """Start the thread; answers come to the running loop."""
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve, args=(self._loop,), name="pairmesh-host", daemon=True).start()

    def ask(self, tick: Tick) -> bool:
        """Hand over a question unless one is outstanding; True if it was taken."""
        if self._outstanding:
            return False
        self._outstanding = True
        self._asked.put(tick)
        return True

    def stop(self) -> None:
        self._asked.put(None)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while (tick := self._asked.get()) is not None:
            try:
                outcome: HostAnswer | Exception = self._read(tick)
            except Exception as error:
                outcome = error
            try:
                loop.call_soon_threadsafe(self._deliver, outcome)
            except RuntimeError:
                return

    def _deliver(self, outcome: HostAnswer | Exception) -> None:
        self._outstanding = False
        if isinstance(outcome, HostAnswer):
            self._answered(outcome)
        else:
            self._failed(outcome)
