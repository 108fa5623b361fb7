"""Inbox of the mesh machine, and the timer of its driver.

The inbox is bounded because every source is: a link has at most one unread message and one of each of its other
events in it, a dial one answer, the daemon one pair of bodies and one roster (newer ones take the place of older
ones), records heard outside links at most 64 (more are dropped and counted), sightings 50 a second.
"""

import asyncio
from collections import deque
from typing import Final

from router_core.mesh.protocol.events import BodyChanged, Event, RecordHeard, RosterChanged

HEARD_MOST: Final = 64


class Inbox:
    """The queue of events for the mesh machine; of own bodies and rosters only the newest is kept."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._newest: dict[type, BodyChanged | RosterChanged] = {}
        self._heard = 0
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events) + len(self._newest)

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    def replace(self, event: BodyChanged | RosterChanged) -> None:
        """Put the newest of its kind; an older one that still waits is dropped, its urgency kept."""
        kind = type(event)
        before = self._newest.get(kind)
        if isinstance(event, BodyChanged) and isinstance(before, BodyChanged):
            event = BodyChanged(
                volatile=event.volatile,
                static=event.static,
                urgent=event.urgent or before.urgent,
                due_ms=max((ms for ms in (event.due_ms, before.due_ms) if ms is not None), default=None),
            )
        self._newest[kind] = event
        self._wake.set()

    def hear(self, event: RecordHeard) -> bool:
        """Put a record from outside links; False if 64 of them wait already."""
        if self._heard >= HEARD_MOST:
            return False
        self._heard += 1
        self.put(event)
        return True

    def take(self) -> Event | None:
        """The next event: the daemon's newest first (a roster before what it admits), then in order of arrival."""
        if self._newest:
            return self._newest.pop(next(iter(self._newest)))
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, RecordHeard):
            self._heard -= 1
        return event

    async def wait(self, within_s: float | None) -> None:
        """Return when something is here, after the loop had a turn; or after ``within_s`` seconds (None: for ever)."""
        if self:
            await asyncio.sleep(0)
            return
        self._wake.clear()
        timer = None if within_s is None else asyncio.get_running_loop().call_later(within_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()
