"""What attempts teach: a finished attempt's windows are read once for speeds, folded into profiles, and dropped.

Own experience with every endpoint is kept, peers' included; only what this host's engines did is published. Profiles
are stored off the loop, at most once a minute, and what was forgotten leaves the disk, too. Refuses to know requests
and texts.
"""

import asyncio
import sqlite3
from pathlib import Path

from msgspec import Struct

from agent.effects.aside import Aside, quietly
from agent.effects.clock import Clock
from agent.effects.sqlite_file import cause_of
from agent.engines.contract import FinishReason, Timings, TimingSource
from agent.engines.timings import read_timings
from agent.observe.log import Log
from agent.relay.frontends.replies import API_SIDE
from agent.relay.ports import AttemptReport
from agent.store.profiles import FILE, ProfileStore
from router_core.errors import RemoteFault
from router_core.ids import Id16
from router_core.placement.candidates.candidate import Row
from router_core.profile.estimate import claim_of
from router_core.profile.outcome import Outcome, ProfileKey, Result
from router_core.profile.profiles import decode_profile, encode_profile
from router_core.record.state import ProfileFacts
from router_core.router.outcome import Result as Ended
from router_core.router.router import Router, blame_of

SAVE_S = 60.0
_NOTHING = Timings(source=TimingSource.COUNTED)


def store_at(state: Path, log: Log, aside: Aside = quietly) -> ProfileStore:
    """The stored profiles below ``state``. ``aside`` hears of a file of a newer version."""

    def damaged(kept_as: Path, cause: str) -> None:
        log.warning("profile.set_aside", file=state / FILE, cause=cause, kept_as=kept_as.name)

    return ProfileStore(state, aside=aside, damaged=damaged)


class Lesson(Struct, frozen=True, gc=False, kw_only=True):
    """One ended attempt, the row it went to, and how many requests were in the engine, this one included."""

    report: AttemptReport
    row: Row
    concurrency: float
    at_ms: int


class Learning:
    """Owns the profiles. ``used`` is when this node last used a model of its own (boot ms), by endpoint and model."""

    def __init__(
        self,
        router: Router,
        store: ProfileStore,
        clock: Clock,
        log: Log,
    ) -> None:
        self.profiles = router.profiles
        self._router = router
        self.used: dict[tuple[str, str], int] = {}
        self._store = store
        self._clock = clock
        self._log = log
        self._changed: dict[ProfileKey, None] = {}
        self._stored: set[str] = set()
        self.fault: str | None = None
        """Why what was learned is not on disk, for people; None if it is."""

    def restore(self) -> None:
        """Take over what earlier process lives learned; runs before the loop does."""
        now = self._clock.boot_ms()
        try:
            loaded = self._store.load()
        except (OSError, sqlite3.Error) as error:
            self._failed("profile.not_loaded", error)
            return
        self._stored = set(loaded)
        for stored in loaded.values():
            try:
                key, profile = decode_profile(stored, now)
            except RemoteFault:
                self._log.warning("profile.unreadable")
                continue
            self.profiles.restore(key, profile)

    def lesson_of(self, report: AttemptReport) -> Lesson | None:
        """One attempt with what else it teaches from at the moment of its end; None if its row is gone."""
        routed = report.routed
        row = self._router.fleet.row(routed.choice.endpoint, routed.choice.model)
        if row is None:
            return None
        now = self._clock.boot_ms()
        if row.is_self and report.marks is not None:
            self.used[row.endpoint, row.model] = now
        return Lesson(report=report, row=row, concurrency=self._router.concurrency(row), at_ms=now)

    def learn(self, lesson: Lesson) -> Timings | None:
        """Fold one attempt in; what it told of tokens and times."""
        report, row = lesson.report, lesson.row
        timings = _timings_of(report)
        outcome = _outcome_of(report, row, timings, lesson.concurrency, lesson.at_ms)
        self.profiles.learn(outcome)
        self._changed[row.profile_key] = None
        if self._log.is_debugging:
            self._log.debug(
                "profile.learned",
                endpoint=report.routed.choice.label or row.label,
                result=outcome.result.value,
            )
        return timings

    def loaded(self, endpoint: str, model: str, seconds: float) -> None:
        """An engine of this node was told to load a model, and did."""
        fleet = self._router.fleet
        row = fleet.row(f"{fleet.node_id}/{endpoint}", model)
        if row is None:
            return
        now = self._clock.boot_ms()
        self.profiles.learn(
            Outcome(key=row.profile_key, at_ms=now, result=Result.OK, load_ms=1000.0 * seconds)
        )
        self._changed[row.profile_key] = None

    def claims(self, me: Id16) -> list[tuple[str, str, ProfileFacts]]:
        """What to publish of own engines: (endpoint, model, facts without positions)."""
        now = self._clock.boot_ms()
        part = self._router.fleet.parts.get(me)
        rows = part.rows if part is not None else ()
        for gone in self.used.keys() - {(row.endpoint, row.model) for row in rows}:
            del self.used[gone]
        claims = []
        for row in rows:
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
        """Store what changed since the last time, delete what was forgotten; a disk that refuses is told and tried
        again."""
        changed, self._changed = self._changed, {}
        encoded = {
            _file_key(key): encode_profile(key, profile)
            for key in changed
            if (profile := self.profiles.find(key)) is not None
        }
        stored = self._stored | encoded.keys()
        gone: set[str] = set()
        if len(stored) > len(self.profiles):
            gone = stored - {_file_key(key) for key, _ in self.profiles.items()}
        if not encoded and not gone:
            return
        try:
            await asyncio.to_thread(self._store.save, encoded, gone)
            self._stored = stored - gone
            self.fault = None
        except (OSError, sqlite3.Error) as error:
            self._changed = changed | self._changed
            self._failed("profile.not_stored", error)

    def _failed(self, event: str, error: BaseException) -> None:
        cause = cause_of(error)
        self._log.warning(event, file=FILE, cause=cause)
        self.fault = f"{FILE} cannot be read or written ({cause}): what is learned is lost at the next start"


def _timings_of(report: AttemptReport) -> Timings | None:
    marks = report.marks
    if marks is None or report.outcome.result is not Ended.DONE:
        return None
    return read_timings(report.head, report.tail, marks)


def _outcome_of(
    report: AttemptReport, row: Row, timings: Timings | None, concurrency: float, now: int
) -> Outcome:
    marks, routed = report.marks, report.routed
    streamed = marks is not None and marks.content_events is not None
    first_ms = marks.first_content_ms or marks.first_byte_ms if marks is not None else None
    until_first_ms = first_ms - marks.sent_ms if marks is not None and first_ms is not None else None
    cold = not routed.choice.resident
    told = timings if timings is not None else _NOTHING
    prompt_ms = told.prompt_ms
    if cold and streamed and told.queue_ms is None:
        prompt_ms = None
    load_ms = told.load_ms if cold else None
    if load_ms is None and cold and timings is not None and until_first_ms is not None:
        load_ms = max(0.0, until_first_ms - _warm_ms(report, row, told, prompt_ms, streamed=streamed))
    return Outcome(
        key=row.profile_key,
        at_ms=now,
        result=_result_of(report, told.finish),
        request_class=routed.request_class if report.side == API_SIDE else None,
        concurrency=concurrency,
        text_bytes=report.text_bytes,
        prompt_tokens=told.prompt_tokens,
        cached_tokens=told.cached_tokens,
        prompt_ms=prompt_ms,
        gen_tokens=told.gen_tokens,
        gen_ms=told.gen_ms,
        total_ms=marks.last_byte_ms - marks.sent_ms if marks is not None and not cold else None,
        ttft_ms=until_first_ms if streamed and not cold and timings is not None else None,
        wait_ms=1000.0 * routed.choice.est.wait,
        net_ms=1000.0 * routed.choice.est.net,
        load_ms=load_ms,
    )


def _warm_ms(
    report: AttemptReport, row: Row, told: Timings, prompt_ms: float | None, *, streamed: bool
) -> float:
    """What the time to the first byte of a cold answer would have been with the model loaded: as far as the engine
    told it, else by what is known of the row."""
    choice = report.routed.choice
    if prompt_ms is None:
        tokens = told.prompt_tokens if told.prompt_tokens is not None else choice.prompt_tokens
        prompt_ms = 1000.0 * tokens * row.prefill_s_per_token
    warm_ms = 1000.0 * choice.est.wait + 1000.0 * choice.est.net + prompt_ms
    if streamed:
        return warm_ms
    if told.gen_ms is not None:
        return warm_ms + told.gen_ms
    return warm_ms + 1000.0 * row.token_s * (
        told.gen_tokens if told.gen_tokens is not None else choice.output_tokens
    )


def _result_of(report: AttemptReport, finish: FinishReason | None) -> Result:
    blame = blame_of(report.outcome)
    return Result.OTHER if blame is Result.OK and finish is FinishReason.ERROR else blame


def _file_key(key: ProfileKey) -> str:
    parts = (key.node.hex(), key.endpoint, key.model, key.quant, key.ctx, key.parallel, key.offload_pct)
    return "/".join("-" if part is None else str(part) for part in parts)
