"""Own work that the others' records do not show yet: what this router has dispatched, per endpoint.

Rules: every entry is ended exactly once, ending twice is harmless; an entry stops counting once the target's own
record covers it; nothing here is touched by health checks. It knows nothing of rows and scores.
"""

from collections.abc import Mapping

from msgspec import Struct

from router_core.ids import Id8, Id16
from router_core.placement.local import LocalWork
from router_core.placement.record import Choice
from router_core.placement.request.request import Endpoint
from router_core.record.state import ModelState
from router_core.view.cluster import ClusterView, NodeView

_LOADING_OR_LOADED = frozenset({ModelState.LOADING, ModelState.RESIDENT})


class Owed(Struct, gc=False, kw_only=True):
    """Uncovered own work of one endpoint: service seconds and requests."""

    work_s: float = 0.0
    requests: int = 0


class Reservation(Struct, frozen=True, gc=False):
    """A ledger entry. ``seq`` names it here, ``route_seq`` counts requests per target node for the wire."""

    seq: int
    route_seq: int


class _Entry(Struct, gc=False, kw_only=True):
    endpoint: Endpoint
    endpoint_name: str
    model: str
    node: Id16
    route_seq: int
    sent_ms: int
    rtt_ms: int
    prefill_s: float
    decode_s: float
    counts: bool
    load_bytes: int
    ticket: int | None


class Ledger:
    """Own in-flight work. ``inst`` marks this process life in the targets' ``seen`` rows; work on the own host goes to
    ``local`` instead of the sums, because its load is known live.

    ``owed`` (by endpoint) and ``loading`` (bytes of own loads by node) are the sums that decisions read; an absent
    key is zero.
    """

    def __init__(self, me: Id8, inst: int, local: LocalWork) -> None:
        self.inst = inst
        self.local = local
        self._me = me
        self._seq = 0
        self._route_seq: dict[Id16, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._owed: dict[Endpoint, Owed] = {}
        self._loading: dict[Id16, int] = {}
        self.owed: Mapping[Endpoint, Owed] = self._owed
        self.loading: Mapping[Id16, int] = self._loading

    def __len__(self) -> int:
        return len(self._entries)

    def reserve(self, choice: Choice, now: int, rtt_ms: int = 1) -> Reservation:
        """Book the work of a chosen row, in the same step as the decision."""
        self._seq = seq = self._seq + 1
        endpoint, node, load_bytes = choice.endpoint, choice.node, choice.need_bytes
        prefill_s, decode_s = choice.prefill_s, choice.decode_s
        work_s, ticket = prefill_s + decode_s, None
        self._route_seq[node] = route_seq = self._route_seq.get(node, 0) + 1
        if choice.is_self:
            ticket = self.local.start(choice.endpoint_name, work_s, now, choice.model)
        else:
            owed = self._owed.get(endpoint)
            if owed is None:
                self._owed[endpoint] = owed = Owed()
            owed.work_s += work_s
            owed.requests += 1
        if load_bytes:
            self._loading[node] = self._loading.get(node, 0) + load_bytes
        self._entries[seq] = _Entry(
            endpoint=endpoint,
            endpoint_name=choice.endpoint_name,
            model=choice.model,
            node=node,
            route_seq=route_seq,
            sent_ms=now,
            rtt_ms=rtt_ms,
            prefill_s=prefill_s,
            decode_s=decode_s,
            counts=not choice.is_self,
            load_bytes=load_bytes,
            ticket=ticket,
        )
        return Reservation(seq, route_seq)

    def first_token(self, seq: int) -> None:
        """The prompt has been computed: its share is no longer outstanding."""
        entry = self._entries.get(seq)
        if entry is None:
            return
        if entry.counts:
            self._owed[entry.endpoint].work_s -= entry.prefill_s
        entry.prefill_s = 0.0

    def end(self, seq: int) -> None:
        """The request has ended, however it did: drop its entry. Saying so twice is harmless."""
        entry = self._entries.pop(seq, None)
        if entry is None:
            return
        if entry.ticket is not None:
            self.local.finish(entry.ticket)
        if entry.counts:
            self._uncount(entry)
        if entry.load_bytes:
            self._unload(entry)

    def cover(self, view: ClusterView) -> None:
        """Stop counting what the newest records show: by their ``seen`` row of this router, or without one by age."""
        for entry in self._entries.values():
            node = view.nodes.get(entry.node)
            if node is None or node.volatile is None:
                continue
            if entry.counts and self._covers(node, entry):
                self._uncount(entry)
            if entry.load_bytes and _shows_load(node, entry):
                self._unload(entry)

    def _covers(self, node: NodeView, entry: _Entry) -> bool:
        for row in node.volatile.seen if node.volatile is not None else ():
            if row.router == self._me and row.inst == self.inst:
                return row.seq >= entry.route_seq
        return node.taken_ms >= entry.sent_ms + entry.rtt_ms

    def _uncount(self, entry: _Entry) -> None:
        owed = self._owed[entry.endpoint]
        owed.work_s -= entry.prefill_s + entry.decode_s
        owed.requests -= 1
        if owed.requests == 0:
            del self._owed[entry.endpoint]
        entry.counts = False

    def _unload(self, entry: _Entry) -> None:
        left = self._loading[entry.node] - entry.load_bytes
        if left > 0:
            self._loading[entry.node] = left
        else:
            del self._loading[entry.node]
        entry.load_bytes = 0


def _shows_load(node: NodeView, entry: _Entry) -> bool:
    if node.volatile is None or node.static is None:
        return False
    models, engines = node.static.models, node.static.engines
    return any(
        row.state in _LOADING_OR_LOADED
        and row.model < len(models)
        and row.engine < len(engines)
        and models[row.model].name == entry.model
        and engines[row.engine].name == entry.endpoint_name
        for row in node.volatile.residents
    )
