"""The serving node's last word on a request of a peer's router, and its newest record to send along.

Judged on the live fleet and the live work, before a body is read. Refuses to choose: the router chose.
"""

from collections.abc import Callable, Mapping

from agent.relay.ports import RouteHeader
from router_core.placement.candidates.fleet import Fleet
from router_core.placement.decision.ingress import IngressAsk, admit, asked_about, own_row, service_s
from router_core.placement.request.request import RequestClass
from router_core.record.envelope import Sealed
from router_core.record.membership import Member
from router_core.record.state import Dialect

TOKENS_MOST = 1_000_000
"""What a request is believed to hold where the context is not known."""


class Gate:
    """Satisfies the relay's ``Admission``."""

    def __init__(
        self,
        *,
        by_der: Callable[[], Mapping[bytes, Member]],
        fleet: Callable[[], Fleet],
        fresh: Callable[[], Sealed | None],
    ) -> None:
        self._by_der = by_der
        self._fleet = fleet
        self._fresh = fresh

    def member(self, der: bytes) -> Member | None:
        """Who holds this certificate now."""
        return self._by_der().get(der)

    def admit(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        """None to let the request in, else the cause of the refusal."""
        cause = admit(_ask_of(route, model, dialect), self._fleet())
        return cause.value if cause is not None else None

    def asked_about(self, route: RouteHeader, model: str, dialect: Dialect) -> str | None:
        """As ``admit``, for a mere question about the model."""
        cause = asked_about(_ask_of(route, model, dialect), self._fleet())
        return cause.value if cause is not None else None

    def service_ms(self, route: RouteHeader, model: str) -> float:
        """What the request takes alone, by this node's own profiles; no more is believed than fits the context."""
        row = own_row(self._fleet(), route.endpoint, model)
        if row is None:
            return 0.0
        most = row.ctx or row.ctx_most or TOKENS_MOST
        return 1000.0 * service_s(row, min(route.prompt_tokens, most), min(route.output_tokens, most))

    def fresh_state(self) -> tuple[bytes, bytes] | None:
        """The newest own V record as (signed, signature)."""
        sealed = self._fresh()
        return (sealed.signed, sealed.sig) if sealed is not None else None


def _ask_of(route: RouteHeader, model: str, dialect: Dialect) -> IngressAsk:
    return IngressAsk(
        endpoint=route.endpoint,
        model=model,
        dialect=int(dialect),
        resident=route.resident,
        ahead=route.ahead,
        patient=route.ahead is None and route.wait_ms >= route.left_ms,
        request_class=RequestClass(route.request_class),
    )
