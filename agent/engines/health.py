"""The health of one endpoint as a pure fold over what its polls and the relay report.

A refused connection is a fact. Silence is none: an engine that works may be deaf for a minute. What is not answered counts
as silence only where the engine has answered before with as many requests in hand; with more it is a doubt, until it is
known to be deaf then; and any other sign of life makes up for both. It never touches counts of requests in flight and never causes a token to be generated.
"""

from msgspec import Struct
from msgspec.structs import replace

from agent.engines.contract import EndpointHealth, EngineRefusal

FAILURES = 3
"""Questions in a row without an answer after which an engine counts as silent."""
SILENT_MS = 60_000
"""So long silent, with nothing of ours in hand, it counts as gone."""
START_MS = 120_000
"""An engine first seen this short a time ago may still be starting."""
ABSENCE_PERIODS = 3


class Signs(Struct, frozen=True, gc=False, kw_only=True):
    """What is known of an endpoint's health. Times are boot-clock ms.

    ``seen_ms``: first answer of any kind since it was last unreachable. ``listed_ms``, ``looked_ms``: last
    good inventory and last good fast poll; None after a bad inventory or a lost connection. ``answered_most``: with how
    many own requests in hand it has answered. ``silent_ms``: since when it is silent. ``doubts`` counts missing answers
    with more in hand than that, ``doubted`` is how many it had then, and ``deaf_least`` with how many it is known to be
    deaf while it works.
    """

    refusal: EngineRefusal | None = None
    key_refused: bool = False
    loading: bool = False
    lost: bool = False
    failures: int = 0
    answered_most: int = 0
    doubts: int = 0
    doubted: int = 0
    deaf_least: int | None = None
    silent_ms: int | None = None
    seen_ms: int | None = None
    listed_ms: int | None = None
    looked_ms: int | None = None

    def judge(self, now_ms: int, period_ms: int, in_flight: int = 0) -> EndpointHealth:
        """The health at ``now_ms``; ``period_ms`` is the time between two fast polls."""
        if self.refusal is not None:
            return EndpointHealth.REFUSED
        if self.key_refused:
            return EndpointHealth.UNAUTHORISED
        if self.lost:
            return EndpointHealth.UNREACHABLE
        if self.silent_ms is not None:
            known = self.listed_ms is not None and (in_flight > 0 or now_ms - self.silent_ms < SILENT_MS)
            return EndpointHealth.SILENT if known else EndpointHealth.UNREACHABLE
        if self.loading:
            return EndpointHealth.STARTING
        if self.listed_ms is None:
            fresh = self.seen_ms is not None and now_ms - self.seen_ms < START_MS
            return EndpointHealth.STARTING if fresh else EndpointHealth.UNREACHABLE
        if self.doubts >= FAILURES:
            return EndpointHealth.DEAF
        if self.looked_ms is None or now_ms - self.looked_ms > ABSENCE_PERIODS * period_ms:
            return EndpointHealth.DEGRADED
        return EndpointHealth.READY

    @property
    def unanswered(self) -> int:
        """Questions in a row without an answer, as far as they count."""
        return max(self.failures, self.doubts)

    def answered(self, now_ms: int, in_flight: int = 0) -> "Signs":
        """Any HTTP answer at all, with so many own requests in hand."""
        return replace(
            self,
            lost=False,
            failures=0,
            doubts=0,
            silent_ms=None,
            answered_most=max(self.answered_most, in_flight),
            seen_ms=now_ms if self.seen_ms is None else self.seen_ms,
        )

    def works(self) -> "Signs":
        """Another sign of life than an answer to a question: a byte of an answer of its own."""
        return replace(self, failures=0, doubts=0, silent_ms=None)

    def served(self) -> "Signs":
        """A request was answered well. If it did not answer questions meanwhile, it is deaf while it works."""
        if not self.doubts:
            return self
        least = self.doubted if self.deaf_least is None else min(self.deaf_least, self.doubted)
        return replace(self.works(), deaf_least=least)

    def missed(self, now_ms: int, in_flight: int = 0) -> "Signs":
        """A question got no answer in time, with so many own requests in hand."""
        if in_flight > self.answered_most:
            if self.deaf_least is not None and in_flight >= self.deaf_least:
                return self
            return replace(self, doubts=min(self.doubts + 1, FAILURES), doubted=in_flight)
        failures = min(self.failures + 1, FAILURES)
        silent_ms = self.silent_ms
        if failures >= FAILURES and silent_ms is None:
            silent_ms = now_ms
        return replace(self, failures=failures, silent_ms=silent_ms)

    def gone(self) -> "Signs":
        """Nobody accepts connections there. All must be seen again, and what it answers under load, too."""
        return replace(
            self,
            failures=FAILURES,
            lost=True,
            loading=False,
            answered_most=0,
            doubts=0,
            deaf_least=None,
            silent_ms=None,
            seen_ms=None,
            listed_ms=None,
            looked_ms=None,
        )

    def listed(self, now_ms: int, in_flight: int = 0) -> "Signs":
        """A good inventory."""
        return replace(self.answered(now_ms, in_flight), loading=False, listed_ms=now_ms)

    def unlisted(self, now_ms: int, *, loading: bool, key_refused: bool) -> "Signs":
        """An inventory or identification that was answered, but not with what it must say."""
        return replace(self.answered(now_ms), loading=loading, key_refused=key_refused, listed_ms=None)

    def looked(self, now_ms: int, in_flight: int = 0) -> "Signs":
        """A good fast poll."""
        return replace(self.answered(now_ms, in_flight), looked_ms=now_ms)

    def refused(self, refusal: EngineRefusal) -> "Signs":
        return replace(self, refusal=refusal)

    def identified(self, now_ms: int) -> "Signs":
        """A good identification: the key, if one is needed, is accepted again."""
        return replace(self.answered(now_ms), key_refused=False)
