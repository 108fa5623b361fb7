"""The driver's loop with a machine that only remembers: order, time, the disk, and what the daemon calls."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from agent.mesh.addresses import AddressBook, AddressRules
from agent.mesh.driver import Driver, DriverListeners
from agent.mesh.inbox import HEARD_MOST, Inbox
from router_core.ids import MeshId
from router_core.mesh.protocol.actions import Action, Alarm, Notify, Persist, ViewChanged
from router_core.mesh.protocol.events import (
    BodyChanged,
    LeaveRequested,
    PersistDone,
    RecordHeard,
    Resumed,
    RosterChanged,
    SavedKey,
    Ticked,
)
from router_core.record.envelope import Sealed
from router_core.record.membership import ViewChange
from router_core.record.state import LeaveReason, Static, Volatile
from tests.support.meshnode import MemoryShelf
from tests.support.scripted_machine import ScriptedMachine
from tests.support.until import until


@dataclass
class HandClock:
    """Stands still until a test moves it."""

    ms: int = 1_000

    def boot_ms(self) -> int:
        return self.ms

    def boot_us(self) -> int:
        return self.ms * 1_000

    def wall_ms(self) -> int:
        raise AssertionError("the mesh reads no wall clock")


@dataclass
class Rig:
    """One driver with everything it tells, kept."""

    machine: ScriptedMachine = field(default_factory=ScriptedMachine)
    clock: HandClock = field(default_factory=HandClock)
    shelf: Any = field(default_factory=MemoryShelf)
    views: list[Sequence[ViewChange]] = field(default_factory=list)
    alarms: list[tuple[str, dict[str, str | int]]] = field(default_factory=list)
    failures: list[tuple[str, BaseException]] = field(default_factory=list)

    def forget_deadline(self, _event: object) -> list[Action]:
        self.machine.deadline = None
        return []

    def build(self) -> Driver:
        def no_tls() -> Any:
            raise AssertionError("nothing is dialled here")

        return Driver(
            self.machine,
            clock=self.clock,
            tls=no_tls,
            source=None,
            book=AddressBook(AddressRules(allow=())),
            shelf=self.shelf,
            told=DriverListeners(
                on_view=self.views.append,
                notify=lambda code, fields: self.alarms.append((code, fields)),
                failed=lambda name, exc: self.failures.append((name, exc)),
            ),
        )


@asynccontextmanager
async def running(driver: Driver) -> AsyncIterator[None]:
    task = asyncio.create_task(driver.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_deadline_that_passed_is_told_before_what_waits_in_the_inbox() -> None:
    rig = Rig()
    driver = rig.build()
    rig.machine.deadline = 900
    rig.machine.reply = rig.forget_deadline
    driver.record_heard(b"r", b"s")
    async with running(driver):
        await until(lambda: len(rig.machine.told) == 2)
    assert rig.machine.told == [Ticked(), RecordHeard(b"r", b"s")]


async def test_the_driver_sleeps_until_the_deadline_and_no_longer() -> None:
    rig = Rig()
    driver = rig.build()
    rig.machine.deadline = rig.clock.ms + 30
    rig.machine.reply = rig.forget_deadline
    async with running(driver):
        await asyncio.sleep(0)
        assert rig.machine.told == []
        rig.clock.ms += 30
        await until(lambda: rig.machine.told == [Ticked()])
    assert rig.machine.at == [1_030]


async def test_a_step_and_nothing_else_counts_as_progress() -> None:
    rig = Rig()
    driver = rig.build()
    rig.clock.ms = 2_000
    async with running(driver):
        await asyncio.sleep(0)
        assert driver.stepped_ms == 1_000, "waiting is no step"
        driver.record_heard(b"r", b"s")
        await until(lambda: rig.machine.told)
    assert driver.stepped_ms == 2_000


async def test_left_over_work_is_resumed_after_others_had_their_turn() -> None:
    rig = Rig()
    driver = rig.build()
    turns: list[str] = []

    def reply(event: object) -> list[Any]:
        rig.machine.backlog = len(turns) < 4
        asyncio.get_running_loop().call_soon(turns.append, type(event).__name__)
        return []

    rig.machine.reply = reply
    driver.record_heard(b"r", b"s")
    driver.record_heard(b"t", b"u")
    async with running(driver):
        await until(lambda: len(rig.machine.told) >= 6)
    kinds = [type(event) for event in rig.machine.told[:6]]
    assert kinds == [RecordHeard, Resumed, Resumed, Resumed, Resumed, RecordHeard]


async def test_only_the_newest_bodies_wait_and_urgency_is_kept() -> None:
    rig = Rig()
    driver = rig.build()
    driver.body_changed(Volatile(flags=1), Static(), urgent=True)
    driver.body_changed(Volatile(flags=2), Static(), due_ms=9_000)
    driver.body_changed(Volatile(flags=3), Static(models_total=7))
    async with running(driver):
        await until(lambda: len(rig.machine.told) == 1)
    assert rig.machine.told == [
        BodyChanged(volatile=Volatile(flags=3), static=Static(models_total=7), urgent=True, due_ms=9_000)
    ]


async def test_records_from_outside_are_bounded_and_the_rest_counted() -> None:
    rig = Rig()
    driver = rig.build()
    for _ in range(HEARD_MOST + 3):
        driver.record_heard(b"r", b"s")
    assert driver.counted().refused["heard_full"] == 3
    async with running(driver):
        await until(lambda: len(rig.machine.told) == HEARD_MOST)
        driver.record_heard(b"r", b"s")
        await until(lambda: len(rig.machine.told) == HEARD_MOST + 1)


async def test_writes_are_answered_in_order_and_never_on_the_loop() -> None:
    class Slow(MemoryShelf):
        def save(self, key: SavedKey, data: bytes, members: object) -> None:
            assert threading.current_thread() is not threading.main_thread()
            if data == b"bad":
                raise OSError(28, "no space left")
            super().save(key, data, members)

    rig = Rig(shelf=Slow())
    driver = rig.build()
    rig.machine.queued += [
        Persist(SavedKey.EPOCH, b"1"),
        Persist(SavedKey.FLOORS, b"bad"),
        Persist(SavedKey.ADDRESSES, b"3"),
    ]
    driver.record_heard(b"r", b"s")
    async with running(driver):
        done = await until(
            lambda: [e for e in rig.machine.told if isinstance(e, PersistDone)][2:] and rig.machine.told
        )
    assert done[1:] == [
        PersistDone(SavedKey.EPOCH, True),
        PersistDone(SavedKey.FLOORS, False),
        PersistDone(SavedKey.ADDRESSES, True),
    ]
    assert rig.failures == []


async def test_a_write_asked_for_just_before_the_end_still_happens() -> None:
    rig = Rig()
    driver = rig.build()
    rig.machine.queued.append(Persist(SavedKey.FLOORS, b"last"))
    async with running(driver):
        await driver.leave(LeaveReason.SHUTDOWN)
    assert rig.machine.told == [LeaveRequested(LeaveReason.SHUTDOWN)]
    assert rig.shelf.kept == {SavedKey.FLOORS: b"last"}


async def test_a_bug_in_a_write_is_reported_and_reads_as_a_failed_write() -> None:
    class Broken(MemoryShelf):
        def save(self, key: SavedKey, data: bytes, members: object) -> None:
            raise TypeError("wrong shape")

    rig = Rig(shelf=Broken())
    driver = rig.build()
    rig.machine.queued.append(Persist(SavedKey.EPOCH, b"1"))
    driver.record_heard(b"r", b"s")
    async with running(driver):
        await until(lambda: PersistDone(SavedKey.EPOCH, False) in rig.machine.told)
    assert [name for name, _ in rig.failures] == ["persist epoch"]


async def test_views_and_alarms_reach_the_daemon() -> None:
    rig = Rig()
    driver = rig.build()
    rig.machine.queued += [ViewChanged(()), Notify(Alarm.LONELY, (("links", 0),))]
    driver.record_heard(b"r", b"s")
    async with running(driver):
        await until(lambda: rig.alarms)
    assert rig.alarms == [("lonely", {"links": 0})]
    assert rig.views == [()]


async def test_fresh_state_answers_at_once_and_performs_what_it_caused() -> None:
    rig = Rig()
    driver = rig.build()
    assert driver.fresh_state() is None
    rig.machine.sealed = Sealed(b"signed", bytes(64))
    rig.machine.fresh_actions = [Notify(Alarm.UNSENDABLE)]
    assert driver.fresh_state() == rig.machine.sealed
    assert rig.alarms == [("unsendable", {})]


async def test_a_roster_comes_before_what_its_members_said() -> None:
    rig = Rig()
    driver = rig.build()
    driver.record_heard(b"r", b"s")
    driver.roster_changed({}, MeshId(bytes(16)))
    async with running(driver):
        await until(lambda: len(rig.machine.told) == 2)
    assert isinstance(rig.machine.told[0], RosterChanged)


@pytest.mark.parametrize("put", [lambda inbox: None, lambda inbox: inbox.put(Ticked())])
async def test_an_inbox_wakes_by_event_or_by_time(put: Callable[[Inbox], None]) -> None:
    inbox = Inbox()
    asyncio.get_running_loop().call_soon(put, inbox)
    async with asyncio.timeout(5):
        await inbox.wait(0.02)
