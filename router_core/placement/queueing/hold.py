"""Requests that wait in the router until some endpoint has room, and who of them may try next.

Order: class, one class up per ``promote_ms`` waited; then deficit round robin over callers on estimated seconds; then
earliest deadline, where one that rose counts as of the class it rose to; then who came first. News (a completion, a
newer record) lets the head decide again; if it got a place the next one may, too, and if not, nobody of its kind is
asked again before there is other news.

Rules: never more requests or bytes than the bounds; one release is out at a time; who left is never released. It
knows neither places nor clocks: how long a request may wait is kept where its life is kept.
"""

from collections.abc import Hashable, Set
from math import ceil
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from router_core import limits
from router_core.errors import LocalMisuse
from router_core.placement.filters.eligibility import targets_of
from router_core.placement.queueing.terms import HoldTerms
from router_core.placement.request.request import PlacementRequest, RequestClass
from router_core.policy.placement import PlacementPolicy

_RANKS: Final = {
    RequestClass.INTERACTIVE: 0,
    RequestClass.BATCH: 1,
    RequestClass.BACKGROUND: 2,
}
_CLASSES: Final = tuple(_RANKS)
_CENT_S: Final = 0.01


class Waiting(Struct, frozen=True, gc=False, kw_only=True):
    """One held request. ``kind``: requests of one kind wait for the same rows. ``seconds`` is its service time,
    ``since_ms`` when it was first held, ``deadline_ms`` when it is worth nothing any more; both on the boot clock."""

    ticket: int
    request_class: RequestClass
    caller: str
    kind: Hashable
    seconds: float
    body_bytes: int
    since_ms: int
    deadline_ms: int


# --- events --------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, gc=False, kw_only=True):
    """What happens to the queue: the base of all events."""


class Joined(Event, frozen=True, gc=False, kw_only=True):
    """A request is to be held. Raises LocalMisuse where ``has_room`` said no."""

    waiting: Waiting


class Left(Event, frozen=True, gc=False, kw_only=True):
    """A request waits no longer: it got a place, or its time or its client is gone. Saying so twice is harmless."""

    ticket: int


class Stayed(Event, frozen=True, gc=False, kw_only=True):
    """The released request found no place."""

    ticket: int


class NewsCame(Event, frozen=True, gc=False, kw_only=True):
    """An endpoint may have a free place."""


# --- actions -------------------------------------------------------------------------------------------------


class Release(Struct, frozen=True, gc=False, kw_only=True):
    """Let this request decide again; answered by ``Left`` or ``Stayed``."""

    ticket: int


class Hold:
    """The machine: ``handle`` events, perform the returned actions in order. It wants no waking by time; ``policy`` may
    be replaced at any time."""

    def __init__(
        self,
        policy: PlacementPolicy,
        *,
        requests: int = limits.HELD_REQUESTS,
        body_bytes: int = limits.HELD_BODIES,
    ) -> None:
        self.policy = policy
        self._most = requests
        self._most_bytes = body_bytes
        self._held: dict[int, Waiting] = {}
        self._turns = tuple(_Turns() for _ in _RANKS)
        self._without_place: set[Hashable] = set()
        self._lines: tuple[dict[str, list[Waiting]], ...] | None = None
        self._released: tuple[int, int] | None = None
        self._more_news = False
        self.body_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def has_room(self, body_bytes: int, share: float = 1.0) -> bool:
        """Whether a request with a body of this size may be held, if its class may fill ``share`` of the bounds."""
        return (
            len(self._held) < share * self._most and self.body_bytes + body_bytes <= share * self._most_bytes
        )

    def depth(self, request_class: RequestClass) -> int:
        """How many requests of this class wait."""
        return sum(waiting.request_class is request_class for waiting in self._held.values())

    def handle(self, event: Event, now: int) -> list[Release]:
        """Fold one event in. ``now`` is boot ms."""
        if isinstance(event, NewsCame):
            return self._look(now)
        if isinstance(event, Joined):
            self._join(event.waiting)
            return []
        if isinstance(event, Stayed):
            return self._stay(event.ticket, now)
        assert isinstance(event, Left)
        return self._leave(event.ticket, now)

    def _join(self, waiting: Waiting) -> None:
        if waiting.ticket in self._held or not self.has_room(waiting.body_bytes):
            raise LocalMisuse(f"request {waiting.ticket} cannot be held: no room, or held already")
        self._held[waiting.ticket] = waiting
        self.body_bytes += waiting.body_bytes
        self._lines = None

    def _look(self, now: int) -> list[Release]:
        if self._released is not None:
            self._more_news = True
            return []
        self._without_place.clear()
        self._lines = None
        return self._release(now)

    def _stay(self, ticket: int, now: int) -> list[Release]:
        if self._released is None or self._released[0] != ticket:
            return []
        self._released = None
        self._without_place.add(self._held[ticket].kind)
        return self._go_on(now)

    def _leave(self, ticket: int, now: int) -> list[Release]:
        waiting = self._held.pop(ticket, None)
        if waiting is None:
            return []
        self.body_bytes -= waiting.body_bytes
        self._lines = None
        if self._released is None or self._released[0] != ticket:
            return []
        self._turns[self._released[1]].charge(waiting.caller, waiting.seconds)
        self._released = None
        return self._go_on(now)

    def _go_on(self, now: int) -> list[Release]:
        if self._more_news:
            self._more_news = False
            return self._look(now)
        return self._release(now)

    def _release(self, now: int) -> list[Release]:
        """Whoever is next among those whose kind may still find a place."""
        for rank, line in enumerate(self._lines or self._line_up(now)):
            heads = {
                caller: head for caller, queue in line.items() if (head := self._head(queue)) is not None
            }
            if heads:
                ticket = self._turns[rank].next_of(heads, self.policy.hold_quantum_s).ticket
                self._released = ticket, rank
                return [Release(ticket=ticket)]
        return []

    def _line_up(self, now: int) -> tuple[dict[str, list[Waiting]], ...]:
        """Who waits, by class and caller, the most urgent caller first, in each line the first one last: kept for as
        long as all just stay."""
        lines: tuple[dict[str, list[Waiting]], ...] = tuple({} for _ in _RANKS)
        ranked = sorted(
            [(self._rank(waiting, now), waiting) for waiting in self._held.values()], key=self._urgency
        )
        for rank, waiting in ranked:
            lines[rank].setdefault(waiting.caller, []).append(waiting)
        for turns, line in zip(self._turns, lines, strict=True):
            turns.keep(line.keys())
            for queue in line.values():
                queue.reverse()
        self._lines = lines
        return lines

    def _head(self, line: list[Waiting]) -> Waiting | None:
        """The first of a line whose kind may still find a place; who stands before it is out of it."""
        while line and line[-1].kind in self._without_place:
            line.pop()
        return line[-1] if line else None

    def _urgency(self, ranked: tuple[int, Waiting]) -> tuple[int, int, int]:
        """Whose turn it is among those of one rank and caller, the most urgent first."""
        rank, waiting = ranked
        until_ms = waiting.deadline_ms
        if rank < _RANKS[waiting.request_class]:
            until_ms = min(until_ms, waiting.since_ms + targets_of(_CLASSES[rank], self.policy).deadline_ms)
        return until_ms, waiting.since_ms, waiting.ticket

    def _rank(self, waiting: Waiting, now: int) -> int:
        return _RANKS[risen(waiting.request_class, now - waiting.since_ms, self.policy)]


class _Turns:
    """Deficit round robin over the callers of one class: whose turn it is comes first."""

    def __init__(self) -> None:
        self._credit_s: dict[str, float] = {}

    def keep(self, callers: Set[str]) -> None:
        """Only ``callers`` have anything waiting; who has not loses its credit and its turn."""
        for gone in self._credit_s.keys() - callers:
            del self._credit_s[gone]

    def next_of(self, heads: dict[str, Waiting], quantum_s: float) -> Waiting:
        """The head whose caller can pay for it first. Asking again without a charge in between gives the same."""
        credit = self._credit_s
        for caller in heads:
            credit.setdefault(caller, 0.0)
        rounds = min(ceil((head.seconds - credit[caller]) / quantum_s) for caller, head in heads.items())
        if rounds > 1:
            for caller in heads:
                credit[caller] += (rounds - 1) * quantum_s
        for caller in [caller for caller in credit if caller in heads] * 2:
            if credit[caller] + _CENT_S >= heads[caller].seconds:
                return heads[caller]
            credit[caller] = credit.pop(caller) + quantum_s
        raise AssertionError("a round gave nobody enough")

    def charge(self, caller: str, seconds: float) -> None:
        """The caller's head was served."""
        if caller in self._credit_s:
            self._credit_s[caller] -= seconds


def risen(request_class: RequestClass, waited_ms: int, policy: PlacementPolicy) -> RequestClass:
    """The class that a request counts as after so long a wait."""
    return _CLASSES[max(0, _RANKS[request_class] - max(0, waited_ms) // policy.hold_promote_ms)]


def after_wait(
    request: PlacementRequest, policy: PlacementPolicy, now: int, *, since_ms: int, waits: bool
) -> PlacementRequest:
    """``request`` that first had to wait at ``since_ms``, as it decides ``now``."""
    stands_as = risen(request.hints.request_class, now - since_ms, policy)
    return replace(request, held_since_ms=since_ms, waits=waits, stands_as=stands_as)


def waiting_of(request: PlacementRequest, terms: HoldTerms, ticket: int) -> Waiting:
    """``request`` as it waits on ``terms``."""
    return Waiting(
        ticket=ticket,
        request_class=request.hints.request_class,
        caller=request.caller,
        kind=(request.hints.request_class, terms.rows),
        seconds=terms.seconds,
        body_bytes=request.body_bytes,
        since_ms=terms.since_ms,
        deadline_ms=terms.deadline_ms,
    )
