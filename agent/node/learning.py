"""What attempts teach: a finished attempt's windows are read once for speeds, folded into profiles, and dropped.

Own experience with every endpoint is kept, peers' included; only what this host's engines did is published. Profiles
are stored off the loop, at most once a minute. Refuses to know requests and texts.
"""

import asyncio
from collections.abc import Callable

from agent.effects.clock import Clock
from agent.engines.contract import Marks, Timings
from agent.engines.timings import read_timings
from agent.observe.log import Log
from agent.relay.ports import AttemptReport
from agent.store.profiles import ProfileStore
from router_core.errors import RemoteFault
from router_core.exchange.events import Result as Ended
from router_core.exchange.failure import FailureClass
from router_core.ids import Id16
from router_core.placement.fleet import Fleet
from router_core.placement.rows import Row
from router_core.profile.estimate import claim_of
from router_core.profile.outcome import Outcome, ProfileKey, Result
from router_core.profile.profiles import Profiles, decode_profile, encode_profile
from router_core.record.state import ProfileFacts

SAVE_S = 60.0
_CAPACITY = frozenset({FailureClass.BUSY, FailureClass.LOADING, FailureClass.ABSENT, FailureClass.TOO_LONG})


class Learning:
    """Owns the profiles. ``used`` is when this node last used a model of its own (boot ms), by endpoint and model."""

    def __init__(
        self, profiles: Profiles, store: ProfileStore, fleet: Callable[[], Fleet], clock: Clock, log: Log
    ) -> None:
        self.profiles = profiles
        self.used: dict[tuple[str, str], int] = {}
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._log = log
        self._changed: dict[ProfileKey, None] = {}

    def restore(self) -> None:
        """Take over what earlier process lives learned; runs before the loop does."""
        now = self._clock.boot_ms()
        for stored in self._store.load().values():
            try:
                key, profile = decode_profile(stored, now)
            except RemoteFault:
                self._log.warning("profile.unreadable")
                continue
            self.profiles.restore(key, profile)

    def learn(self, report: AttemptReport) -> Timings | None:
        """Fold one attempt in; what it told of tokens and times."""
        routed = report.routed
        row = self._fleet().row(routed.at, routed.served)
        if row is None:
            return None
        now = self._clock.boot_ms()
        if row.is_self:
            self.used[row.endpoint, row.model] = now
        timings = _timings_of(report)
        outcome = _outcome_of(report, row, timings, self._concurrency(row), now)
        self.profiles.learn(outcome)
        self._changed[row.profile_key] = None
        self._log.debug("profile.learned", endpoint=routed.label or row.label, result=outcome.result.value)
        return timings

    def claims(self, me: Id16) -> list[tuple[str, str, ProfileFacts]]:
        """What to publish of own engines: (endpoint, model, facts without positions)."""
        now = self._clock.boot_ms()
        claims = []
        for row in self._fleet().rows:
            if row.node != me:
                continue
            profile = self.profiles.find(row.profile_key)
            if profile is not None:
                key = row.profile_key
                claims.append((row.endpoint, row.model, claim_of(profile, 0, 0, key.ctx, key.parallel, now)))
        return claims

    async def run(self) -> None:
        """Store what changed once a minute, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Store what changed since the last time; a disk that refuses is told and tried again."""
        changed, self._changed = self._changed, {}
        encoded = {
            _file_key(key): encode_profile(key, profile)
            for key in changed
            if (profile := self.profiles.find(key)) is not None
        }
        if not encoded:
            return
        try:
            await asyncio.to_thread(self._store.save, encoded)
        except OSError as error:
            self._changed = changed | self._changed
            self._log.warning("profile.not_stored", error=type(error).__name__)

    def _concurrency(self, row: Row) -> float:
        ledger = self._fleet().live.ledger
        if row.is_self:
            return float(max(1, ledger.local.in_flight(row.endpoint) + row.foreign))
        owed = ledger.owed.get(row.key)
        return float(max(1, row.in_flight + (owed.requests if owed is not None else 0)))


def _timings_of(report: AttemptReport) -> Timings | None:
    marks = report.marks
    if marks is None or report.outcome.result is not Ended.DONE:
        return None
    return read_timings(
        report.head,
        report.tail,
        Marks(
            sent_ms=marks.sent_ms,
            head_ms=marks.head_ms,
            last_byte_ms=marks.last_byte_ms,
            first_byte_ms=marks.first_byte_ms,
            first_content_ms=marks.first_content_ms,
            content_events=marks.content_events,
        ),
    )


def _outcome_of(
    report: AttemptReport, row: Row, timings: Timings | None, concurrency: float, now: int
) -> Outcome:
    marks, routed = report.marks, report.routed
    streamed = marks is not None and marks.content_events is not None
    first_ms = marks.first_content_ms or marks.first_byte_ms if marks is not None else None
    until_first_ms = first_ms - marks.sent_ms if marks is not None and first_ms is not None else None
    load_ms = timings.load_ms if timings is not None and not routed.resident else None
    if load_ms is None and not routed.resident and until_first_ms is not None and timings is not None:
        warm_ms = (routed.ttft_ms if streamed else routed.ect_ms) - routed.load_ms
        load_ms = max(0.0, until_first_ms - max(0.0, warm_ms))
    return Outcome(
        key=row.profile_key,
        at_ms=now,
        result=_result_of(report),
        request_class=routed.request_class,
        concurrency=concurrency,
        text_bytes=report.text_bytes,
        prompt_tokens=timings.prompt_tokens if timings is not None else None,
        cached_tokens=timings.cached_tokens if timings is not None else None,
        prompt_ms=timings.prompt_ms if timings is not None else None,
        gen_tokens=timings.gen_tokens if timings is not None else None,
        gen_ms=timings.gen_ms if timings is not None else None,
        wait_ms=routed.queue_ms,
        net_ms=routed.net_ms,
        ttft_ms=until_first_ms if streamed and load_ms is None and timings is not None else None,
        load_ms=load_ms,
    )


def _result_of(report: AttemptReport) -> Result:
    outcome = report.outcome
    if outcome.result is Ended.DONE:
        return Result.OK
    if outcome.result is Ended.CANCELLED:
        return Result.CANCELLED
    return Result.FAULT if outcome.fault and outcome.failure not in _CAPACITY else Result.OTHER


def _file_key(key: ProfileKey) -> str:
    parts = (key.node.hex(), key.endpoint, key.model, key.quant, key.ctx, key.parallel, key.offload_pct)
    return "/".join("-" if part is None else str(part) for part in parts)
