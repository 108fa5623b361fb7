"""Decisions that nobody carries out: a request that was never sent, and a stored decision made once more.

Both go through the functions that route. Nothing is reserved, journaled, counted or learned, no session is touched,
and no authority is asked.
"""

from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from agent.admin.questions import ExplainBody
from agent.node.placing import Placing
from agent.relay.headers import request_id_of, value_of
from router_core.placement.decide import decide
from router_core.placement.hints import HintFault, parse_hints
from router_core.placement.record import DecisionRecord
from router_core.placement.replay import replay
from router_core.placement.request import PlacementRequest
from router_core.policy.placement import PlacementPolicy
from router_core.record.spelling import CAPABILITIES, DIALECTS
from router_core.record.state import Capability

_ID_BITS = 128


class DryRuns:
    """Satisfies the admin API's ``DryRuns``, as a local client of ``placing`` would."""

    def __init__(self, placing: Placing, rng: Random) -> None:
        self._placing = placing
        self._rng = rng

    def explain(self, asked: ExplainBody) -> DecisionRecord | HintFault:
        """What would be decided now, all candidates told."""
        placing, now = self._placing, self._placing.clock.boot_ms()
        headers = [(name.lower(), value) for name, value in asked.headers.items()]
        hints = parse_hints(headers, _as_hints(asked), session_headers=placing.policy.session_headers)
        if isinstance(hints, HintFault):
            return hints
        if asked.ctx_need is not None:
            hints = replace(hints, ctx_least=max(hints.ctx_least or 0, asked.ctx_need))
        session, pin = placing.session_of(hints, now)
        fleet = placing.fleet()
        encoded = [(name.encode(), value.encode()) for name, value in headers]
        request = PlacementRequest(
            request_id=request_id_of(value_of(encoded, b"x-request-id"))
            or f"{self._rng.getrandbits(_ID_BITS):032x}",
            dialect=DIALECTS[asked.dialect],
            model=asked.model,
            arrival_ms=now,
            stream=asked.stream,
            prompt_tokens=asked.prompt_tokens,
            body_bytes=round(asked.prompt_tokens * fleet.profiles.bytes_per_token(asked.model)),
            images=asked.images,
            requires=_requires(asked),
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


def _requires(asked: ExplainBody) -> Capability:
    requires = Capability(0)
    for name in asked.requires:
        requires |= CAPABILITIES[name]
    if asked.stream:
        requires |= Capability.STREAMING
    if asked.images:
        requires |= Capability.VISION
    return requires
