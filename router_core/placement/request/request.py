"""One request as placement sees it: sizes, requirements, hints. Built once, never changed, never any text of it.

It knows neither how a dialect's body looks (the relay reads it) nor where sessions and attempts are kept.
"""

from enum import Enum

from msgspec import Struct

from router_core.ids import NodeId, NodeName
from router_core.placement.reasons import AuthorityOutcome, HintOutcome
from router_core.policy.authority import AuthorityMode
from router_core.policy.placement import Locality as Locality
from router_core.policy.placement import Match as Match
from router_core.record.state import Capability, Dialect

Endpoint = str
"""One upstream of one node, ``<node_id>/<endpoint name>``: how rows are named in requests, ledgers and records."""

NO_OUTPUT = Dialect.EMBED | Dialect.OLLAMA_EMBED | Dialect.RERANK


class RequestClass(Enum):
    """How urgent a request is."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    BACKGROUND = "background"


class NodeRef(Struct, frozen=True, gc=False, kw_only=True):
    """A reference to a node, or to one of its endpoints; exactly one of ``node_id`` and ``name`` is set. ``mark`` is how
    the id of the one that is meant begins, where several go by that name."""

    text: str
    node_id: NodeId | None = None
    name: NodeName | None = None
    mark: str = ""
    endpoint: str | None = None


class HintNote(Struct, frozen=True, gc=False, kw_only=True):
    """What became of one hint, for the record and ``x-pairmesh-hints``. ``ref`` names a node or a term, never text."""

    hint: str
    outcome: HintOutcome
    ref: str | None = None
    detail: str | None = None


class Hints(Struct, frozen=True, gc=False, kw_only=True):
    """Parsed hints of one request; the default is a request without any.

    ``requires_node`` is any-of, every other ``requires_*`` and ``refuses_*`` all-of. ``notes`` holds what was
    ignored or clamped while parsing. ``None`` means not asked.
    """

    prefer: tuple[NodeRef, ...] = ()
    requires_node: tuple[NodeRef, ...] = ()
    refuses_node: tuple[NodeRef, ...] = ()
    requires_engine: tuple[str, ...] = ()
    refuses_engine: tuple[str, ...] = ()
    requires_label: tuple[tuple[str, str], ...] = ()
    refuses_label: tuple[tuple[str, str], ...] = ()
    requires_caps: Capability = Capability(0)
    ctx_least: int | None = None
    params_least_m: int | None = None
    bits_least: float | None = None
    match: Match = Match.EXACT
    locality: Locality = Locality.MESH
    request_class: RequestClass = RequestClass.INTERACTIVE
    slo_ttft_ms: int | None = None
    slo_tpot_ms: int | None = None
    deadline_ms: int | None = None
    expect_tokens: int | None = None
    session: str | None = None
    told: tuple[str, ...] = ()
    notes: tuple[HintNote, ...] = ()

    @property
    def narrows(self) -> bool:
        """True if some node, label or engine term restricts the rows."""
        return bool(
            self.requires_node
            or self.refuses_node
            or self.requires_engine
            or self.refuses_engine
            or self.requires_label
            or self.refuses_label
        )


NO_HINTS = Hints()


class Pin(Struct, frozen=True, gc=False, kw_only=True):
    """Where a session was last served, and how many tokens of its last turn may still be cached there."""

    endpoint: Endpoint
    model: str
    tokens: int
    at_ms: int


class Advice(Struct, frozen=True, gc=False, kw_only=True):
    """An authority's answer: endpoints, best first, and, if one is to be drawn, as many weights above 0. ``reason`` is
    printable ASCII of the authority's."""

    order: tuple[Endpoint, ...]
    weights: tuple[float, ...] | None = None
    ttl_ms: int
    reason: str | None = None


class Counsel(Struct, frozen=True, gc=False, kw_only=True):
    """What asking the authority came to, once per request: ``advice``, or the ``outcome`` that took its place and, in
    one word, ``why``. ``decision_id`` is what the first decision was called when asking, ``ms`` how long that took."""

    mode: AuthorityMode
    outcome: AuthorityOutcome
    decision_id: str
    ms: int = 0
    advice: Advice | None = None
    why: str | None = None


class PlacementRequest(Struct, frozen=True, gc=False):
    """Everything a decision may know of a request.

    ``text_bytes`` counts prompt text (no data URLs), ``body_bytes`` what travels; ``prompt_tokens`` is the whole prompt
    if somebody counted it, else it is estimated, with ``token_numbers`` that came as tokens. ``item_bytes`` and
    ``item_tokens`` are of the longest one where the prompt is many, each of which has to fit alone (None: it is one);
    ``sure_tokens`` is what it takes of a context for certain. ``output_cap`` is the dialect's cap on output tokens per
    choice, None if not told. ``spare``: a second attempt beside one that goes on, for which only a warm row with a free
    place is worth it. ``requires`` is inferred from path and body and excludes a row only on a known no. ``tried`` failed
    this request already, ``refused`` would not have it however long it waits, ``declined`` would have let it wait for
    longer than was expected. ``held_since_ms`` is when it first had to wait for room, ``waits``
    whether it is still waiting, ``stands_as`` the class whose room it may use by now (None: its own).
    """

    request_id: str
    dialect: Dialect
    model: str
    arrival_ms: int
    stream: bool = False
    text_bytes: int = 0
    prompt_tokens: int | None = None
    body_bytes: int = 0
    images: int = 0
    audio_parts: int = 0
    output_cap: int | None = None
    choices: int = 1
    num_ctx: int | None = None
    requires: Capability = Capability(0)
    hints: Hints = NO_HINTS
    caller: str = "local"
    session: bytes | None = None
    pin: Pin | None = None
    advice: Counsel | None = None
    attempt: int = 1
    tried: frozenset[Endpoint] = frozenset()
    refused: frozenset[Endpoint] = frozenset()
    spare: bool = False
    declined: frozenset[Endpoint] = frozenset()
    held_since_ms: int | None = None
    waits: bool = False
    stands_as: RequestClass | None = None
    token_numbers: int = 0
    item_bytes: int | None = None
    item_tokens: int = 0
    sure_tokens: int = 0
