"""How one placed request went: its attempts, its waits in the queue, its ending. Times are boot ms."""

import math
from typing import Final

from msgspec.structs import replace

from router_core.placement.decision.decision import Decision, record_of
from router_core.placement.queueing.terms import HoldTerms
from router_core.placement.record import Attempt, Choice, DecisionRecord, Ending

_CANCELLED: Final = {"client_gone": "client", "slow_client": "slow_client"}


class AttemptLog:
    """``committed``: the client has part of an answer. ``held_ms``: how long it waited in the queue, None if it never
    did; ``held_since_ms``: when it first began to."""

    __slots__ = (
        "_arrived_ms",
        "_attempts",
        "_dispatched_ms",
        "_first_token_ms",
        "_waiting_since_ms",
        "committed",
        "held_ms",
        "held_since_ms",
        "out_tokens",
    )

    def __init__(self, arrived_ms: int) -> None:
        self.committed = False
        self.out_tokens: int | None = None
        self.held_ms: int | None = None
        self.held_since_ms: int | None = None
        self._arrived_ms = arrived_ms
        self._attempts: list[Attempt] = []
        self._dispatched_ms = 0.0
        self._first_token_ms: float | None = None
        self._waiting_since_ms: int | None = None

    @property
    def is_waiting(self) -> bool:
        """True while the request waits in the queue."""
        return self._waiting_since_ms is not None

    def note_wait(self, hold: HoldTerms | None, now: int) -> None:
        """A wait in the queue begins, or has ended."""
        if hold is not None:
            self._waiting_since_ms, self.held_since_ms = now, hold.since_ms
        elif self._waiting_since_ms is not None:
            self.held_ms, self._waiting_since_ms = self.waited_ms(now), None

    def waited_ms(self, now: int) -> int | None:
        """As ``held_ms``, a wait that has not ended included."""
        since = self._waiting_since_ms
        return self.held_ms if since is None else (self.held_ms or 0) + now - since

    def note(
        self,
        attempt: Attempt,
        *,
        committed: bool,
        dispatched_ms: float,
        first_token_ms: float | None,
        out_tokens: int | None,
    ) -> None:
        """Keep how one attempt went. ``first_token_ms`` is known of streams alone, ``out_tokens`` if anybody told."""
        self.committed = committed
        self.out_tokens = out_tokens
        self._dispatched_ms = dispatched_ms
        self._first_token_ms = first_token_ms
        self._attempts.append(attempt)

    def ended(
        self,
        decision: Decision,
        choice: Choice | None,
        *,
        status: int,
        code: str | None,
        total_ms: float,
        first_byte_ms: float | None,
    ) -> DecisionRecord:
        """The record of ``decision`` with its attempts and ending. Predictions are of one attempt, so errors count from
        its dispatch, and an answer that did not come as a stream says nothing about its first token. ``total_ms`` and
        ``first_byte_ms`` count from the request's arrival."""
        self.note_wait(None, round(self._arrived_ms + total_ms))
        est = choice.est if choice is not None and self.committed and code is None else None
        dispatched_ms, first_ms = self._dispatched_ms, self._first_token_ms
        ttft_ms = first_ms - dispatched_ms if first_ms is not None else None
        ect_ms = self._arrived_ms + total_ms - dispatched_ms
        return replace(
            record_of(decision),
            attempts=tuple(self._attempts),
            outcome=Ending(
                status=status,
                total_ms=round(total_ms),
                ttft_ms=round(first_byte_ms) if first_byte_ms is not None else None,
                out_tokens=self.out_tokens,
                held_ms=self.held_ms,
                cancelled_by=_CANCELLED.get(code or ""),
                err_ttft=_ln_error(ttft_ms, est.ttft) if est is not None else None,
                err_ect=_ln_error(ect_ms, est.ect) if est is not None else None,
            ),
        )


def _ln_error(actual_ms: float | None, predicted_s: float) -> float | None:
    if actual_ms is None or actual_ms <= 0 or predicted_s <= 0:
        return None
    return math.log(actual_ms / (1000.0 * predicted_s))
