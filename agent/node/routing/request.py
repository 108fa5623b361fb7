"""What the relay asks, as a request of the core. Nothing of its text is here: the relay tells counts and sizes."""

from functools import lru_cache

from agent.relay.ports import Asked
from router_core.placement.request.request import Hints, Pin, PlacementRequest
from router_core.record.state import Capability


def request_of(asked: Asked, hints: Hints, session: bytes | None, pin: Pin | None) -> PlacementRequest:
    """``session`` is the key of the session that a client names, ``pin`` where that was last served."""
    facts = asked.facts
    return PlacementRequest(
        asked.request_id,
        asked.dialect,
        facts.model,
        asked.accepted_ms,
        facts.stream,
        facts.text_bytes,
        body_bytes=asked.body_bytes,
        images=facts.images,
        audio_parts=facts.audio_parts,
        output_cap=facts.max_tokens,
        choices=facts.n or 1,
        num_ctx=facts.num_ctx,
        requires=_requires(
            facts.tools,
            facts.images > 0,
            facts.audio_parts > 0,
            facts.json_schema,
            facts.logprobs,
            facts.stream,
        ),
        hints=hints,
        caller=asked.caller,
        session=session,
        pin=pin,
        token_numbers=facts.tokens,
        item_bytes=facts.item_bytes,
        item_tokens=facts.item_tokens,
        sure_tokens=facts.sure_tokens,
    )


@lru_cache(maxsize=64)
def _requires(*needed: bool) -> Capability:
    """The capabilities that are needed, of those that the facts of a body tell."""
    requires = Capability(0)
    for is_needed, capability in zip(needed, _OF_FACTS, strict=True):
        if is_needed:
            requires |= capability
    return requires


_OF_FACTS = (
    Capability.TOOLS,
    Capability.VISION,
    Capability.AUDIO_IN,
    Capability.JSON_SCHEMA,
    Capability.LOGPROBS,
    Capability.STREAMING,
)
