"""Lines of the access log: sizes, times, codes and ids of one request. Nothing a client wrote but its request id."""

from agent.relay.http.frontend import Answer
from agent.relay.http.headers import request_id_of
from agent.relay.http.parser import Request
from agent.relay.ports import AccessLine, Asked, Routed, Turned


def line_of_answer(
    side: str, request: Request | None, template: str | None, answer: Answer, now_ms: int
) -> AccessLine:
    """A request that was answered without an endpoint; ``request`` is None if its head never became one."""
    return AccessLine(
        side=side,
        method="-" if request is None else request.head.method.decode("ascii"),
        route=template or "-",
        status=answer.status,
        code=answer.code,
        request_id=None if request is None else request_id_of(request.head.named.get(b"x-request-id")),
        decision_id=None,
        peer=None,
        bytes_in=0 if request is None else request.length,
        bytes_out=0 if request is not None and request.head.method == b"HEAD" else len(answer.body),
        attempts=0,
        total_ms=0.0 if request is None else float(now_ms - request.accepted_ms),
        first_byte_ms=None,
    )


def line_of_exchange(
    side: str,
    request: Request,
    asked: Asked,
    routed: Routed | None,
    turned: Turned | None,
    *,
    status: int,
    code: str | None,
    bytes_out: int,
    attempts: int,
    now_ms: float,
    first_byte_ms: float | None,
) -> AccessLine:
    """A request that went through an exchange. Times are boot milliseconds."""
    arrived = asked.accepted_ms
    decided = routed.decision_id if routed is not None else None
    if turned is not None and turned.decision_id is not None:
        decided = turned.decision_id
    return AccessLine(
        side=side,
        method=request.head.method.decode("ascii"),
        route=request.head.path.decode("ascii"),
        status=status,
        code=code,
        request_id=asked.request_id,
        decision_id=decided,
        peer=None if routed is None or routed.choice.is_self else routed.choice.node_id,
        bytes_in=asked.body_bytes,
        bytes_out=bytes_out,
        attempts=attempts,
        total_ms=round(now_ms - arrived, 3),
        first_byte_ms=None if first_byte_ms is None else round(first_byte_ms - arrived, 3),
    )
