"""The health of one endpoint as a pure fold over what its polls and the relay report.

It never touches counts of requests in flight and never causes a token to be generated.
"""

from msgspec import Struct
from msgspec.structs import replace

from agent.engines.contract import Health, Refusal

FAILURES = 3
"""Polls in a row without an answer after which an engine counts as gone."""
START_MS = 120_000
"""An engine first seen this short a time ago may still be starting."""
ABSENCE_PERIODS = 3


class Signs(Struct, frozen=True, gc=False, kw_only=True):
    """What is known of an endpoint's health. Times are boot-clock ms.

    ``seen_ms``: first answer of any kind since it was last unreachable. ``listed_ms``, ``looked_ms``: last
    good inventory and last good fast poll; None after a bad inventory or a lost connection.
    """

    refusal: Refusal | None = None
    key_refused: bool = False
    loading: bool = False
    lost: bool = False
    failures: int = 0
    seen_ms: int | None = None
    listed_ms: int | None = None
    looked_ms: int | None = None

    def judge(self, now_ms: int, period_ms: int) -> Health:
        """The health at ``now_ms``; ``period_ms`` is the time between two fast polls."""
        if self.refusal is not None:
            return Health.REFUSED
        if self.key_refused:
            return Health.UNAUTHORISED
        if self.lost or self.failures >= FAILURES:
            return Health.UNREACHABLE
        if self.loading:
            return Health.STARTING
        if self.listed_ms is None:
            fresh = self.seen_ms is not None and now_ms - self.seen_ms < START_MS
            return Health.STARTING if fresh else Health.UNREACHABLE
        answering = self.looked_ms is not None and now_ms - self.looked_ms <= ABSENCE_PERIODS * period_ms
        return Health.READY if answering else Health.DEGRADED

    def answered(self, now_ms: int) -> "Signs":
        """Any HTTP answer at all."""
        return replace(self, lost=False, failures=0, seen_ms=now_ms if self.seen_ms is None else self.seen_ms)

    def silent(self, *, connect: bool) -> "Signs":
        """A poll got no answer; with ``connect``, not even a connection."""
        failures = min(self.failures + 1, FAILURES)
        lost = self.lost or connect or failures >= FAILURES
        if not lost:
            return replace(self, failures=failures)
        return replace(
            self,
            failures=failures,
            lost=True,
            loading=False,
            seen_ms=None,
            listed_ms=None,
            looked_ms=None,
        )

    def listed(self, now_ms: int) -> "Signs":
        """A good inventory."""
        return replace(self.answered(now_ms), loading=False, listed_ms=now_ms)

    def unlisted(self, now_ms: int, *, loading: bool, key_refused: bool) -> "Signs":
        """An inventory or identification that was answered, but not with what it must say."""
        return replace(self.answered(now_ms), loading=loading, key_refused=key_refused, listed_ms=None)

    def looked(self, now_ms: int) -> "Signs":
        """A good fast poll."""
        return replace(self.answered(now_ms), looked_ms=now_ms)

    def refused(self, refusal: Refusal) -> "Signs":
        return replace(self, refusal=refusal)

    def unauthorised(self) -> "Signs":
        """A request or a poll with our own key was refused."""
        return replace(self, key_refused=True)

    def identified(self, now_ms: int) -> "Signs":
        """A good identification: the key, if one is needed, is accepted again."""
        return replace(self.answered(now_ms), key_refused=False)
