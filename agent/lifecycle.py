"""A daemon's life as its supervisor sees it: signals, readiness, watchdog, an orderly end, exit codes.

It speaks the notification protocol of systemd (``sd_notify(3)``): datagrams of ``NAME=VALUE`` lines to the unix
socket that ``NOTIFY_SOCKET`` names; without one every message is dropped. It knows no room of the daemon: what is
healthy and what has to be ended is handed in.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from router_core.errors import LocalMisuse

STOP_LIMIT_MS: Final = 15_000
"""What a supervisor grants between SIGTERM and SIGKILL."""
CANCEL_MS: Final = 100
"""How long an overdue step may take to notice that it was cancelled."""
HANGUP_S: Final = 1.0
"""How long a shell may take to end after it sent its jobs SIGHUP."""


class ExitCode(IntEnum):
    """Exit codes of the daemon. ``REFUSED`` is ``EX_CONFIG`` of ``sysexits.h``: starting again will not help."""

    OK = 0
    FAILED = 1
    REFUSED = 78


class Notifier:
    """Tells the supervisor how the daemon is. A supervisor that cannot be reached is no fault of the daemon's:
    sending never raises and never blocks."""

    def __init__(self, address: str | None, watchdog_ms: int | None = None) -> None:
        self._address = address
        self.watchdog_ms = watchdog_ms

    @classmethod
    def from_env(cls, env: Mapping[str, str], pid: int) -> "Notifier":
        """As the environment asks; a watchdog meant for another process is not ours."""
        usec, owner = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID", "")
        ours = owner in ("", str(pid))
        watchdog_ms = int(usec) // 1_000 if usec.isascii() and usec.isdigit() and ours else 0
        return cls(env.get("NOTIFY_SOCKET") or None, watchdog_ms or None)

    def ready(self, status: str) -> bool:
        return self._send(f"READY=1\nSTATUS={_line(status)}")

    def stopping(self, status: str) -> bool:
        return self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def status(self, status: str) -> bool:
        return self._send(f"STATUS={_line(status)}")

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def _send(self, message: str) -> bool:
        """True if the datagram was handed over."""
        if self._address is None:
            return False
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), address)
        except OSError:
            return False
        return True


def _line(text: str) -> str:
    return " ".join(text.split())


async def keep_watchdog(
    notifier: Notifier, healthy: Mapping[str, Callable[[], bool]], stale: Callable[[Sequence[str]], None]
) -> None:
    """Ping at a third of the watchdog's time for as long as every part is healthy; ``stale`` gets the names of the
    parts that are not, whenever they change. Without a watchdog the parts are still looked at, every 10 s."""
    period_s = (notifier.watchdog_ms or 30_000) / 3_000
    reported: list[str] = []
    while True:
        sick = [name for name, check in healthy.items() if not check()]
        if not sick:
            notifier.watchdog()
        if sick != reported:
            reported = sick
            notifier.status(f"stale: {', '.join(sick)}" if sick else "serving")
            stale(tuple(sick))
        await asyncio.sleep(period_s)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal. A service has none; a closed one is gone before its SIGHUP comes."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Signals:
    """Signals as events of the running loop. ``stop`` is set by SIGTERM and SIGINT, ``reload`` called by SIGHUP.

    SIGHUP sets ``stop`` instead where it means what its name says: the process began with a terminal (``attached``) and
    has lost it. A shell may send it shortly before its terminal closes, so that is looked at again ``HANGUP_S`` later.
    Under ``nohup`` it never does. A second SIGINT ends the process the hard way, for people who will not wait for the
    drain.
    """

    def __init__(self, reload: Callable[[], None], attached: Callable[[], bool] = has_terminal) -> None:
        self.stop = asyncio.Event()
        self._reload = reload
        self._attached = attached
        self._may_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and attached()

    @contextmanager
    def caught(self) -> Iterator["Signals"]:
        """Handle the signals within the block; outside it they do what they did before."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt, loop)
        loop.add_signal_handler(signal.SIGHUP, self._hangup, loop)
        try:
            yield self
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _hangup(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_cut_off():
            self.stop.set()
            return
        self._reload()
        if self._may_hang_up:
            loop.call_later(HANGUP_S, lambda: self.stop.set() if self._is_cut_off() else None)

    def _is_cut_off(self) -> bool:
        return self._may_hang_up and not self._attached()

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        self.stop.set()
        loop.remove_signal_handler(signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the way down, with the longest it may take."""

    name: str
    run: Callable[[], Awaitable[None]]
    within_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """How a step went: ``error`` is what it raised, ``overdue`` True if it was cut off."""

    name: str
    took_ms: int
    overdue: bool = False
    error: BaseException | None = None


async def drain(
    steps: Sequence[Step], ended: Callable[[StepEnded], None], *, limit_ms: int = STOP_LIMIT_MS
) -> bool:
    """Run ``steps`` in order, each cut off at its own time; True if all went well.

    A step that fails or hangs is told through ``ended`` and never keeps the next one from running. Steps that
    together may take longer than ``limit_ms`` are refused: the last ones would never run.
    """
    total_ms = sum(step.within_ms for step in steps)
    if total_ms > limit_ms:
        raise LocalMisuse(f"drain steps may take {total_ms} ms, limit {limit_ms} ms")
    outcomes = []
    for step in steps:
        outcomes.append(await _run(step))
        ended(outcomes[-1])
    return all(outcome.error is None and not outcome.overdue for outcome in outcomes)


async def _run(step: Step) -> StepEnded:
    loop = asyncio.get_running_loop()
    began = loop.time()
    task = asyncio.ensure_future(step.run())
    _, pending = await asyncio.wait({task}, timeout=step.within_ms / 1_000)
    if pending:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_MS / 1_000)
    took_ms = round((loop.time() - began) * 1_000)
    cut_off = bool(pending) or task.cancelled()
    error = task.exception() if task.done() and not task.cancelled() else None
    return StepEnded(name=step.name, took_ms=took_ms, overdue=cut_off, error=error)
