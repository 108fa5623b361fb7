"""What every request of a listener shares, and the ways in which errors are told."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from agent.board import Board
from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.engines.monitor import OwnRequests
from agent.relay.forwarding.body_reader import Bodies
from agent.relay.http.frontend import Answer
from agent.relay.ports import Asked, FirstBytes, HeardState, NobodyAsks, Observer, Routed, Targets, Turned
from agent.relay.upstream.attempt import Attempt
from agent.relay.upstream.pool import Pool
from agent.relay.upstream.targets import Places
from router_core.exchange.events import Reply
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy
from router_core.router.failure import Cause
from router_core.router.router import Router

SILENCE_SWEEP_S = 1.0


class InHand(Protocol):
    """A request that has not ended. ``due`` is when it wants to hear that time passed, boot ms."""

    due: int | None

    def time_passed(self) -> None:
        """``due`` has come."""

    def review(self) -> None:
        """Liveness may have changed: look at the peer this request depends on."""

    def cut_off(self, at: Endpoint) -> None:
        """The endpoint is given up: if this request is there, let it go elsewhere, or tell its client the truth."""

    def sent_to(self, at: Endpoint) -> Iterable[Attempt]:
        """Its attempts at this endpoint whose requests were sent."""

    def silent_at(self, now: int) -> Endpoint | None:
        """The endpoint that keeps a client waiting in mid-answer for too long, if it does."""

    @property
    def is_held(self) -> bool:
        """True while it waits for room."""

    def shut_down(self) -> None:
        """The node stops now: tell the client the truth."""


class Hands(set[InHand]):
    """All requests that have not ended, and the one timer that wakes them at their deadlines."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._emptied = asyncio.Event()
        self._filled = asyncio.Event()
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0

    def add(self, request: InHand, /) -> None:
        set.add(self, request)
        self._filled.set()

    def discard(self, request: object, /) -> None:
        set.discard(self, request)
        if not self:
            self._emptied.set()
            self._filled.clear()

    async def filled(self) -> None:
        """Wait until there is a request."""
        await self._filled.wait()

    async def emptied(self) -> None:
        """Wait until every request has ended."""
        while self:
            self._emptied.clear()
            await self._emptied.wait()

    def wake_at(self, due: int, now: int) -> None:
        """A request wants to be woken at ``due``, if it has not ended by then and does not want it later."""
        if self._timer is not None:
            if self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_later(max(0, due - now) / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = self._clock.boot_ms()
        try:
            for request in [each for each in self if each.due is not None and each.due <= now]:
                request.time_passed()
        finally:
            due = min([each.due for each in self if each.due is not None], default=None)
            if due is not None:
                self.wake_at(due, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What every courier of one listener shares."""

    clock: Clock
    policy: ExchangePolicy
    pool: Pool
    tasks: Tasks
    targets: Targets
    router: Router
    observer: Observer
    heard_state: HeardState
    rng: Random
    in_hand: Hands
    first_bytes: FirstBytes = field(default_factory=NobodyAsks)
    bodies: Bodies = field(default_factory=Bodies)
    places: Places = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", Places(self.targets))


class Voice(Protocol):
    """How errors and the mesh's own headers are told on one listener."""

    side: str

    def refusal(
        self,
        told: Reply,
        asked: Asked,
        turned: Turned | None,
        routed: Routed | None,
        attempts: int,
        held_ms: int | None,
        cause: Cause | None = None,
    ) -> Answer:
        """A whole error reply of our own."""

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        """What is written before a broken event stream is cut; empty to only cut."""

    def lines(self, asked: Asked, routed: Routed, attempts: int, status: int) -> bytes:
        """Header lines added to an upstream's reply."""


def sweep_lateness(requests: Iterable[InHand], router: Router, now: int) -> None:
    """Bring up to date which endpoints are late; in mid-answer one byte, or the end, is enough to be no more."""
    stalled = frozenset([at for request in requests if (at := request.silent_at(now)) is not None])
    router.sweep(now, stalled)


def own_requests(requests: Iterable[InHand], at: Endpoint) -> OwnRequests:
    """How requests at an endpoint get on."""
    last_byte_ms = newest_ms = None
    all_overdue = True
    for request in tuple(requests):
        for attempt in request.sent_to(at):
            if (byte_ms := attempt.last_byte_ms) is not None:
                last_byte_ms = byte_ms if last_byte_ms is None else max(byte_ms, last_byte_ms)
            elif (sent_ms := attempt.sent_ms) is not None:
                newest_ms = sent_ms if newest_ms is None else max(sent_ms, newest_ms)
                all_overdue = all_overdue and attempt.overdue
    return OwnRequests(
        last_byte_ms=last_byte_ms, newest_ms=newest_ms, all_overdue=all_overdue and newest_ms is not None
    )


async def watch_lateness(wiring: Wiring) -> None:
    """Sweep once a second while there are requests, or endpoints that are late, until cancelled."""
    while True:
        await asyncio.sleep(SILENCE_SWEEP_S)
        sweep_lateness(wiring.in_hand, wiring.router, wiring.clock.boot_ms())
        if wiring.router.lateness.is_calm:
            await wiring.in_hand.filled()


async def review_on_change(board: Board, wiring: Wiring) -> None:
    """After every publish of the view, have each request look at the peer it depends on, until cancelled."""
    while True:
        await board.changed()
        for request in tuple(wiring.in_hand):
            request.review()
