"""The circuit breaker of one (router, endpoint) pair. Pure, local, never gossiped.

Evidence counts by what it is about. Connections that fail and silence are the endpoint's own. That it answered with a
server error may be the request's doing: only several unlike requests say something about the endpoint, and only while it
serves nobody. Refusals, cancellations and errors of the caller say nothing. An open breaker's deadline only ever moves
later: a fault that arrives late from an older attempt never brings the next trial nearer.
"""

from collections import deque
from collections.abc import Hashable
from enum import IntEnum

from router_core.ids import NodeId
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import ExchangePolicy


class BreakerState(IntEnum):
    """Whether a breaker lets requests through."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """CLOSED until faults pile up, OPEN for 5 s doubling to 60 s, then HALF_OPEN for one trial request.

    Times are boot milliseconds.
    """

    __slots__ = (
        "_erred",
        "_faults_in_row",
        "_open_for",
        "_open_until",
        "_policy",
        "_recent",
        "_trial",
        "last_fault_ms",
    )

    def __init__(self, policy: ExchangePolicy) -> None:
        self._policy = policy
        self._recent: deque[tuple[int, bool]] = deque(maxlen=256)
        self._erred: dict[Hashable, int] = {}
        self._faults_in_row = 0
        self._open_for = policy.breaker_open_ms
        self._open_until: int | None = None
        self._trial = False
        self.last_fault_ms: int | None = None

    @property
    def deadline(self) -> int | None:
        """When the breaker will be ready for a trial, None while closed."""
        return self._open_until

    def state(self, now: int) -> BreakerState:
        """OPEN also while the one trial of a half-open breaker is under way."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until or self._trial else BreakerState.HALF_OPEN

    @property
    def is_on_trial(self) -> bool:
        """A trial request is under way."""
        return self._trial

    def dispatched(self, now: int) -> None:
        """A request leaves for the endpoint; when not closed, it is the trial."""
        if self._open_until is not None:
            self._trial = True

    def released(self) -> None:
        """A request ended without a verdict (cancelled, refused): another may be the trial."""
        self._trial = False

    def succeeded(self, now: int) -> None:
        """An answer came through; a trial that did closes the breaker."""
        self._faults_in_row = 0
        self._erred.clear()
        self._note(now, fault=False)
        if self._open_until is not None and self._trial:
            self._open_until = None
            self._open_for = self._policy.breaker_open_ms
            self._recent.clear()
        self._trial = False

    def failed(self, now: int, *, connection_refused: bool = False) -> None:
        """A fault of the endpoint. A refused connection opens at once."""
        policy = self._policy
        self._faults_in_row += 1
        self.last_fault_ms = now
        self._note(now, fault=True)
        if self._open_until is not None:
            self._prolong(now)
            return
        if connection_refused or self._faults_in_row >= policy.breaker_in_a_row or self._share_is_bad(now):
            self._open(now)

    def erred(self, now: int, request: Hashable, *, busy: bool) -> None:
        """The endpoint answered ``request`` (who asked, and what, as far as that is told apart) with a server error;
        ``busy`` if others are in progress there. Enough unlike ones in a row open the breaker."""
        policy, erred = self._policy, self._erred
        if self._open_until is not None:
            self.last_fault_ms = now
            self._prolong(now)
            return
        erred.pop(request, None)
        erred[request] = now
        while (
            len(erred) > policy.breaker_in_a_row
            or next(iter(erred.values())) < now - policy.breaker_window_ms
        ):
            del erred[next(iter(erred))]
        self.last_fault_ms = now
        if len(erred) >= policy.breaker_in_a_row and not busy:
            self._open(now)

    def _prolong(self, now: int) -> None:
        """The trial failed."""
        if self._trial:
            self._open_for = min(self._open_for * 2, self._policy.breaker_open_max_ms)
            self._open(now)
        self._trial = False

    def _open(self, now: int) -> None:
        until = now + self._open_for
        self._open_until = until if self._open_until is None else max(self._open_until, until)

    def _note(self, now: int, *, fault: bool) -> None:
        self._recent.append((now, fault))

    def _share_is_bad(self, now: int) -> bool:
        since = now - self._policy.breaker_window_ms
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        faults = sum(fault for _, fault in self._recent)
        count = len(self._recent)
        return count >= self._policy.breaker_least and faults >= self._policy.breaker_share * count


class Breakers:
    """The breakers of one router, by endpoint. Only endpoints with a fault on record are kept, at most ``limit``; as many
    count as are not closed."""

    def __init__(self, policy: ExchangePolicy, *, limit: int = 4_096) -> None:
        self._policy = policy
        self._limit = limit
        self._of: dict[Endpoint, Breaker] = {}
        self._not_closed: set[Endpoint] = set()

    def __len__(self) -> int:
        return len(self._not_closed)

    def state(self, endpoint: Endpoint, now: int) -> BreakerState:
        breaker = self._of.get(endpoint)
        return BreakerState.CLOSED if breaker is None else breaker.state(now)

    def last_fault_ms(self, endpoint: Endpoint) -> int | None:
        breaker = self._of.get(endpoint)
        return None if breaker is None else breaker.last_fault_ms

    def is_on_trial(self, endpoint: Endpoint) -> bool:
        breaker = self._of.get(endpoint)
        return breaker is not None and breaker.is_on_trial

    def dispatched(self, endpoint: Endpoint, now: int) -> None:
        if (breaker := self._of.get(endpoint)) is not None:
            breaker.dispatched(now)

    def released(self, endpoint: Endpoint) -> None:
        if (breaker := self._of.get(endpoint)) is not None:
            breaker.released()

    def succeeded(self, endpoint: Endpoint, now: int) -> None:
        if (breaker := self._of.get(endpoint)) is not None:
            breaker.succeeded(now)
            if breaker.deadline is None:
                self._not_closed.discard(endpoint)

    def reborn(self, node: NodeId) -> None:
        """A new process answers for ``node``: what is held against its endpoints was about one that is gone."""
        for endpoint in [known for known in self._of if known.partition("/")[0] == node]:
            self._forget(endpoint)

    def failed(self, endpoint: Endpoint, now: int, *, connection_refused: bool = False) -> None:
        """A fault of the endpoint's own."""
        self._fold(endpoint).failed(now, connection_refused=connection_refused)
        self._count(endpoint)

    def erred(self, endpoint: Endpoint, now: int, request: Hashable, *, busy: bool) -> None:
        """A server error that may be the request's doing."""
        self._fold(endpoint).erred(now, request, busy=busy)
        self._count(endpoint)

    def _fold(self, endpoint: Endpoint) -> Breaker:
        breaker = self._of.get(endpoint)
        if breaker is None:
            if len(self._of) >= self._limit:
                self._forget(min(self._of, key=lambda name: self._of[name].last_fault_ms or 0))
            breaker = self._of[endpoint] = Breaker(self._policy)
        return breaker

    def _count(self, endpoint: Endpoint) -> None:
        if self._of[endpoint].deadline is not None:
            self._not_closed.add(endpoint)

    def _forget(self, endpoint: Endpoint) -> None:
        del self._of[endpoint]
        self._not_closed.discard(endpoint)
