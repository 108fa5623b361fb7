"""Questions about a model: any owner is asked, nearest first, and nothing is reserved, learned or journaled."""

from collections.abc import Callable, Mapping
from random import Random

from agent.relay.ports import Asked, Choosing, Placer, Routed, Turned
from router_core.ids import Id16
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.owner import choose_owner
from router_core.placement.ledger import Reservation
from router_core.placement.reasons import Reason
from router_core.placement.record import Choice, Estimate
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.names import nearest
from router_core.placement.request.request import Endpoint, PlacementRequest
from router_core.policy.exchange import Hedge

ANSWER_MS = 15_000
"""How long a question may take, all attempts together."""

_NO_TIME = 1
_NOTHING = Reservation(seq=0, route_seq=0)
_ID_BITS = 80


class Showing:
    """Makes a ``Choosing`` per question. ``rtts`` are ms by node, as far as they are known."""

    def __init__(
        self,
        *,
        fleet: Callable[[], Fleet],
        rtts: Callable[[], Mapping[Id16, int]],
        rng: Random,
    ) -> None:
        self.fleet = fleet
        self.rtts = rtts
        self.rng = rng

    def __call__(self, asked: Asked) -> Choosing:
        return Question(self, asked)


class Question:
    """One question being placed."""

    def __init__(self, showing: Showing, asked: Asked) -> None:
        self._showing = showing
        self._asked = asked
        self._hints = parse_hints(
            asked.headers, asked.facts.hints, session_headers=showing.fleet().policy.session_headers
        )
        self._id = f"{showing.rng.getrandbits(_ID_BITS):020x}"
        self.until_ms: int | None = asked.accepted_ms + ANSWER_MS

    def consult(self) -> None:
        """Nobody else is asked."""

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned:
        """The next owner that was not asked yet."""
        if isinstance(self._hints, HintFault):
            return _turned(Reason.HINT_MALFORMED)
        showing, asked = self._showing, self._asked
        fleet = showing.fleet()
        request = PlacementRequest(
            request_id=asked.request_id,
            dialect=asked.dialect,
            model=asked.facts.model,
            arrival_ms=asked.accepted_ms,
            hints=self._hints,
            caller=asked.caller,
            attempt=attempt,
            tried=tried,
            refused=refused,
        )
        row = choose_owner(request, fleet, fleet.policy, showing.rtts(), now)
        if isinstance(row, Reason):
            near: tuple[str, ...] = ()
            if row is Reason.MODEL_ABSENT:
                near = nearest(asked.facts.model, fleet.names(), fleet.policy.nearest_names)
            return _turned(row, near)
        left_ms = max(_NO_TIME, asked.accepted_ms + ANSWER_MS - now)
        return Routed(
            attempt=attempt,
            decision_id=self._id,
            choice=_choice_of(row, left_ms / 3000),
            reservation=_NOTHING,
            inst=fleet.live.ledger.inst,
            request_class=self._hints.request_class.value,
            left_ms=left_ms,
        )

    @property
    def hedge(self) -> Hedge:
        """Whoever is asked answers in time, or the next one is asked."""
        return Hedge.OFF

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        """Whether another owner could be asked."""
        return isinstance(self.decide(attempt=2, tried=tried, refused=refused, now=now), Routed)

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> None:
        """One at a time."""

    def held_ms(self, now: int) -> None:
        """Questions never wait."""

    def first_token(self, attempt: int) -> None:
        """Nothing was reserved."""

    def end(self, attempt: int) -> None:
        """Nothing was reserved."""


def placer_of(work: Placer, questions: Placer) -> Placer:
    """Sends each request to the placer that is meant for it."""
    return lambda asked: work(asked) if asked.is_work else questions(asked)


def _turned(reason: Reason, near: tuple[str, ...] = ()) -> Turned:
    return Turned(decision_id=None, status=reason.status, code=reason.value, nearest=near)


def _choice_of(row: Row, usual_s: float) -> Choice:
    """``row``, without any work; ``usual_s`` is how long an answer may be expected to take."""
    return Choice(
        endpoint=row.key,
        node=row.node,
        node_id=row.node_id,
        node_name=row.node_name,
        label=row.label,
        endpoint_name=row.endpoint,
        engine=row.engine,
        model=row.model,
        is_self=row.is_self,
        resident=row.resident,
        prompt_tokens=0,
        output_tokens=0,
        ahead=None,
        prefill_s=0.0,
        decode_s=0.0,
        need_bytes=0,
        est=Estimate(wait=0.0, load=0.0, prefill=0.0, net=0.0, tpot=0.0, ttft=usual_s, ect=usual_s, sd=0.0),
    )
