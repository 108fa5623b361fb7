"""One request in the dispatch loop of ``pair-1.0``: at most five dispatches over rounds of all owners, with back-off.

A machine: ``handle`` what happened, perform the actions, wake it at ``deadline``. It commits at the first body byte;
after that nothing is tried again and nothing limits the silence. Choosing is a call it is given. Refuses to know how
a node is reached.
"""

from collections.abc import Callable
from enum import Enum

from msgspec import Struct

from router_core.sim.placement.baselines.pair import Chosen, Proxy

ATTEMPTS = 5
WINDOW_MS = 600_000
DIAL_MS = 10_000
HEADERS_MS = 120_000
BODY_MS = 120_000
PRESENCE_MS = 500
BACKOFF_MS = (1_000, 2_000, 4_000, 8_000, 8_000)
_RETRIED = frozenset({404, 408, 429})


class Phase(Enum):
    IDLE = "idle"
    DIALLING = "dialling"
    AWAITING_HEADERS = "awaiting_headers"
    AWAITING_BODY = "awaiting_body"
    STREAMING = "streaming"
    SLEEPING = "sleeping"
    ENDED = "ended"


class Dial(Struct, frozen=True, kw_only=True):
    """Send the request to ``node``; ``attempt`` marks every event of it."""

    node: str
    attempt: int


class Abandon(Struct, frozen=True, kw_only=True):
    attempt: int


class Tell(Struct, frozen=True, kw_only=True):
    """A job event for everybody; ``node`` None: not placed."""

    state: str
    node: str | None


class Answer(Struct, frozen=True, kw_only=True):
    """The client's end: ``status``, with ``retry_after_s`` where the loop ended between attempts."""

    status: int
    retry_after_s: int | None = None


Action = Dial | Abandon | Tell | Answer


class PairExchange:
    """``owners`` lists nodes in discovery that have the model, ``present`` says whether one still is, ``jitter`` draws
    a factor for each pause. Times are ms."""

    def __init__(
        self,
        proxy: Proxy,
        owners: Callable[[], list[str]],
        present: Callable[[str], bool],
        jitter: Callable[[], float],
        arrival_ms: int,
    ) -> None:
        self.phase = Phase.IDLE
        self.attempt = 0
        self._proxy = proxy
        self._owners = owners
        self._present = present
        self._jitter = jitter
        self._end_ms = arrival_ms + WINDOW_MS
        self._chosen: Chosen | None = None
        self._left: list[str] = []
        self._node = ""
        self._limit: int | None = None
        self._check: int | None = None
        self._status = 502

    @property
    def deadline(self) -> int | None:
        """When ``passed`` is due, or None."""
        due = [at for at in (self._limit, self._check) if at is not None]
        return min(due) if due else None

    def begin(self, now: int) -> list[Action]:
        """The request has arrived."""
        if not self._choose():
            return self._answer(502)
        return self._next(now)

    def refused(self, attempt: int, now: int) -> list[Action]:
        """The dial, or the transport before commit, failed."""
        return self._retry(502, now) if self._is_waiting(attempt) else []

    def connected(self, attempt: int, now: int) -> list[Action]:
        if self._is_waiting(attempt):
            self.phase, self._limit = Phase.AWAITING_HEADERS, now + HEADERS_MS
        return []

    def headers(self, attempt: int, status: int, now: int) -> list[Action]:
        """The status is known; a retryable one fails the attempt, another error is passed through."""
        if not self._is_waiting(attempt):
            return []
        if status in _RETRIED or status >= 500:
            return self._retry(status, now)
        if status >= 300:
            return self._done("errored", status)
        self.phase, self._limit = Phase.AWAITING_BODY, now + BODY_MS
        return []

    def first_byte(self, attempt: int, now: int) -> list[Action]:
        if not self._is_waiting(attempt):
            return []
        self.phase, self._limit, self._check = Phase.STREAMING, None, None
        return [Tell(state="running", node=self._node)]

    def ended(self, attempt: int, now: int) -> list[Action]:
        """The answer is complete."""
        if attempt != self.attempt or self.phase not in (Phase.STREAMING, Phase.AWAITING_BODY):
            return []
        return self._done("completed", 200)

    def passed(self, now: int) -> list[Action]:
        """Time passed."""
        if self.phase is Phase.SLEEPING and self._limit is not None and now >= self._limit:
            return self._wake(now)
        if self._limit is not None and now >= self._limit:
            status = 504 if self.phase is Phase.AWAITING_BODY else 502
            return [Abandon(attempt=self.attempt), *self._retry(status, now)]
        if self._check is not None and now >= self._check:
            self._check += PRESENCE_MS
            if not self._present(self._node):
                return [Abandon(attempt=self.attempt), *self._retry(502, now)]
        return []

    # --- rounds ----------------------------------------------------------------------------------------------

    def _choose(self) -> bool:
        owners = self._owners()
        if not owners:
            return False
        self._chosen = self._proxy.choose(owners)
        self._left = list(self._chosen.order)
        return True

    def _next(self, now: int) -> list[Action]:
        """Try the next owner of this round, or pause."""
        if not self._left or now >= self._end_ms:
            return self._pause(now)
        assert self._chosen is not None
        self._node = self._left.pop(0)
        self._proxy.move(self._chosen, self._node)
        self.attempt += 1
        self.phase, self._limit, self._check = Phase.DIALLING, now + DIAL_MS, now + PRESENCE_MS
        return [Tell(state="queued", node=self._node), Dial(node=self._node, attempt=self.attempt)]

    def _retry(self, status: int, now: int) -> list[Action]:
        self._status = status
        if self.attempt >= ATTEMPTS:
            return self._done("errored", status)
        return self._next(now)

    def _pause(self, now: int) -> list[Action]:
        self._release()
        told: list[Action] = [Tell(state="queued", node=None)] if self.phase is not Phase.SLEEPING else []
        if now >= self._end_ms:
            return told + self._answer(503, 1)
        self.phase, self._check = Phase.SLEEPING, None
        pause_ms = round(BACKOFF_MS[max(0, self.attempt - 1)] * self._jitter())
        self._limit = min(self._end_ms, now + pause_ms)
        return told

    def _wake(self, now: int) -> list[Action]:
        if now >= self._end_ms:
            return self._answer(503, 1)
        return self._next(now) if self._choose() else self._pause(now)

    def _done(self, state: str, status: int) -> list[Action]:
        node = self._node
        self._release()
        return [Tell(state=state, node=node), *self._answer(status)]

    def _answer(self, status: int, retry_after_s: int | None = None) -> list[Action]:
        self.phase, self._limit, self._check = Phase.ENDED, None, None
        return [Answer(status=status, retry_after_s=retry_after_s)]

    def _release(self) -> None:
        if self._chosen is not None:
            self._proxy.release(self._chosen)

    def _is_waiting(self, attempt: int) -> bool:
        return attempt == self.attempt and self.phase in (
            Phase.DIALLING,
            Phase.AWAITING_HEADERS,
            Phase.AWAITING_BODY,
        )
