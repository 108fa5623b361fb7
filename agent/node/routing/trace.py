"""``run --trace FILE``: one JSON line per record accepted, decision, attempt and ending, for tests and post-mortems.

Ids, stamps, causes and numbers only: nothing a client wrote is ever given to it, model names aside that somebody
offers. Each line is written by one call, so that a killed process leaves whole lines. A file that cannot be
written, or a pipe that nobody empties, ends the tracing, never the daemon.
"""

import json
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path

from agent.effects.clock import Clock
from agent.relay.ports import (
    AccessLine,
    Asked,
    AttemptReport,
    Choosing,
    Observer,
    Placer,
    Queued,
    Routed,
    Turned,
)
from agent.store.folders import RefuseToStart
from router_core.ids import Id16, id16_of, id32_of
from router_core.placement.request.request import Endpoint
from router_core.policy.exchange import Hedge
from router_core.record.membership import Member, ViewChange
from router_core.record.state import Role
from router_core.view.cluster import ClusterView


class Trace:
    """An open trace file. Raises ``RefuseToStart`` if it cannot be opened for appending."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._clock = clock
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd = os.open(path, flags, 0o600)
        except OSError as fault:
            raise RefuseToStart(
                "trace_unwritable", f"{path} cannot be opened for --trace: {fault.strerror}"
            ) from None
        self._open = True
        self.write("began", pid=os.getpid())

    def write(self, event: str, **facts: str | int | float | bool | None) -> None:
        """Append one line with the time on the boot clock in ms."""
        if not self._open:
            return
        line = json.dumps({"e": event, "at": self._clock.boot_ms(), **facts}, separators=(",", ":"))
        raw = line.encode("ascii") + b"\n"
        try:
            if os.write(self._fd, raw) < len(raw):
                self.close()
        except OSError:
            self.close()

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._fd)

    def records(self, changes: Iterable[ViewChange]) -> None:
        """What the mesh told the view."""
        for change in changes:
            self.write(
                "record",
                origin=change.origin.hex(),
                state=change.state.value,
                epoch=change.epoch,
                inst=change.inst,
                seq=change.seq,
            )


class TracedPlacer:
    """A placer whose decisions and reservations are traced, with what the view said of each target."""

    def __init__(
        self,
        place: Placer,
        trace: Trace,
        view: Callable[[], ClusterView],
        members: Callable[[], Mapping[Id16, Member]],
    ) -> None:
        self._place = place
        self._trace = trace
        self._view = view
        self._members = members

    def __call__(self, asked: Asked) -> Choosing:
        return _TracedChoosing(self._place(asked), self)

    def placed(self, routed: Routed) -> None:
        """One dispatch is about to start."""
        view, choice = self._view(), routed.choice
        id16 = view.me if choice.is_self else id16_of(id32_of(choice.node_id))
        node, member = view.nodes.get(id16), self._members().get(id16)
        listed = (
            node is not None
            and node.static is not None
            and any(
                model.name == choice.model and node.static.engines[model.engine].name == choice.endpoint_name
                for model in node.static.models
            )
        )
        self._trace.write(
            "placed",
            decision=routed.decision_id,
            attempt=routed.attempt,
            seq=routed.reservation.seq,
            target=id16.hex(),
            own=choice.is_self,
            member=member is not None,
            serves=member is not None and bool(member.roles & Role.NODE),
            lists=listed,
            state=node.liveness.value if node is not None else None,
        )

    def ended(self, seq: int) -> None:
        """A reservation ended."""
        self._trace.write("reserved_end", seq=seq)


class _TracedChoosing:
    def __init__(self, inner: Choosing, owner: TracedPlacer) -> None:
        self._inner = inner
        self._owner = owner
        self._seqs: dict[int, int] = {}

    @property
    def until_ms(self) -> int | None:
        return self._inner.until_ms

    def consult(self) -> Coroutine[None, None, None] | None:
        return self._inner.consult()

    def decide(
        self,
        *,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
        declined: frozenset[Endpoint] = frozenset(),
    ) -> Routed | Turned | Queued:
        told = self._inner.decide(attempt=attempt, tried=tried, refused=refused, now=now, declined=declined)
        if isinstance(told, Routed):
            self._placed(told)
        return told

    @property
    def hedge(self) -> Hedge:
        return self._inner.hedge

    def has_other(self, *, tried: frozenset[Endpoint], refused: frozenset[Endpoint], now: int) -> bool:
        return self._inner.has_other(tried=tried, refused=refused, now=now)

    def spare(
        self,
        *,
        beside: Routed,
        attempt: int,
        tried: frozenset[Endpoint],
        refused: frozenset[Endpoint],
        now: int,
    ) -> Routed | None:
        told = self._inner.spare(beside=beside, attempt=attempt, tried=tried, refused=refused, now=now)
        if told is not None:
            self._placed(told)
        return told

    def held_ms(self, now: int) -> int | None:
        return self._inner.held_ms(now)

    def first_token(self, attempt: int) -> None:
        self._inner.first_token(attempt)

    def end(self, attempt: int) -> None:
        self._inner.end(attempt)
        self._owner.ended(self._seqs.pop(attempt, 0))

    def _placed(self, routed: Routed) -> None:
        self._seqs[routed.attempt] = routed.reservation.seq
        self._owner.placed(routed)


class TracedObserver:
    """An observer that also writes what it hears to the trace."""

    def __init__(self, inner: Observer, trace: Trace) -> None:
        self._inner = inner
        self._trace = trace

    def attempted(self, report: AttemptReport) -> None:
        routed, outcome, marks = report.routed, report.outcome, report.marks
        self._trace.write(
            "attempt",
            side=report.side,
            decision=routed.decision_id,
            seq=routed.reservation.seq,
            endpoint=routed.choice.endpoint_name,
            result=outcome.result.value,
            cause=outcome.cause.value if outcome.cause is not None else None,
            first_byte=marks is not None and marks.first_byte_ms is not None,
        )
        self._inner.attempted(report)

    def answered(self, line: AccessLine) -> None:
        self._trace.write(
            "answered",
            side=line.side,
            decision=line.decision_id,
            status=line.status,
            code=line.code,
            attempts=line.attempts,
            ms=round(line.total_ms),
        )
        self._inner.answered(line)

    def failed(self, where: str, exc: BaseException) -> None:
        self._trace.write("relay_failed", where=where)
        self._inner.failed(where, exc)
