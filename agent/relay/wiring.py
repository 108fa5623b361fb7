"""What every request of a listener shares, and the ways in which errors are told."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from agent.board import Board
from agent.effects.clock import Clock
from agent.effects.tasks import Tasks
from agent.relay.dispatch import DispatchRate
from agent.relay.front import Answer
from agent.relay.places import Places
from agent.relay.pool import Pool
from agent.relay.ports import Asked, FirstBytes, HeardState, NobodyAsks, Observer, Routed, Targets, Turned
from router_core.exchange.breaker import Breakers
from router_core.exchange.events import SERVED, Outcome, Reply
from router_core.exchange.failure import Cause
from router_core.exchange.silence import Silence
from router_core.placement.holding import Holding
from router_core.placement.request import Endpoint
from router_core.policy.exchange import ExchangePolicy

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
    breakers: Breakers
    dispatch: DispatchRate
    observer: Observer
    heard_state: HeardState
    rng: Random
    in_hand: Hands
    holding: Holding
    silence: Silence = field(default_factory=Silence)
    first_bytes: FirstBytes = field(default_factory=NobodyAsks)
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
    ) -> Answer:
        """A whole error reply of our own."""

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        """What is written before a broken event stream is cut; empty to only cut."""

    def lines(self, asked: Asked, routed: Routed, attempts: int, status: int) -> bytes:
        """Header lines added to an upstream's reply."""


def tell_breakers(breakers: Breakers, outcome: Outcome, now: int) -> None:
    """One attempt ended: a fault, a success, or nothing that speaks for or against its endpoint."""
    if outcome.fault:
        refused = outcome.cause is Cause.CONNECT_REFUSED
        breakers.failed(outcome.endpoint, now, connection_refused=refused)
    elif outcome.result in SERVED:
        breakers.succeeded(outcome.endpoint, now)
    else:
        breakers.released(outcome.endpoint)


def mark_silent(requests: Iterable[InHand], suspects: set[Endpoint], now: int) -> None:
    """Make ``suspects`` the endpoints that fell silent in mid-answer; one byte, or the end, takes each out again."""
    found = {at for request in requests if (at := request.silent_at(now)) is not None}
    suspects.intersection_update(found)
    suspects.update(found)


async def watch_silence(wiring: Wiring, suspects: set[Endpoint]) -> None:
    """Keep ``suspects`` up to date once a second while there are requests, until cancelled."""
    while True:
        await asyncio.sleep(SILENCE_SWEEP_S)
        mark_silent(wiring.in_hand, suspects, wiring.clock.boot_ms())
        await wiring.in_hand.filled()


async def review_on_change(board: Board, wiring: Wiring) -> None:
    """After every publish of the view, have each request look at the peer it depends on, until cancelled."""
    while True:
        await board.changed()
        for request in tuple(wiring.in_hand):
            request.review()
