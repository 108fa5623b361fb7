"""Decisions that nobody carries out: a request that was never sent, and a stored decision made once more.

Both go through the functions that route. Nothing is reserved, journaled, counted or learned, no session is touched,
and no authority is asked.
"""

import math
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from agent.admin.ports import NoRoute
from agent.admin.questions import ExplainBody
from agent.node.routing.placement import Placing
from agent.relay.dialects.ollama import NATIVE
from agent.relay.dialects.raw import TOKEN_BYTES as SURE_BYTES
from agent.relay.dialects.relayed import RELAYED
from agent.relay.http.headers import request_id_of, value_of
from router_core.placement.decision.decide import decide
from router_core.placement.decision.replay import replay
from router_core.placement.record import DecisionRecord
from router_core.placement.request.hints import HintFault, parse_hints
from router_core.placement.request.request import NO_OUTPUT, PlacementRequest
from router_core.policy.placement import PlacementPolicy
from router_core.record.spelling import CAPABILITIES, DIALECTS
from router_core.record.state import Capability

_ID_BITS = 128
_ROUTED = frozenset(RELAYED.values())


class DryRuns:
    """Satisfies the admin API's ``DryRuns``, as a local client of ``placing`` would."""

    def __init__(self, placing: Placing, rng: Random) -> None:
        self._placing = placing
        self._rng = rng

    def explain(self, asked: ExplainBody) -> DecisionRecord | HintFault | NoRoute:
        """What would be decided now, all candidates told; what the API has no route for is not decided."""
        dialect = DIALECTS[asked.dialect]
        if dialect not in _ROUTED:
            known = " ".join(name for name, known in DIALECTS.items() if known in _ROUTED)
            return NoRoute(detail=f"the API has no route for it, and answers 404; it has some for {known}")
        placing, now = self._placing, self._placing.clock.boot_ms()
        headers = [(name.lower(), value) for name, value in asked.headers.items()]
        hints = parse_hints(headers, _as_hints(asked), session_headers=placing.policy.session_headers)
        if isinstance(hints, HintFault):
            return hints
        session, pin = placing.session_of(hints, now)
        fleet = placing.router.fleet
        streams = asked.stream and dialect not in NO_OUTPUT
        size = round(asked.prompt_tokens * fleet.profiles.bytes_per_token(asked.model))
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        request = PlacementRequest(
            request_id=request_id_of(value_of(encoded, b"x-request-id"))
            or f"{self._rng.getrandbits(_ID_BITS):032x}",
            dialect=dialect,
            model=asked.model,
            arrival_ms=now,
            stream=streams,
            prompt_tokens=asked.prompt_tokens,
            body_bytes=size,
            images=asked.images,
            num_ctx=asked.ctx_need if dialect in NATIVE else None,
            item_bytes=None if asked.ctx_need is None else size,
            item_tokens=math.floor((asked.ctx_need or 0) / placing.policy.prompt_slack),
            sure_tokens=size // SURE_BYTES,
            requires=_requires(asked, streams=streams),
            hints=hints,
            session=session,
            pin=pin,
        )
        record = decide(request, fleet, placing.policy, now, self._rng, full=True).record
        return replace(record, at_ms=placing.clock.wall_ms())

    def replay(self, record: DecisionRecord, policy: PlacementPolicy | None) -> DecisionRecord:
        """The choice of ``record`` again, by ``policy``, else the one in force. Raises ``NotReplayable``."""
        return replay(record, policy or self._placing.policy)


def _as_hints(asked: ExplainBody) -> bytes:
    """The facts that a client would state as hints, as the body's ``pairmesh`` object."""
    told: dict[str, Any] = {
        "class": asked.request_class,
        "match": asked.match,
        "locality": asked.locality,
        "slo_ttft_ms": asked.slo_ttft_ms,
        "slo_tpot_ms": asked.slo_tpot_ms,
        "deadline_ms": asked.deadline_ms,
        "expect_tokens": asked.output_tokens,
    }
    return msgspec.json.encode(told)


def _requires(asked: ExplainBody, *, streams: bool) -> Capability:
    requires = Capability(0)
    for name in asked.requires:
        requires |= CAPABILITIES[name]
    if streams:
        requires |= Capability.STREAMING
    if asked.images:
        requires |= Capability.VISION
    return requires
