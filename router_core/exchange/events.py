"""What happens to a request (events, past participle) and what is to be done about it (actions, imperative)."""

from msgspec import Struct

from router_core.placement.request.request import Endpoint
from router_core.router.failure import Cause, FailureClass
from router_core.router.outcome import Outcome


class Target(Struct, frozen=True, gc=False, kw_only=True):
    """Where one attempt goes; ``peer`` means another node's ingress, ``patient`` that it may let the request wait.
    Durations in ms.

    ``first_byte_ms`` and ``idle_ms`` are limits of the endpoint's owner, 0 where there is none to be kept here.
    ``overdue_ms`` is when its first byte is so late that the endpoint ranks worse for others; it ends nothing.
    """

    endpoint: Endpoint
    peer: bool
    connect_ms: int
    first_byte_ms: int = 0
    idle_ms: int = 0
    overdue_ms: int = 10_000
    patient: bool = False


# --- events --------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, gc=False, kw_only=True):
    """What happens to a request: the base of all events."""


class UpstreamEvent(Event, frozen=True, gc=False, kw_only=True):
    """Something an upstream did in ``attempt``; of no effect once that attempt has ended."""

    attempt: int


class BodyParsed(Event, frozen=True, gc=False, kw_only=True):
    """The request's body was read and parsed."""


class Decided(Event, frozen=True, gc=False, kw_only=True):
    """An endpoint was chosen for the attempt."""

    target: Target


class TurnedAway(Event, frozen=True, gc=False, kw_only=True):
    """No endpoint can take the request: status and code for the client."""

    status: int
    code: str
    retry_after_s: int | None = None


class Queued(Event, frozen=True, gc=False, kw_only=True):
    """Every endpoint that could take the request is full: it waits for a free place, until ``until_ms`` at most,
    and is then turned away."""

    until_ms: int
    turned: TurnedAway


class Woken(Event, frozen=True, gc=False, kw_only=True):
    """There may be a free place for a request that waits."""


class Connected(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """The connection to the upstream is open."""


class Continued(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """A peer said ``100 Continue``."""


class HeadReceived(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """Status and headers of an answer below 400; held back."""

    status: int


class FirstByteReceived(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """The first byte of the answer's body came."""


class BodyEnded(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """The answer ended as its framing promised."""


class Answered(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """An answer of 400 or above, classified. ``whole``: all of it is at hand and can be replayed."""

    status: int
    failure: FailureClass
    whole: bool


class IngressRefused(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """A peer's ingress refused before it read the body."""

    cause: str


class Lost(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """No (more) answer. ``stale``: a reused connection died before any response byte."""

    cause: Cause
    stale: bool = False


class NodeSuspected(Event, frozen=True, gc=False, kw_only=True):
    """The peer that answers is not heard of any more; of effect once it has begun to answer."""


class NodeRecovered(Event, frozen=True, gc=False, kw_only=True):
    """The peer that was suspected is heard of again."""


class NoSignOfLife(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """The attempt's endpoint, or the peer it is at, gives no sign of life, and another endpoint can take the request."""

    cause: Cause


class EndpointDoubtful(UpstreamEvent, frozen=True, gc=False, kw_only=True):
    """The endpoint's owner doubts that it works: a second attempt elsewhere is worth its price."""


class NoSpare(Event, frozen=True, gc=False, kw_only=True):
    """Nobody has a free place for a second attempt now."""


class ClientGone(Event, frozen=True, gc=False, kw_only=True):
    """The client closed its connection."""


class ShuttingDown(Event, frozen=True, gc=False, kw_only=True):
    """The daemon shuts down."""


class TimePassed(Event, frozen=True, gc=False, kw_only=True):
    """``last_byte_ms``: when the latest body byte of the current attempt came, None before the first. ``content``: some of
    what came was part of the answer itself, and not a ping or a role alone."""

    last_byte_ms: int | None = None
    content: bool = True


# --- actions -------------------------------------------------------------------------------------------------


class Action(Struct, frozen=True, gc=False, kw_only=True):
    """What the machine asks its driver to do: the base of all actions."""


class Decide(Action, frozen=True, gc=False, kw_only=True):
    """Choose an endpoint on the newest view, without those ``tried`` and ``refused``. Those that ``declined`` had more to
    do than was expected: chosen again, they are to let it wait. ``spare``: beside an attempt that goes on, so only a warm
    one with a free place; answered by ``Decided`` or ``NoSpare``."""

    tried: frozenset[Endpoint]
    refused: frozenset[Endpoint]
    declined: frozenset[Endpoint]
    attempt: int
    spare: bool = False


class Dial(Action, frozen=True, gc=False, kw_only=True):
    """Connect to ``target`` for a new attempt."""

    target: Target
    attempt: int


class Redial(Action, frozen=True, gc=False, kw_only=True):
    """The same target once more, on a fresh connection."""

    attempt: int


class SendRequest(Action, frozen=True, gc=False, kw_only=True):
    """Head and body to an engine; the head alone to a peer."""

    attempt: int


class SendBody(Action, frozen=True, gc=False, kw_only=True):
    """Send the request's body to the peer, which has accepted the head."""

    attempt: int


class Commit(Action, frozen=True, gc=False, kw_only=True):
    """Hand status, headers and what has come of the body to the client."""

    attempt: int


class Finish(Action, frozen=True, gc=False, kw_only=True):
    """End the reply cleanly."""

    attempt: int


class Reply(Action, frozen=True, gc=False, kw_only=True):
    """An error of our own, in the client's dialect. ``retry_after_s`` None: no better knowledge than a default."""

    status: int
    code: str
    retry_after_s: int | None


class ReplyAnswer(Action, frozen=True, gc=False, kw_only=True):
    """Pass the kept error answer of this attempt on."""

    attempt: int


class TellError(Action, frozen=True, gc=False, kw_only=True):
    """After commit: say in the dialect that the answer is broken, then close without a clean end."""

    code: str


class CancelUpstream(Action, frozen=True, gc=False, kw_only=True):
    """Abandon the attempt and close its upstream connection."""

    attempt: int


class NoteOverdue(Action, frozen=True, gc=False, kw_only=True):
    """No byte has come in the time that was to be expected. The attempt goes on."""

    attempt: int
    endpoint: Endpoint


class BlameEndpoint(Action, frozen=True, gc=False, kw_only=True):
    """The server error of an earlier attempt was ``endpoint``'s own: another one has served the same request."""

    endpoint: Endpoint


class EndAttempt(Action, frozen=True, gc=False, kw_only=True):
    """Report how an attempt ended."""

    outcome: Outcome
