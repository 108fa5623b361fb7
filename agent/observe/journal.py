"""The decision journal: every decision with its outcome, and every change of trust.

The newest ``limits.JOURNAL_RING`` decisions stay in memory; all go to SQLite through one writer thread, so
the event loop never waits for a disk. A record is encoded when it is put, and only that is kept: one object
instead of some sixty, which would stay for a thousand requests. A full queue drops decisions and counts them. What
the disk does not take, be it full or the file locked, waits for it up to the bound of the queue, is counted beyond that,
and serving goes on. Records hold no text of a prompt or an answer, and neither does this.
"""

import asyncio
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agent.effects.aside import Aside, quietly
from agent.effects.clock import Clock
from agent.effects.sqlite_file import cause_of
from agent.observe.journal_file import AuditRow, JournalFile, JournalRow, audit_rows, bodies, body_of
from agent.observe.log import Log
from agent.observe.metrics import Family, Shape, gauge_family
from router_core import limits
from router_core.placement.record import DecisionRecord

LINGER_S: Final = 0.1
RETRY_S: Final = 1.0
JOIN_S: Final = 1.2
BATCH: Final = 1_024
TRIM_EVERY_ROWS: Final = 5_000
TRIM_EVERY_MS: Final = 600_000
AUDIT_RESERVE: Final = 256
_DECODER: Final = msgspec.msgpack.Decoder(DecisionRecord)
_ENCODER: Final = msgspec.msgpack.Encoder()

Fact = str | int | bool | None


class AuditLine(Struct, frozen=True, kw_only=True):
    """A change of trust or of the operator's making; ``at_ms`` is wall time, for display only."""

    at_ms: int
    event: str
    facts: dict[str, Fact]


class Flush(Struct, frozen=True):
    """Everything before it is to be tried now."""

    done: Future[None]


Item = JournalRow | AuditLine | Flush | None
"""What the writer's queue carries; None ends the thread."""


class Journal:
    """``start`` before the first ``put``; ``aclose`` writes what is queued. ``aside`` hears of a file of a newer version."""

    def __init__(
        self,
        path: Path,
        clock: Clock,
        log: Log,
        *,
        file: JournalFile | None = None,
        aside: Aside = quietly,
        retry_s: float = RETRY_S,
    ) -> None:
        self._path = path
        self._clock = clock
        self._log = log
        self._file = file or JournalFile(path, aside=aside, damaged=self._damaged)
        self._retry_s = retry_s
        self._rows: dict[str, JournalRow] = {}
        self._audit: list[AuditRow] = []
        self._cause: str | None = None
        self._ring: OrderedDict[str, JournalRow] = OrderedDict()
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.dropped = 0
        self.lost = 0
        self.written = 0

    @property
    def fault(self) -> str | None:
        """Why nothing is written at present, for people; None if it is."""
        if self._cause is None:
            return None
        waiting = len(self._rows) + len(self._audit)
        return f"{self._path} cannot be written ({self._cause}); rows that wait: {waiting}, lost: {self.lost}"

    def start(self) -> None:
        self._thread.start()

    def put(self, record: DecisionRecord) -> None:
        """Keep ``record``; a later one of the same id (now with its outcome) replaces it. Never blocks.

        A record without a wall time gets the present one, or keeps that of the record it replaces.
        """
        ring = self._ring
        before = ring.pop(record.id, None)
        if record.at_ms is None:
            at_ms = before.at_ms if before is not None else self._clock.wall_ms()
            record = replace(record, at_ms=at_ms)
        ring[record.id] = row = row_of(record)
        if len(ring) > limits.JOURNAL_RING:
            ring.popitem(last=False)
        if self._queue.qsize() < limits.JOURNAL_QUEUE:
            self._queue.put(row)
        else:
            self.dropped += 1

    def audit(self, event: str, **facts: Fact) -> None:
        """Keep one line about a change of trust; it is also logged."""
        self._log.info(event, **facts)
        if self._queue.qsize() < limits.JOURNAL_QUEUE + AUDIT_RESERVE:
            self._queue.put(AuditLine(at_ms=self._clock.wall_ms(), event=event, facts=facts))
        else:
            self.dropped += 1

    async def get(self, decision_id: str) -> DecisionRecord | None:
        """One decision by its id, or None."""
        if (held := self._ring.get(decision_id)) is not None:
            return self._decoded(held.at_ms, held.body)
        try:
            found = await asyncio.to_thread(body_of, self._path, decision_id)
        except sqlite3.Error as exc:
            self._log.warning("journal.unreadable", file=self._path, cause=cause_of(exc))
            return None
        return None if found is None else self._decoded(*found)

    async def recent(
        self, limit: int, *, action: str | None = None, reason: str | None = None, since_ms: int | None = None
    ) -> list[DecisionRecord]:
        """The newest decisions first; ``since_ms`` is wall time. What cannot be read is left out."""
        limit = max(0, min(limit, limits.JOURNAL_RING))
        matching = (
            record
            for row in reversed(self._ring.values())
            if (action is None or row.action == action)
            and (reason is None or row.reason == reason)
            and (since_ms is None or row.at_ms >= since_ms)
            and (record := self._decoded(row.at_ms, row.body)) is not None
        )
        held = list(islice(matching, limit))
        if len(held) == limit:
            return held
        try:
            stored = await asyncio.to_thread(
                bodies, self._path, limit, action=action, reason=reason, since_ms=since_ms
            )
        except sqlite3.Error as exc:
            self._log.warning("journal.unreadable", file=self._path, cause=cause_of(exc))
            return held
        known = {record.id for record in held}
        older = [
            record
            for at_ms, body in stored
            if (record := self._decoded(at_ms, body)) and record.id not in known
        ]
        return (held + older)[:limit]

    async def audits(self, limit: int) -> list[AuditLine]:
        """Stored audit lines, newest first."""
        rows = await asyncio.to_thread(audit_rows, self._path, limit)
        return [
            AuditLine(
                at_ms=r.at_ms, event=r.event, facts=msgspec.msgpack.decode(r.body, type=dict[str, Fact])
            )
            for r in rows
        ]

    async def settled(self) -> None:
        """Wait until the disk was offered everything put so far."""
        done: Future[None] = Future()
        self._queue.put(Flush(done))
        await asyncio.wrap_future(done)

    async def aclose(self) -> None:
        """Write what is queued and end the thread, unless the disk keeps it for too long."""
        if self._thread.is_alive():
            self._closing.set()
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def collect(self) -> Iterable[Family]:
        for name, text, value in (
            ("journal_dropped_total", "Decisions that found the journal's queue full.", self.dropped),
            ("journal_lost_total", "Failed journal writes.", self.lost),
            ("journal_written_total", "Journal rows written.", self.written),
        ):
            yield gauge_family(f"pairmesh_{name}", text, (), {(): value}, Shape.COUNTER)

    def _decoded(self, at_ms: int, body: bytes) -> DecisionRecord | None:
        """A stored record; those of before had another clock's time in its place."""
        try:
            record = _DECODER.decode(body)
            return record if record.at_ms == at_ms else replace(record, at_ms=at_ms)
        except msgspec.DecodeError as exc:
            self._log.warning("journal.record_unreadable", error=exc)
            return None

    # --- the writer thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._file.open)
        self._guarded(self._trim)
        since_trim, trimmed_at = 0, self._clock.boot_ms()
        items: list[Item] = []
        while None not in items:
            items = self._batch()
            self._keep(items)
            since_trim += self._write()
            for item in items:
                if isinstance(item, Flush):
                    item.done.set_result(None)
            if since_trim >= TRIM_EVERY_ROWS or self._clock.boot_ms() - trimmed_at >= TRIM_EVERY_MS:
                self._guarded(self._trim)
                since_trim, trimmed_at = 0, self._clock.boot_ms()
        self.lost += len(self._rows) + len(self._audit)
        self._file.close()

    def _batch(self) -> list[Item]:
        """What came; nothing if the disk is to be tried again."""
        try:
            items: list[Item] = [self._queue.get(timeout=None if self._cause is None else self._retry_s)]
        except Empty:
            return []
        if isinstance(items[0], JournalRow) and self._queue.qsize() < BATCH:
            self._closing.wait(LINGER_S if self._cause is None else self._retry_s)
        while len(items) < BATCH:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                break
        return items

    def _keep(self, items: list[Item]) -> None:
        """Take ``items`` until the disk has them, as far as there is room."""
        for item in items:
            is_new = isinstance(item, AuditLine) or (
                isinstance(item, JournalRow) and item.id not in self._rows
            )
            if is_new and len(self._rows) + len(self._audit) >= limits.JOURNAL_QUEUE:
                self.lost += 1
            elif isinstance(item, JournalRow):
                self._rows[item.id] = item
            elif isinstance(item, AuditLine):
                body = msgspec.msgpack.encode(item.facts)
                self._audit.append(AuditRow(at_ms=item.at_ms, event=item.event, body=body))

    def _write(self) -> int:
        """Write what is kept; how much that was."""
        count = len(self._rows) + len(self._audit)
        if not count or not self._guarded(lambda: self._file.write(self._rows.values(), self._audit)):
            return 0
        self._rows, self._audit = {}, []
        self.written += count
        return count

    def _trim(self) -> None:
        self._file.trim(self._clock.wall_ms())

    def _guarded(self, act: Callable[[], None]) -> bool:
        """Run ``act``; False if the disk refuses, which is told when it begins, and when it ends."""
        try:
            act()
        except (sqlite3.Error, OSError) as exc:
            if self._cause is None:
                self._log.warning("journal.not_written", file=self._path, cause=cause_of(exc))
            self._cause = cause_of(exc)
            return False
        if self._cause is not None:
            self._cause = None
            self._log.info("journal.written_again", file=self._path)
        return True

    def _damaged(self, kept_as: Path, cause: str) -> None:
        self._log.error("journal.set_aside", file=self._path, cause=cause, kept_as=kept_as.name)


def row_of(record: DecisionRecord) -> JournalRow:
    """``record`` as a row of the table; ``node`` is the node part of the chosen row."""
    return JournalRow(
        id=record.id,
        at_ms=record.at_ms or 0,
        request_id=record.request_id,
        action=record.action.value,
        reason=record.reason.value,
        node=None if record.chosen is None else record.chosen.partition("/")[0],
        model=record.req.model_resolved or None,
        body=_ENCODER.encode(record),
    )
