"""Signals, notification over a real unix datagram socket, watchdog, drain."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from agent.lifecycle import STOP_LIMIT_MS, ExitCode, Notifier, Signals, Step, StepEnded, drain, keep_watchdog
from router_core.errors import LocalMisuse
from tests.support.until import until


class Supervisor:
    """The receiving end of a notification socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)
        self.heard: list[str] = []

    def hear(self) -> list[str]:
        """Everything said so far."""
        with suppress(BlockingIOError):
            while True:
                self.heard.append(self.socket.recv(4096).decode())
        return self.heard


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    found = Supervisor(str(tmp_path / "notify"))
    yield found
    found.socket.close()


def notifier(tmp_path: Path, **env: str) -> Notifier:
    return Notifier.from_env({"NOTIFY_SOCKET": str(tmp_path / "notify"), **env}, pid=7)


def test_ready_status_and_stopping_reach_the_supervisor(tmp_path: Path, supervisor: Supervisor) -> None:
    told = notifier(tmp_path)
    assert told.ready("3 members")
    assert told.status("two\nlines  here")
    assert told.watchdog()
    assert told.stopping("draining")
    assert supervisor.hear() == [
        "READY=1\nSTATUS=3 members", "STATUS=two lines here", "WATCHDOG=1", "STOPPING=1\nSTATUS=draining",
    ]  # fmt: skip


def test_an_abstract_socket_is_reached() -> None:
    name = f"pairmesh-test-{os.getpid()}"
    heard = Supervisor(f"\0{name}")
    assert Notifier(f"@{name}").watchdog()
    assert heard.hear() == ["WATCHDOG=1"]
    heard.socket.close()


def test_a_supervisor_that_is_absent_or_full_costs_nothing(tmp_path: Path, supervisor: Supervisor) -> None:
    assert not Notifier(None).ready("x")
    assert not Notifier(str(tmp_path / "nobody")).ready("x")
    told = notifier(tmp_path)
    assert not all(told.status("x" * 1_000) for _ in range(2_000))


@pytest.mark.parametrize(
    ("env", "watchdog_ms"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30_000),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_the_watchdog_is_kept_only_if_it_is_ours(
    tmp_path: Path, env: dict[str, str], watchdog_ms: int | None
) -> None:
    assert notifier(tmp_path, **env).watchdog_ms == watchdog_ms


async def test_pings_stop_while_a_part_is_stale_and_come_back(tmp_path: Path, supervisor: Supervisor) -> None:
    fresh = {"sampler": True, "mesh": True}
    reports: list[tuple[str, ...]] = []
    parts: dict[str, Callable[[], bool]] = {name: partial(fresh.__getitem__, name) for name in fresh}
    told = notifier(tmp_path, WATCHDOG_USEC="60000")
    task = asyncio.create_task(keep_watchdog(told, parts, lambda names: reports.append(tuple(names))))
    try:
        await until(lambda: supervisor.hear().count("WATCHDOG=1") >= 3)
        fresh["mesh"] = False
        await until(lambda: reports)
        pings = supervisor.hear().count("WATCHDOG=1")
        looked = asyncio.Event()

        def probe() -> bool:
            looked.set()
            return True

        parts["probe"] = probe
        await asyncio.wait_for(looked.wait(), 10)
        assert supervisor.hear().count("WATCHDOG=1") == pings
        assert "STATUS=stale: mesh" in supervisor.hear()
        fresh["mesh"] = True
        await until(lambda: supervisor.hear().count("WATCHDOG=1") > pings)
        assert reports == [("mesh",), ()]
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_the_watchdog_is_fed_at_a_third_of_its_time(tmp_path: Path, supervisor: Supervisor) -> None:
    loop = asyncio.get_running_loop()
    looks: list[float] = []

    def look() -> bool:
        looks.append(loop.time())
        return True

    parts = {"x": look}
    told = notifier(tmp_path, WATCHDOG_USEC="300000")
    task = asyncio.create_task(keep_watchdog(told, parts, lambda _: None))
    await until(lambda: len(looks) >= 3)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert all(later - sooner >= 0.099 for sooner, later in pairwise(looks))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_signal_sets_stop(number: signal.Signals) -> None:
    with Signals(reload=lambda: None).caught() as signals:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(signals.stop.wait(), 10)


async def test_a_second_interrupt_no_longer_waits() -> None:
    with Signals(reload=lambda: None).caught() as signals:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(signals.stop.wait(), 10)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_hangup_reloads_and_does_not_stop() -> None:
    reloads: list[int] = []
    with Signals(reload=lambda: reloads.append(1)).caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: reloads)
        assert not signals.stop.is_set()


async def test_hangup_stops_what_has_lost_its_terminal() -> None:
    attached = [True]
    with Signals(reload=lambda: None, attached=lambda: attached[0]).caught() as signals:
        attached[0] = False
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(signals.stop.wait(), 10)


async def test_hangup_shortly_before_the_terminal_goes_stops_as_well() -> None:
    attached, reloads = [True], []
    with Signals(reload=lambda: reloads.append(1), attached=lambda: attached[0]).caught() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: reloads)
        assert not signals.stop.is_set()
        attached[0] = False
        await asyncio.wait_for(signals.stop.wait(), 10)


@pytest.mark.parametrize(("ignored", "terminal"), [(True, True), (False, False)])
async def test_hangup_reloads_what_has_no_terminal_or_was_told_to_outlive_it(
    ignored: bool, terminal: bool
) -> None:
    attached, reloads = [terminal], []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with Signals(reload=lambda: reloads.append(1), attached=lambda: attached[0]).caught() as signals:
            attached[0] = False
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: reloads)
            assert not signals.stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_signals_are_given_back() -> None:
    with Signals(reload=lambda: None).caught():
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


class Way:
    """Steps that note when they ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.ended: list[StepEnded] = []

    def step(
        self, name: str, within_ms: int = 1_000, *, waits: bool = False, error: Exception | None = None
    ) -> Step:
        async def run() -> None:
            self.ran.append(name)
            if waits:
                await asyncio.Event().wait()
            if error is not None:
                raise error

        return Step(name=name, run=run, within_ms=within_ms)


async def test_steps_run_in_order() -> None:
    way = Way()
    assert await drain([way.step("announce"), way.step("streams"), way.step("leave")], way.ended.append)
    assert way.ran == ["announce", "streams", "leave"]
    assert [step.name for step in way.ended] == way.ran


async def test_a_step_that_hangs_or_fails_never_keeps_the_next_from_running() -> None:
    way = Way()
    broken = ValueError("no")
    steps = [way.step("hangs", 20, waits=True), way.step("fails", error=broken), way.step("last")]
    assert not await drain(steps, way.ended.append)
    assert way.ran == ["hangs", "fails", "last"]
    assert [(step.overdue, step.error) for step in way.ended] == [
        (True, None),
        (False, broken),
        (False, None),
    ]


async def test_a_step_that_will_not_be_cancelled_is_left_behind() -> None:
    way = Way()
    free = asyncio.Event()

    async def stubborn() -> None:
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await free.wait()

    assert not await drain(
        [Step(name="stubborn", run=stubborn, within_ms=10), way.step("last")], way.ended.append
    )
    assert way.ran == ["last"]
    assert way.ended[0].overdue
    free.set()


async def test_steps_that_together_exceed_the_stop_limit_are_refused() -> None:
    way = Way()
    with pytest.raises(LocalMisuse, match="15001 ms, limit 15000 ms"):
        await drain([way.step("a", STOP_LIMIT_MS), way.step("b", 1)], way.ended.append)
    assert way.ran == []


def test_exit_codes_are_those_of_sysexits() -> None:
    assert (ExitCode.OK, ExitCode.FAILED, ExitCode.REFUSED) == (0, 1, os.EX_CONFIG)
