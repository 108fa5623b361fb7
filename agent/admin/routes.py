"""What each admin route answers. Knows paths, queries and documents; knows no sockets and no HTTP library.

Reading changes nothing, and neither does asking. Every answer that is not the metrics is JSON; a refusal is
``{"error": code}``, with a ``detail`` only where our own verb says more and ``faults`` where a question has some.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import parse_qsl

import msgspec
from msgspec import Meta, Struct

from agent.admin.guard import RequestRefusal
from agent.admin.ports import Decisions, DryRuns, Exposition, NoRoute, Status, VerbRefused, Verbs
from agent.admin.questions import UNREADABLE, ExplainBody, ReplayBody, read_body
from agent.observe.capture import report_crash
from agent.observe.log import Log
from agent.observe.metrics import CONTENT_TYPE
from agent.settings.policy import PolicyRead, parse_policy
from router_core import limits
from router_core.placement.decision.replay import NotReplayable
from router_core.placement.reasons import Action, Reason
from router_core.placement.record import DecisionRecord
from router_core.placement.request.hints import HintFault

JSON: Final = "application/json"
DECISIONS_DEFAULT: Final = 50
_DECISION: Final = "/v1/decisions/"
_DO: Final = "/v1/do/"
_READ: Final = frozenset({"/metrics", "/v1/status", "/v1/view", "/v1/decisions"})
_ASKED: Final = frozenset({"/v1/explain", "/v1/replay"})
_QUERY_FIELDS: Final = 8


class AdminReply(Struct, frozen=True, kw_only=True):
    """One HTTP response of the admin API."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class DecisionsQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``since`` is wall time in ms."""

    action: Action | None = None
    reason: Reason | None = None
    since: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    limit: int = DECISIONS_DEFAULT


def refused(refusal: RequestRefusal, **headers: str) -> AdminReply:
    """The answer to a request that is not served."""
    return AdminReply(
        status=refusal.status, body=msgspec.json.encode({"error": refusal.code}), headers=headers
    )


def verb_of(path: str) -> str | None:
    """The verb a path names, or None."""
    return path.removeprefix(_DO) if path.startswith(_DO) else None


class Routes:
    """The routes of one daemon. ``do`` is for the socket alone; whoever wires this sees to it."""

    def __init__(
        self,
        *,
        status: Status,
        decisions: Decisions,
        dry_runs: DryRuns,
        exposition: Exposition,
        verbs: Verbs,
        log: Log,
    ) -> None:
        self._status = status
        self._dry_runs = dry_runs
        self._decisions = decisions
        self._exposition = exposition
        self._verbs = verbs
        self._log = log

    def methods(self, path: str) -> tuple[str, ...]:
        """What ``path`` can be asked by, but for verbs; empty if there is no such route."""
        if path in _ASKED:
            return ("POST",)
        return ("GET", "HEAD") if path in _READ or path.startswith(_DECISION) else ()

    async def get(self, path: str, query: str) -> AdminReply:
        match path:
            case "/metrics":
                return AdminReply(
                    status=200, body=self._exposition.render().encode(), content_type=CONTENT_TYPE
                )
            case "/v1/status":
                return _json(self._status.status())
            case "/v1/view":
                return _json(self._status.view())
            case "/v1/decisions":
                return await self._recent(query)
            case _ if path.startswith(_DECISION):
                record = await self._decisions.get(path.removeprefix(_DECISION))
                return refused(RequestRefusal.UNKNOWN) if record is None else _json(record)
            case _:
                return refused(RequestRefusal.UNKNOWN)

    async def post(self, path: str, body: bytes) -> AdminReply:
        """Answer a question, which changes nothing."""
        return self._explain(body) if path == "/v1/explain" else await self._replay(body)

    def _explain(self, body: bytes) -> AdminReply:
        asked = read_body(body, ExplainBody)
        if isinstance(asked, tuple):
            return _faulty(RequestRefusal.BODY.code, asked)
        found = self._dry_runs.explain(asked)
        if isinstance(found, NoRoute):
            return _faulty("route_unknown", (f"dialect: {found.detail}",))
        if isinstance(found, HintFault):
            return _faulty(Reason.HINT_MALFORMED.value, (f"{found.hint}: {found.detail}",))
        return _json(found)

    async def _replay(self, body: bytes) -> AdminReply:
        asked = read_body(body, ReplayBody)
        if isinstance(asked, tuple):
            return _faulty(RequestRefusal.BODY.code, asked)
        policy = None
        if asked.policy is not None:
            read = parse_policy(asked.policy.encode("utf-8", "surrogatepass"))
            if not isinstance(read, PolicyRead):
                return _faulty("policy_refused", tuple(map(str, read)))
            policy = read.policy
        record = await self._decisions.get(asked.id)
        if record is None:
            return refused(RequestRefusal.UNKNOWN)
        try:
            again = self._dry_runs.replay(record, policy)
        except NotReplayable as fault:
            return _json({"error": "not_replayable", "detail": str(fault)}, status=409)
        same = _served(again) == _served(record)
        return _json({"same": same, "was": record.chosen, "record": again})

    async def do(self, verb: str, body: bytes, uid: int) -> AdminReply:
        """Run ``verb`` for the local user ``uid`` with the JSON object in ``body`` (empty: no arguments)."""
        act = self._verbs.get(verb)
        if act is None:
            return refused(RequestRefusal.UNKNOWN)
        try:
            arguments = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except UNREADABLE:
            return refused(RequestRefusal.BODY)
        try:
            answer = await act(arguments)
        except VerbRefused as refusal:
            self._log.info("admin.verb_refused", verb=verb, uid=uid, code=refusal.code)
            return _json({"error": refusal.code, "detail": refusal.detail}, status=409)
        except Exception as exc:
            report_crash(self._log, "admin.verb_failed", exc, verb=verb, uid=uid)
            return _json({"error": "internal"}, status=500)
        self._log.info("admin.verb_done", verb=verb, uid=uid)
        return _json(answer)

    async def _recent(self, query: str) -> AdminReply:
        try:
            pairs = (
                parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=_QUERY_FIELDS)
                if query
                else []
            )
            asked = msgspec.convert(dict(pairs), DecisionsQuery, strict=False)
        except (ValueError, msgspec.ValidationError):
            return _faulty(RequestRefusal.QUERY.code, (_QUERY_TAKES,))
        if not 0 <= asked.limit <= limits.ADMIN_DECISIONS or len(pairs) != len(dict(pairs)):
            return _faulty(RequestRefusal.QUERY.code, (_QUERY_TAKES,))
        found = await self._decisions.recent(
            asked.limit,
            action=None if asked.action is None else asked.action.value,
            reason=None if asked.reason is None else asked.reason.value,
            since_ms=asked.since,
        )
        return _json({"decisions": found})


_QUERY_TAKES: Final = (
    f"it takes, each once: action, one of {' '.join(each.value for each in Action)}; reason, one of {' '.join(each.value for each in Reason)}; "
    f"since, ms since 1970; limit, 0 to {limits.ADMIN_DECISIONS:,}"
)


def _served(record: DecisionRecord) -> tuple[str, str] | None:
    return None if record.winner is None else (record.winner.row, record.winner.model)


def _faulty(code: str, faults: tuple[str, ...]) -> AdminReply:
    return _json({"error": code, "faults": faults}, status=400)


def _json(document: object, status: int = 200) -> AdminReply:
    return AdminReply(status=status, body=msgspec.json.encode(document))
