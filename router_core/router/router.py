"""The stateful router of one node, and one request's way through it.

A ``Router`` owns what its node knows beyond any snapshot: own work that nobody's record shows yet, breakers, endpoints
that are late, who waits in the queue, sessions, demand, learned profiles, models that are being unloaded, classes that
spill. The daemon, the simulator and an embedder drive this one class. It does no IO: ``now`` is boot ms, dice come as
``rng``, and whoever drives it dispatches what it decides.
"""

import itertools
import math
from collections.abc import Hashable, Iterable, Set
from random import Random
from typing import Protocol

from msgspec.structs import replace

from router_core import limits
from router_core.ids import NodeId, id8_of
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet, Live, fold_fleet
from router_core.placement.decision.decide import decide
from router_core.placement.decision.decision import Decision
from router_core.placement.decision.ids import DecisionIds, new_id
from router_core.placement.demand import Counted, Demand
from router_core.placement.filters.eligibility import targets_of, until_ms_of
from router_core.placement.ledger import Ledger, Reservation
from router_core.placement.local import LocalWork
from router_core.placement.queueing.hold import Hold, Waiting, after_wait, waiting_of
from router_core.placement.queueing.holding import Holding
from router_core.placement.record import Choice
from router_core.placement.request.request import Endpoint, Pin, PlacementRequest, RequestClass
from router_core.placement.scoring.survey import has_other
from router_core.placement.sessions import Sessions, session_key
from router_core.policy.exchange import ExchangePolicy
from router_core.policy.placement import PlacementPolicy
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Result as Blame
from router_core.profile.profiles import Profiles
from router_core.router.attempt_log import AttemptLog
from router_core.router.breaker import Breakers
from router_core.router.failure import Cause, FailureClass, is_overloaded, is_server_error
from router_core.router.lateness import Lateness, Sent
from router_core.router.outcome import SERVED, Outcome, Result
from router_core.router.rate import DispatchRate
from router_core.view.cluster import ClusterView

_NONE: frozenset[Endpoint] = frozenset()
_CAPACITY = frozenset({FailureClass.BUSY, FailureClass.LOADING, FailureClass.ABSENT, FailureClass.TOO_LONG})


class Decider(Protocol):
    """``decide``, or another rule with its face. ``called`` is the id of the decision, None for one of its own."""

    def __call__(
        self,
        request: PlacementRequest,
        fleet: Fleet,
        policy: PlacementPolicy,
        now: int,
        rng: Random,
        *,
        called: str | None = None,
    ) -> Decision: ...


class Router:
    """``fleet`` is what is known of all endpoints now. ``profiles``, ``ledger``, ``breakers``, ``lateness``, ``queue``,
    ``sessions``, ``demand`` and ``dispatch`` are this router's own; others read them, and change them by its methods.

    ``inst`` marks this process life. ``local`` is the work on the own host, which peers' requests add to. With ``ids``
    decisions are called in runs, else each draws its own id. ``decider`` takes the place of the shipped rule.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        rng: Random,
        now: int,
        inst: int = 0,
        policy: PlacementPolicy | None = None,
        exchange: ExchangePolicy | None = None,
        profiles: Profiles | None = None,
        local: LocalWork | None = None,
        session_secret: bytes = b"",
        started_ms: int | None = None,
        ids: DecisionIds | None = None,
        most_waiting: int = limits.HELD_REQUESTS,
        decider: Decider = decide,
    ) -> None:
        policy, exchange = policy or PlacementPolicy(), exchange or ExchangePolicy()
        self.rng = rng
        self.ids = ids
        self.decider = decider
        self.profiles = Profiles(ProfilePolicy()) if profiles is None else profiles
        self.ledger = Ledger(id8_of(view.me), inst, LocalWork() if local is None else local)
        self.breakers = Breakers(exchange)
        self.lateness = Lateness(exchange)
        self.queue = Holding(Hold(policy, requests=most_waiting))
        self.sessions = Sessions()
        self.demand = Demand()
        self.dispatch = DispatchRate(now)
        self._secret = session_secret
        self._spilling: set[RequestClass] = set()
        self._leaving: set[tuple[str, str]] = set()
        self._tickets = itertools.count(1)
        self._policy = policy
        self._live = Live(
            ledger=self.ledger,
            started_ms=started_ms,
            breakers=self.breakers,
            hold=self.queue,
            suspects=self.lateness.suspects,
            late=self.lateness.costs,
            leaving=self._leaving,
            spilling=self._spilling,
        )
        self.fleet = fold_fleet(None, view, self.profiles, policy, self._live, now)
        self._counted = Counted(self.fleet)

    # --- what is known ---------------------------------------------------------------------------------------

    @property
    def policy(self) -> PlacementPolicy:
        """The policy in force: that of the fleet, so that candidates and choice are always of one."""
        return self.fleet.policy

    @property
    def leaving(self) -> Set[tuple[str, str]]:
        """Own models (endpoint, model) that are being unloaded."""
        return self._leaving

    @property
    def spilling(self) -> Set[RequestClass]:
        """Classes whose requests leave the mesh where they may."""
        return self._spilling

    def see(self, view: ClusterView, now: int, *, news: bool = False) -> None:
        """Everything is decided on ``view`` from now on. ``news``: what was learned last is to be known of everywhere at
        once."""
        self.fleet = fold_fleet(self.fleet, view, self.profiles, self._policy, self._live, now, news=news)

    def adopt(self, policy: PlacementPolicy) -> None:
        """Another policy is in force, from the next view that is seen on."""
        self._policy = self.queue.policy = policy

    def reborn(self, node: NodeId) -> None:
        """A node answers in a new process life, or can be reached again."""
        self.breakers.reborn(node)

    def leave(self, models: Iterable[tuple[str, str]]) -> None:
        """Exactly these own models (endpoint, model) are being unloaded."""
        self._leaving.clear()
        self._leaving.update(models)

    def spill(self, request_class: RequestClass, is_on: bool) -> None:
        """Whether requests of this class leave the mesh from now on."""
        (self._spilling.add if is_on else self._spilling.discard)(request_class)

    # --- one request -----------------------------------------------------------------------------------------

    def begin(self, request: PlacementRequest) -> "Placement":
        """``request`` is to be placed; nothing is decided yet."""
        return Placement(self, request)

    def session(self, name: str, now: int) -> tuple[bytes, Pin | None]:
        """The key of the session that a client names, and where it was last served."""
        key = session_key(name, self._secret)
        return key, self.sessions.find(key, now)

    def ticket(self) -> int:
        """A number for a request that waits."""
        return next(self._tickets)

    def new_id(self) -> str:
        """An id for a decision."""
        return new_id(self.rng) if self.ids is None else self.ids.new()

    def decide(self, request: PlacementRequest, now: int, *, called: str | None = None) -> Decision:
        """Who serves ``request``, or why nobody can. Nothing is reserved."""
        fleet, ids = self.fleet, self.ids
        if called is None and ids is not None:
            called = ids.new()
        return self.decider(request, fleet, fleet.policy, now, self.rng, called=called)

    def reserve(self, choice: Choice, now: int) -> Reservation:
        """Book the work of a choice."""
        return self.ledger.reserve(choice, now, math.ceil(1000.0 * choice.est.net))

    def count(self, asked: str, decision: Decision, now: int) -> None:
        """Count a request as demand for the model it asks for, if anybody offers it, served or not."""
        counted = self._counted
        if counted.fleet is not self.fleet:
            counted = self._counted = Counted(self.fleet)
        choice = decision.chosen
        key8 = counted.key_of(asked, choice)
        if key8 is None:
            return
        if choice is not None:
            work_s = choice.prefill_s + choice.decode_s
        else:
            work_s = decision.hold.seconds if decision.hold is not None else 0.0
        self.demand.note(key8, work_s, now)

    # --- one attempt -----------------------------------------------------------------------------------------

    def dispatched(self, endpoint: Endpoint, now: int, work_s: float | None = None) -> None:
        """A request leaves for ``endpoint``; if it was placed here, with so many seconds of work."""
        self.breakers.dispatched(endpoint, now)
        if work_s is not None:
            self.dispatch.note(work_s, now)

    def sent(self, endpoint: Endpoint, attempt: Sent) -> None:
        """The request of an attempt was sent."""
        self.lateness.sent(endpoint, attempt)

    def overdue(self, endpoint: Endpoint, attempt: Sent, now: float) -> None:
        """An attempt got no byte in the time that was to be expected, or is moved for silence."""
        self.lateness.overdue(endpoint, attempt, now)

    def heard(self, endpoint: Endpoint) -> None:
        """The first byte of an answer came from there."""
        self.lateness.heard(endpoint)

    def blame(self, endpoint: Endpoint, now: int) -> None:
        """The server error of an earlier attempt was the endpoint's own: another one has served the same request."""
        self.breakers.failed(endpoint, now)

    def ended(
        self, outcome: Outcome, attempt: Sent, now: float, *, request: Hashable, full_ms: float | None = None
    ) -> None:
        """An attempt has ended: what that says of its endpoint, if anything. ``request`` stands for who asked and what,
        ``full_ms`` is how long an endpoint that is full asks to be left alone."""
        at, status, failure, breakers = outcome.endpoint, outcome.status, outcome.failure, self.breakers
        self.lateness.ended(at, attempt, now)
        answer = (status, failure) if status is not None and failure is not None else None
        is_full = answer is not None and is_overloaded(*answer)
        if is_full:
            self.lateness.full(at, now, full_ms)
        if outcome.fault:
            breakers.failed(at, int(now), connection_refused=outcome.cause is Cause.CONNECT_REFUSED)
        elif answer is not None and is_server_error(*answer):
            breakers.erred(at, int(now), request, busy=self.lateness.under_way(at) > 0)
        elif outcome.result in SERVED and not is_full:
            breakers.succeeded(at, int(now))
        else:
            breakers.released(at)

    def sweep(self, now: float, stalled: frozenset[Endpoint] = _NONE) -> None:
        """Forget what is over of late endpoints. ``stalled`` keep a client waiting in mid-answer for too long now."""
        self.lateness.sweep(now, stalled)

    # --- learning --------------------------------------------------------------------------------------------

    def concurrency(self, row: Row) -> float:
        """Requests in the batch of a candidate's engine: those beside one that has left the books already, and that
        one."""
        if row.is_self:
            busy = self.ledger.local.in_flight(row.endpoint) + row.foreign + 1
        else:
            owed = self.ledger.owed.get(row.key)
            busy = row.in_flight + (owed.requests if owed is not None else 0)
        return float(min(row.slots, max(1, busy)))


def blame_of(outcome: Outcome) -> Blame:
    """How an attempt ended, as far as its endpoint is to blame."""
    if outcome.result is Result.DONE:
        return Blame.OK
    if outcome.result is Result.CANCELLED:
        return Blame.CANCELLED
    return Blame.FAULT if outcome.fault and outcome.failure not in _CAPACITY else Blame.OTHER


class Placement:
    """One request being placed. Attempts are numbered from 1, and each is reserved for in the step that decides it.

    ``decision`` is the one that tells of the request: the last that chose an endpoint, else the last. ``choice`` is where
    the request goes, or went. After ``until_ms`` nothing is dispatched any more.
    """

    __slots__ = (
        "_is_counted",
        "_reserved",
        "_router",
        "_ticket",
        "choice",
        "decision",
        "log",
        "request",
        "until_ms",
    )

    def __init__(self, router: "Router", request: PlacementRequest) -> None:
        self.request = request
        self.until_ms = until_ms_of(request, targets_of(request.hints.request_class, router.policy))
        self.decision: Decision | None = None
        self.choice: Choice | None = None
        self.log = AttemptLog(request.arrival_ms)
        self._router = router
        self._is_counted = False
        self._ticket: int | None = None
        self._reserved: dict[int, tuple[Choice, Reservation]] = {}

    # --- deciding --------------------------------------------------------------------------------------------

    def decide(
        self,
        now: int,
        *,
        attempt: int = 1,
        tried: frozenset[Endpoint] = _NONE,
        refused: frozenset[Endpoint] = _NONE,
        declined: frozenset[Endpoint] = _NONE,
    ) -> Decision:
        """Choose on the newest view and reserve, in one step. Endpoints that were ``tried`` failed, those that ``refused``
        would not have the request, those that ``declined`` had more to do than was expected."""
        router, request, log = self._router, self.request, self.log
        if attempt > 1:
            request = replace(request, attempt=attempt, tried=tried, refused=refused, declined=declined)
        if (since_ms := log.held_since_ms) is not None:
            request = after_wait(request, router.policy, now, since_ms=since_ms, waits=log.is_waiting)
        decision = router.decide(request, now)
        choice = decision.chosen
        if decision.hold is None or not log.is_waiting:
            if not self._is_counted:
                self._is_counted = True
                router.count(request.model, decision, now)
            log.note_wait(decision.hold, now)
            if choice is not None or self.choice is None:
                self.decision, self.choice = decision, choice
        if decision.spill_on is not None:
            router.spill(request.hints.request_class, decision.spill_on)
        if choice is not None:
            self._reserved[attempt] = choice, router.reserve(choice, now)
        return decision

    def spare(
        self,
        now: int,
        *,
        beside: Choice,
        attempt: int,
        tried: frozenset[Endpoint] = _NONE,
        refused: frozenset[Endpoint] = _NONE,
    ) -> Decision | None:
        """Choose and reserve a warm endpoint of the mesh with a free place for a second attempt, while the one at ``beside``
        goes on; None if there is none, or if that one waits for its model to be loaded: that would load it twice.
        ``decision`` stays that of the first one."""
        router, first = self._router, self.decision
        row = router.fleet.row(beside.endpoint, beside.model)
        if first is None or (row is not None and not row.resident):
            return None
        request = replace(self.request, attempt=attempt, tried=tried, refused=refused, spare=True)
        decision = router.decide(request, now, called=first.id)
        choice = decision.chosen
        if choice is None:
            return None
        self._reserved[attempt] = choice, router.reserve(choice, now)
        return decision

    def has_other(
        self, now: int, *, tried: frozenset[Endpoint] = _NONE, refused: frozenset[Endpoint] = _NONE
    ) -> bool:
        """Whether an endpoint beside these could take the request now, and is no mere stopgap. Reserves nothing."""
        request = replace(self.request, attempt=2, tried=tried, refused=refused)
        return has_other(request, self._router.fleet, self._router.policy, now)

    # --- the queue -------------------------------------------------------------------------------------------

    def waiting(self, decision: Decision) -> Waiting:
        """The request as it waits in the queue, by a ``decision`` to queue it."""
        assert decision.hold is not None
        if self._ticket is None:
            self._ticket = self._router.ticket()
        return waiting_of(self.request, decision.hold, self._ticket)

    def held_ms(self, now: int) -> int | None:
        """How long the request has waited in the queue until ``now``; None if it never had to."""
        return self.log.waited_ms(now)

    # --- an attempt ------------------------------------------------------------------------------------------

    def reservation(self, attempt: int) -> Reservation:
        """What is reserved for an attempt that has not ended."""
        return self._reserved[attempt][1]

    def first_token(self, attempt: int) -> None:
        """The first byte of the attempt's answer has come: it is the one that serves."""
        reserved = self._reserved.get(attempt)
        if reserved is not None:
            self.choice = reserved[0]
            self._router.ledger.first_token(reserved[1].seq)

    def end(self, attempt: int) -> None:
        """Give back what is reserved for an attempt; doing so twice is harmless."""
        reserved = self._reserved.pop(attempt, None)
        if reserved is not None:
            self._router.ledger.end(reserved[1].seq)

    def ended(self, outcome: Outcome, sent: Sent, now: int) -> None:
        """An attempt has ended: what that tells of its endpoint, and what was reserved for it. ``sent`` is what was told
        to ``Router.sent``."""
        self._router.ended(outcome, sent, now, request=(self.request.caller, self.request.body_bytes))
        self.end(outcome.attempt)

    def served(self, out_tokens: int, now: int) -> None:
        """The client was answered from ``choice``: its session's next turn finds the prompt there."""
        session, choice = self.request.session, self.choice
        if session is None or choice is None:
            return
        tokens = choice.prompt_tokens + out_tokens
        pin = Pin(endpoint=choice.endpoint, model=choice.model, tokens=tokens, at_ms=now)
        self._router.sessions.pin(session, pin)
