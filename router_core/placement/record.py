"""What a decision hands out: the row that serves, and the record that the journal keeps and ``explain`` prints.

Rules: a record tells what routed, not what might have; it holds sizes, counts and names of ours, never text of
a prompt or an answer nor a hash of one. Every struct here encodes to JSON and msgpack as it is. Those with many fields
that are made for each request may be built in the order of these, which takes a fifth of the time.
"""

from msgspec import Struct

from router_core.ids import Id16, NodeId, NodeName
from router_core.placement.reasons import Action, AuthorityOutcome, Reason
from router_core.placement.request.request import Endpoint, HintNote
from router_core.policy.authority import AuthorityMode
from router_core.policy.placement import Match

VERSION = 1
BACKUP = "backup"


class Estimate(Struct, frozen=True, gc=False):
    """Predicted times of one row in seconds; ``tpot`` per output token, ``sd`` the relative spread.

    ``ahead`` is how many requests have to end there before this one is served, in the mean; ``cost`` what its time to
    first token, its pace and its waiting at the expense of others come to, by which rows are compared. Records of before
    tell neither.
    """

    wait: float
    load: float
    prefill: float
    net: float
    tpot: float
    ttft: float
    ect: float
    sd: float
    ahead: float = 0.0
    cost: float = 0.0


class Factors(Struct, frozen=True, gc=False):
    """Costs in 0..1, 0 is best."""

    slo: float
    memory: float
    switch: float
    pressure: float
    speed: float
    spill: float = 0.0


class Candidate(Struct, frozen=True, gc=False):
    """One scored row, with all that the choice looked at.

    ``free``: the request would not have queued there; ``fill``: requests there for each it serves at a time;
    ``period_ms``: how often its node tells its state; ``samples``: how often it was tried from here. ``adj`` is
    ``penalty`` (looser match, alias) less the policy's hint bonus x ``hint`` and affinity bonus x ``affinity``, both in
    0..1. ``out`` says why it left the choice: ``veto``, ``dominated:<row>``, ``cold`` or ``backup``; where not all
    candidates are shown only ``backup`` is told. ``price``: what it would cost outside the mesh, None within.
    """

    row: str
    model: str
    resident: bool
    free: bool
    age_ms: int
    period_ms: int
    est: Estimate
    f: Factors
    adj: float
    penalty: float
    hint: float
    affinity: float
    capacity: float
    queue_risk: float
    score: float
    out: str | None = None
    level: int = 0
    price: float | None = None
    fill: float = 0.0
    samples: int | None = None


class Excluded(Struct, frozen=True, gc=False, kw_only=True):
    """One candidate that a filter excluded, and why."""

    row: str
    code: Reason
    detail: str | None = None


class Alternative(Struct, frozen=True, gc=False):
    """A row that was not chosen, and the weighted factor that spoke most against it (``draw``: none did)."""

    row: str
    score: float
    top_factor: str


class ViewFacts(Struct, frozen=True, gc=False, kw_only=True):
    """The snapshot that the decision stood on: generation, oldest picture in ms, herd multiplier, rows visited, how
    many of those were cut because too many others would be done sooner, and whether requests of this class left the mesh
    before."""

    gen: int
    max_age_ms: int
    m_r: float
    rows: int
    cut: int = 0
    spill_on: bool = False


class RequestFacts(Struct, frozen=True, gc=False, rename={"request_class": "class"}):
    """Sizes and requirements of the request; ``prompt_tokens`` and ``output_tokens`` are estimates.

    The model's names are empty if nobody offers it: then they would be any text a client sent.
    """

    model_asked: str
    model_resolved: str
    digest: str | None
    match: str
    dialect: str
    requires: tuple[str, ...]
    stream: bool
    prompt_tokens: int
    output_tokens: int
    ctx_need: int
    images: int
    request_class: str
    slo_ttft_ms: int
    slo_tpot_ms: int | None
    deadline_ms: int
    locality: str
    caller: str
    session: str | None


class Attempt(Struct, frozen=True, gc=False, kw_only=True):
    """One dispatch as it went; times in ms since the request arrived, None if never reached."""

    row: str
    start_ms: int
    connect_ms: int | None = None
    first_byte_ms: int | None = None
    result: str = ""
    refused: str | None = None


class Ending(Struct, frozen=True, gc=False, kw_only=True):
    """How the request ended. ``held_ms`` is how long it waited in the router for room, None if it did not; ``err_*`` are
    ln(actual / predicted)."""

    status: int
    total_ms: int
    ttft_ms: int | None = None
    out_tokens: int | None = None
    held_ms: int | None = None
    cancelled_by: str | None = None
    err_ttft: float | None = None
    err_ect: float | None = None


class AuthorityNote(Struct, frozen=True, gc=False, kw_only=True):
    """What an authority had to do with a decision: how long asking took, what came of it, and why, in the authority's
    words if it was heeded. ``first`` is the endpoint it came to, None if its answer did not count."""

    mode: AuthorityMode = AuthorityMode.OFF
    outcome: AuthorityOutcome = AuthorityOutcome.OFF
    ms: int = 0
    reason: str | None = None
    first: Endpoint | None = None

    @property
    def leads(self) -> bool:
        """Whether ``first`` is to be taken, whatever it costs."""
        return self.first is not None and self.mode is AuthorityMode.AUTHORITATIVE


NO_AUTHORITY = AuthorityNote()


class DecisionRecord(Struct, frozen=True, gc=False):
    """Why one decision came out as it did.

    ``at_ms`` is wall time, set by who keeps the record, for display only; ``boot_ms`` is on the boot clock. ``margin`` is the
    score of the best other row minus that of the chosen one. ``attempts`` and ``outcome`` are added at the end.
    ``policy`` is the preset, ``policy_hash`` that of all its numbers. ``names`` says how people call the rows that are
    mentioned, ``@node/endpoint``.
    """

    id: str
    request_id: str
    router: NodeId
    policy: str
    seed: str
    view: ViewFacts
    req: RequestFacts
    hints: tuple[HintNote, ...]
    excluded: tuple[Excluded, ...]
    excluded_counts: dict[str, int]
    candidates: tuple[Candidate, ...]
    full: bool
    action: Action
    chosen: str | None
    reason: Reason
    margin: float | None
    degraded: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    attempts: tuple[Attempt, ...] = ()
    outcome: Ending | None = None
    at_ms: int | None = None
    boot_ms: int = 0
    policy_hash: str = ""
    names: dict[str, str] = {}
    authority: AuthorityNote = NO_AUTHORITY
    v: int = VERSION

    @property
    def winner(self) -> Candidate | None:
        """The candidate that was chosen, which comes first."""
        return self.candidates[0] if self.chosen is not None and self.candidates else None


class Choice(Struct, frozen=True, gc=False):
    """The row that serves: where it is, how it is called there and by people, and what is expected of it.

    ``model`` is the served (public) name at its owner, ``match`` how loosely it is the one asked for. ``ahead`` is how
    many requests its ingress may let in before this one beyond those it serves at a time; None: it may let it wait.
    ``prefill_s`` and ``decode_s`` are the service seconds to reserve, ``need_bytes`` the memory a cold load takes
    (0 if resident).
    """

    endpoint: Endpoint
    node: Id16
    node_id: NodeId
    node_name: NodeName
    label: str
    endpoint_name: str
    engine: str
    model: str
    is_self: bool
    resident: bool
    prompt_tokens: int
    output_tokens: int
    ahead: float | None
    prefill_s: float
    decode_s: float
    need_bytes: int
    est: Estimate
    match: Match = Match.EXACT
