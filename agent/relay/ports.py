"""What the relay needs of the rest of the daemon, as Protocols, and the plain data that crosses.

The daemon satisfies them; tests bring their own. Nothing here awaits: every call is made on a request's path.
Refuses to know: mesh links, the view's folding, engines' polling, where files lie.
"""

import ssl
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import Protocol

from msgspec import Struct

from agent.engines.contract import ResponseMarks
from agent.relay.dialects.facts import Facts
from router_core.ids import NodeId
from router_core.placement.decision.decision import Decision
from router_core.placement.ledger import Reservation
from router_core.placement.queueing.hold import Waiting
from router_core.placement.record import Choice
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import Hedge
from router_core.record.membership import Liveness, Member
from router_core.record.state import Dialect
from router_core.router.failure import Cause
from router_core.router.outcome import Outcome
from router_core.view.cluster import NodeView

# --- choosing ------------------------------------------------------------------------------------------------


class Asked(Struct, frozen=True, kw_only=True):
    """One request as placement hears of it.

    ``headers`` are the hint headers only: every ``x-pairmesh-*`` and session header, names in lower case, in
    order. ``caller`` is ``local`` or ``key:<name>``. ``accepted_ms`` is boot time. ``is_work`` False: a mere question
    about a model, for which nothing is scored, reserved, learned or journaled.
    """

    request_id: str
    dialect: Dialect
    facts: Facts
    headers: tuple[tuple[str, str], ...]
    caller: str
    body_bytes: int
    accepted_ms: int
    is_work: bool = True


class Routed(Struct, frozen=True, gc=False):
    """Where an attempt of this number goes: the ``choice``, and the ``decision`` that made it, None if it was made
    elsewhere or none was needed.

    ``decision_id`` is how it is told; ``inst`` is this router's process life, by which the target knows whose
    ``reservation`` it is. ``request_class`` is the client's own, ``left_ms`` what the request has left. ``held_ms`` is how
    long it waited in the queue, None if it did not have to; ``session`` what became of its session, None if it named none.
    """

    attempt: int
    decision_id: str
    choice: Choice
    reservation: Reservation
    inst: int
    request_class: str
    left_ms: int
    decision: Decision | None = None
    held_ms: int | None = None
    session: str | None = None

    @property
    def gap_ms(self) -> float:
        """Predicted time between two tokens."""
        est = self.choice.est
        return 1000.0 * (est.ect - est.ttft) / max(1, self.choice.output_tokens)

    @property
    def stands_as(self) -> str:
        """The class that the request counts as by now: the client's own, or one that it rose to by waiting."""
        risen = None if self.decision is None else self.decision.evidence.request.stands_as
        return self.request_class if risen is None else risen.value


class Turned(Struct, frozen=True, kw_only=True):
    """Nobody can take the request. ``counts`` are rows per exclusion code, ``nearest`` up to 3 model names. ``words`` say
    what this very request lacks, if that is more than its code says."""

    decision_id: str | None
    status: int
    code: str
    retry_after_s: int | None = None
    counts: tuple[tuple[str, int], ...] = ()
    nearest: tuple[str, ...] = ()
    hints: str | None = None
    words: str | None = None


class Queued(Struct, frozen=True, kw_only=True):
    """Whoever could take the request is full: it may wait as ``waiting`` says, and is ``turned`` away at ``until_ms``."""

    waiting: Waiting
    until_ms: int
    turned: Turned


class Choosing(Protocol):
    """Chooses for one request, and keeps what is reserved for its attempts. Each of these is ended once."""

    @property
    def until_ms(self) -> int | None:
        """Boot time after which the request is not dispatched any more; None if it knows no deadline."""

    @property
    def hedge(self) -> Hedge:
        """When a second attempt is made beside one that goes on."""

    def consult(self) -> Coroutine[None, None, None] | None:
        """What is to be waited for before the first decision, bounded in time; None to decide at once."""

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned | Queued:
        """Choose on the newest view and reserve, in one step."""

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        """Whether an endpoint beside these could take the request now, and is no mere stopgap. Reserves nothing."""

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> Routed | None:
        """Choose and reserve a warm endpoint with a free place for a second attempt, while the one at ``beside`` goes on;
        None if there is none, or if that one loads the model."""

    def held_ms(self, now: int) -> int | None:
        """How long the request has waited for room until ``now`` (boot ms); None if it never had to."""

    def first_token(self, attempt: int) -> None:
        """The first byte of this attempt's answer has come."""

    def end(self, attempt: int) -> None:
        """Give back what is reserved for this attempt."""


Placer = Callable[[Asked], Choosing]


# --- targets -------------------------------------------------------------------------------------------------


Admits = Callable[[IPv4Address | IPv6Address], bool]
"""True for an address that may be connected."""


class LocalEndpoint(Protocol):
    """One engine of this host, or one this host speaks for. ``ip`` is a literal, or a name if it ``admits``."""

    @property
    def name(self) -> str: ...
    @property
    def ip(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def host(self) -> bytes:
        """Value of the ``Host`` header for the engine."""

    def path_of(self, path: bytes) -> bytes:
        """The engine's own path for one of the API's."""

    @property
    def pass_headers(self) -> frozenset[bytes]:
        """Names in lower case that the operator passes on besides."""

    @property
    def authorization(self) -> str | None:
        """Value of the ``Authorization`` header for the engine, None if it asks for none."""

    @property
    def off_host(self) -> bool: ...
    @property
    def tls(self) -> ssl.SSLContext | None:
        """How to verify it, None for plain HTTP."""

    @property
    def admits(self) -> Admits | None:
        """Which addresses its name may lead to, None if it has a literal address."""

    @property
    def connect_ms(self) -> int: ...
    @property
    def first_byte_ms(self) -> int:
        """The manifest's limit, 0 for none."""

    @property
    def idle_ms(self) -> int: ...
    @property
    def connections(self) -> int:
        """Most sockets toward it at once: slots + max_queue + 8, at most 256."""

    def upstream_name(self, served: str) -> str:
        """What the engine calls ``served``."""

    def classify(self, status: int, prefix: bytes) -> Enum:
        """The failure class of an answer with status >= 400 by its first 512 body bytes."""


class PeerRoute(Struct, frozen=True, kw_only=True):
    """How to reach a peer's ingress now. ``addresses`` are tried in turn within one attempt, ``reached`` hears what each
    gave; ``build`` numbers the TLS context; ``pin`` is the peer's certificate."""

    node: NodeId
    addresses: tuple[tuple[str, int], ...]
    context: ssl.SSLContext
    build: int
    pin: bytes
    reached: Callable[[str, int, Cause | None], None] | None = None


class Targets(Protocol):
    """Where chosen endpoints are."""

    def local(self, endpoint: str) -> LocalEndpoint | None:
        """An endpoint of this node, unless it is draining, down or unknown."""

    def peer(self, node: NodeId) -> PeerRoute | None:
        """A peer's ingress, None if it has no known address or is not a member."""

    def peer_classify(self, node: NodeId, endpoint: str, status: int, prefix: bytes) -> Enum:
        """As ``LocalEndpoint.classify``, by the engine kind the peer's static record names."""

    def liveness(self, node: NodeId) -> Liveness: ...

    def picture(self, endpoint: Endpoint) -> NodeView | None:
        """What is known of the node that offers ``endpoint``."""


# --- ingress -------------------------------------------------------------------------------------------------


class RouteHeader(Struct, frozen=True, gc=False, kw_only=True):
    """``x-pairmesh-route`` and ``x-pairmesh-ahead``, parsed. ``ahead`` is how many requests the router expects to wait
    there before this one, None if it lets it wait or does not say; then ``wait_ms`` of an older router is how long it
    does."""

    decision_id: str
    attempt: int
    endpoint: str
    inst: int
    seq: int
    prompt_tokens: int
    output_tokens: int
    request_class: str
    wait_ms: int
    left_ms: int
    resident: bool
    ahead: float | None = None


class Admission(Protocol):
    """The serving node's last word, on fresh values, before a body is read."""

    def member(self, der: bytes) -> Member | None:
        """Who holds this certificate now; None for nobody on the roster."""

    def admit(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        """None to accept, else the cause of refusal (``draining`` ``model_absent`` ``queue_full`` ...)."""

    def asked_about(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        """As ``admit``, for a mere question about the model: how busy the endpoint is does not count."""

    def service_ms(self, route: RouteHeader, model: str) -> float:
        """How long the endpoint alone will be busy with it, by this node's own experience."""

    def fresh_state(self) -> tuple[bytes, bytes] | None:
        """The node's newest V record as (signed, signature)."""


class FirstBytes(Protocol):
    """Who wants to know that a request waits at an own engine for its first byte. ``sent_ms`` is boot time."""

    def sent(self, endpoint: str, model: str, sent_ms: int) -> None: ...

    def heard(self, endpoint: str, model: str, sent_ms: int) -> None:
        """The byte has come, or will not come any more."""


class NobodyAsks:
    """Satisfies ``FirstBytes`` where no engine needs it."""

    def sent(self, endpoint: str, model: str, sent_ms: int) -> None: ...

    def heard(self, endpoint: str, model: str, sent_ms: int) -> None: ...


HeardState = Callable[[bytes, bytes], None]
"""Fold a record that came with a peer's reply: (signed, signature); verification is the receiver's business."""


# --- seen from outside ---------------------------------------------------------------------------------------


class Offered(Struct, frozen=True, kw_only=True):
    """One name under which an endpoint offers a model. ``modified_at`` and ``format`` are known of own endpoints."""

    name: str
    dialects: Dialect
    digest: bytes | None = None
    size_bytes: int | None = None
    family: str | None = None
    params_m: int | None = None
    quant: str | None = None
    format: str | None = None
    modified_at: str | None = None


class Held(Struct, frozen=True, kw_only=True):
    """One model in one engine's memory, loading included. ``vram_share_pct`` is how much of it is on GPUs;
    ``expires_ms`` (wall clock) is known of own endpoints."""

    offered: Offered
    size_bytes: int | None = None
    vram_share_pct: int | None = None
    ctx: int | None = None
    expires_ms: int | None = None


class Listing(Protocol):
    """The part of a view that lists need: models on offer and in memory, of routable endpoints."""

    @property
    def generation(self) -> int: ...

    def offered(self) -> Iterable[Offered]:
        """Every name under which an endpoint of a routable node offers a model, repetitions allowed."""

    def held(self) -> Iterable[Held]:
        """What is in memory, once per node and model."""

    def versions(self) -> Iterable[str]:
        """The versions of the Ollama servers."""

    def aliases(self) -> Iterable[tuple[str, Dialect]]:
        """The operator's aliases of models that are on offer, with what these speak."""


class Phase(Enum):
    """What the node tells about itself at ``/health``."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class AttemptReport(Struct, frozen=True, kw_only=True):
    """One finished attempt, for learning and for the journal. ``text_bytes`` is the size of the prompt's text.
    ``head`` and ``tail`` are windows of the answer's body: they are read once by the engine's adapter and dropped.
    """

    side: str
    request_id: str
    routed: Routed
    outcome: Outcome
    dispatched_ms: float
    connected_ms: float | None
    marks: ResponseMarks | None
    head: bytes
    tail: bytes
    body_bytes: int
    text_bytes: int
    dialect: Dialect
    is_work: bool = True


class AccessLine(Struct, frozen=True, kw_only=True):
    """One request in the access log. No content, no header values of the client."""

    side: str
    method: str
    route: str
    status: int
    code: str | None
    request_id: str | None
    decision_id: str | None
    peer: str | None
    bytes_in: int
    bytes_out: int
    attempts: int
    total_ms: float
    first_byte_ms: float | None


class Observer(Protocol):
    """Where finished things go; each call must return at once."""

    def attempted(self, report: AttemptReport) -> None: ...

    def answered(self, line: AccessLine) -> None: ...

    def failed(self, where: str, exc: BaseException) -> None:
        """A fault in the relay's own code; the request it struck was ended."""
