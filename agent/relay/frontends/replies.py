"""What API clients are told besides an upstream's own reply: errors in their dialect, and where they were served."""

from agent.relay.dialects.relayed import Tongue
from agent.relay.frontends.codes import RETRY_AFTER_S, is_passing, message_of, said_as
from agent.relay.frontends.lists import JSON
from agent.relay.http.frontend import Answer
from agent.relay.http.headers import Headers, lines_of, own_header, own_line
from agent.relay.ports import Asked, Routed, Turned
from router_core.exchange.events import Reply
from router_core.placement.reasons import HintOutcome
from router_core.placement.request.request import HintNote
from router_core.policy.placement import Match
from router_core.router.failure import Cause

API_SIDE = "api"
"""The side of the listener that clients reach, whose requests are placed here; what peers send in was placed by them."""


_EXACT = Match.EXACT
_AFTER_A_TRY = frozenset({404, 502, 504})
_OF_UPSTREAMS = frozenset({"upstream_unreachable", "upstream_protocol", "upstream_timeout"})
_CAUSES = {
    Cause.CONNECT_REFUSED: "the endpoint refused the connection: its engine is not running",
    Cause.CONNECT_FAILED: "no connection to the endpoint could be made",
    Cause.CONNECT_TIMEOUT: "the endpoint did not take the connection in time",
    Cause.IDENTITY: "at the address of the node that was chosen, another one answers",
    Cause.POOL_FULL: "all connections that this node makes to the endpoint are in use",
    Cause.NO_CONTINUE: "the node that was chosen did not take the request in time",
    Cause.EOF: "the endpoint took the request and closed the connection before it answered",
    Cause.RESET: "the endpoint took the request and broke the connection before it answered",
    Cause.TRUNCATED: "the endpoint's answer ended before it began",
    Cause.PROTOCOL: "the endpoint did not speak proper HTTP",
    Cause.FIRST_BYTE: "no byte came from the endpoint within the first_byte_ms of its manifest",
    Cause.DEADLINE: "the request's deadline passed before the endpoint answered",
    Cause.SILENT: "the endpoint gave no sign of life",
    Cause.SUSPECT: "the node that was chosen gave no sign of life",
    Cause.PEER_FAULT: "the node that was chosen could not have the request answered",
    Cause.INTERNAL: "an error of this node's own kept the request from being sent",
    Cause.GONE: "the node or the endpoint that was chosen is gone",
}
"""What happened at the last attempt, where an answer never began."""


class ApiVoice:
    """Tells one API client in its own dialect. ``cors`` goes onto every reply of the request."""

    __slots__ = ("_cors", "_tongue")

    side = API_SIDE

    def __init__(self, tongue: Tongue, cors: Headers) -> None:
        self._tongue = tongue
        self._cors = cors

    def refusal(
        self,
        told: Reply,
        asked: Asked,
        turned: Turned | None,
        routed: Routed | None,
        attempts: int,
        held_ms: int | None,
        cause: Cause | None = None,
    ) -> Answer:
        headers = [*JSON, (b"x-request-id", asked.request_id.encode("ascii"))]
        decision = routed.decision_id if turned is None and routed is not None and asked.is_work else None
        counts: tuple[tuple[str, int], ...] = ()
        nearest: tuple[str, ...] = ()
        words = _CAUSES.get(cause) if cause is not None and told.code in _OF_UPSTREAMS else None
        hints = _hints_of(routed)
        if turned is not None:
            decision, hints = turned.decision_id, turned.hints
            if turned.code == told.code:
                counts, nearest, words = turned.counts, turned.nearest, turned.words
        if decision is not None:
            headers.append((b"x-pairmesh-decision-id", decision.encode("ascii")))
        headers.append((b"x-pairmesh-reason", told.code.encode("ascii")))
        if routed is not None and told.status in _AFTER_A_TRY:
            headers += own_header(b"x-pairmesh-node", routed.choice.label)
        if attempts > 1 or (attempts and told.status in _AFTER_A_TRY):
            headers.append((b"x-pairmesh-attempts", b"%d" % attempts))
        if attempts > 1 and told.status in (502, 504):
            headers.append((b"x-should-retry", b"false"))
        if hints is not None:
            headers.append((b"x-pairmesh-hints", hints.encode("ascii")))
        if held_ms is not None:
            headers.append((b"server-timing", b"queue;dur=%d" % held_ms))
        if is_passing(told.status, told.code):
            headers.append((b"retry-after", b"%d" % (told.retry_after_s or RETRY_AFTER_S)))
        code = said_as(told.code)
        body = self._tongue.error(told.status, code, message_of(code, counts, nearest, words))
        return Answer(status=told.status, headers=headers + self._cors, body=body, code=told.code)

    def stream_error(self, code: str, *, mid_event: bool) -> bytes:
        return self._tongue.stream_error(code, message_of(code), mid_event=mid_event)

    def lines(self, asked: Asked, routed: Routed, attempts: int, status: int) -> bytes:
        choice, decision = routed.choice, routed.decision
        told = own_line("x-request-id", asked.request_id)
        told += own_line("x-pairmesh-node", choice.label) + own_line("x-pairmesh-model", choice.model)
        if asked.is_work:
            told += own_line("x-pairmesh-decision-id", routed.decision_id)
            if decision is not None:
                told += own_line("x-pairmesh-reason", decision.reason.value)
        if attempts > 1:
            told += f"x-pairmesh-attempts: {attempts}\r\n"
            if status in (502, 504):
                told += "x-should-retry: false\r\n"
        hints = _hints_of(routed)
        if hints is not None:
            told += own_line("x-pairmesh-hints", hints)
        if choice.match is not _EXACT:
            told += own_line("x-pairmesh-match", choice.match.value)
        if routed.held_ms is not None:
            told += f"server-timing: queue;dur={routed.held_ms}\r\n"
        if routed.session is not None:
            told += own_line("x-pairmesh-session", routed.session)
        lines = told.encode("ascii")
        return lines + lines_of(self._cors) if self._cors else lines


def _hints_of(routed: Routed | None) -> str | None:
    """What became of the hints of a request that was routed."""
    return None if routed is None or routed.decision is None else hints_header(routed.decision.hints)


def hints_header(notes: tuple[HintNote, ...]) -> str | None:
    """What became of each hint, as ``x-pairmesh-hints``; None if there was none."""
    if not notes:
        return None
    said = []
    for note in notes:
        outcome = note.outcome.value
        if note.outcome is HintOutcome.EXCLUDED and note.detail is not None:
            outcome = f"{outcome}({note.detail})"
        said.append(f"{note.hint}={outcome}")
    return ", ".join(said)
