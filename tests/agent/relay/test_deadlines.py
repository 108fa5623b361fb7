"""One timer for the deadlines of all requests in hand."""

import asyncio
from collections.abc import Iterable
from typing import Never

from agent.effects.clock import SystemClock
from agent.relay.forwarding.context import Hands
from router_core.placement.request.request import Endpoint
from tests.support.until import until


class Waiting:
    """A request that notes in ``woken`` when time passed for it, and then wants ``more`` ms."""

    def __init__(self, name: str, due: int, woken: list[str], more: int | None = None) -> None:
        self.name = name
        self.due: int | None = due
        self._woken = woken
        self._more = more

    def time_passed(self) -> None:
        assert self.due is not None
        assert SystemClock().boot_ms() >= self.due
        self._woken.append(self.name)
        self.due, self._more = None if self._more is None else self.due + self._more, None
        if self.name == "broken":
            raise RuntimeError("on purpose")

    @property
    def is_held(self) -> bool:
        return False

    def review(self) -> None: ...

    def cut_off(self, at: Endpoint) -> None: ...

    def sent_to(self, at: Endpoint) -> Iterable[Never]:
        return ()

    def silent_at(self, now: int) -> Endpoint | None: ...

    def shut_down(self) -> None: ...


async def test_each_request_is_woken_at_its_own_deadline_and_none_that_has_ended() -> None:
    clock, woken = SystemClock(), list[str]()
    hands, now = Hands(clock), clock.boot_ms()
    late, soon = Waiting("late", now + 60, woken), Waiting("soon", now + 20, woken, more=20)
    ended = Waiting("ended", now + 10, woken)
    for request in (late, soon, ended):
        hands.add(request)
        assert request.due is not None
        hands.wake_at(request.due, now)
    hands.discard(ended)
    await until(lambda: "late" in woken)
    assert woken == ["soon", "soon", "late"]


async def test_a_request_that_fails_when_woken_keeps_no_other_asleep() -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    clock, woken = SystemClock(), list[str]()
    hands, now = Hands(clock), clock.boot_ms()
    for name, due in (("broken", now), ("other", now), ("later", now + 20)):
        hands.add(Waiting(name, due, woken))
        hands.wake_at(due, now)
    await until(lambda: len(woken) == 3)
    assert sorted(woken[:2]) == ["broken", "other"]
