"""The decision journal: every decision with its outcome, and every change of trust.

The newest ``limits.JOURNAL_RING`` decisions stay in memory; all go to SQLite through one writer thread, so
the event loop never waits for a disk. A record is encoded when it is put, and only that is kept: one object
instead of some sixty, which would stay for a thousand requests. A full queue drops decisions and counts them;
a failing disk loses rows, counts them, and serving goes on. Records hold no text of a prompt or an answer, and
neither does this.
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

from agent.effects.clock import Clock
from agent.observe.journal_file import AuditRow, JournalFile, Row, audit_rows, bodies, body_of
from agent.observe.log import Log
from agent.observe.metrics import Family, Shape, gauge_family
from router_core import limits
from router_core.placement.record import DecisionRecord

LINGER_S: Final = 0.1
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


Item = Row | AuditLine | Future[None] | None
"""What the writer's queue carries; None ends the thread."""


class Journal:
    """``start`` before the first ``put``; ``aclose`` writes what is queued."""

    def __init__(self, path: Path, clock: Clock, log: Log, *, file: JournalFile | None = None) -> None:
        self._path = path
        self._clock = clock
        self._log = log
        self._file = file or JournalFile(path)
        self._ring: OrderedDict[str, Row] = OrderedDict()
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.dropped = 0
        self.lost = 0
        self.written = 0

    def start(self) -> None:
        self._thread.start()

    def put(self, record: DecisionRecord) -> None:
        """Keep ``record``; a later one of the same id (now with its outcome) replaces it. Never blocks.

        A record without a wall time gets the present one, or keeps that of the record it replaces.
        """
        ring = self._ring
        before = ring.pop(record.id, None)
        if record.wall_ms is None:
            wall_ms = before.at_ms if before is not None else self._clock.wall_ms()
            record = replace(record, wall_ms=wall_ms)
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
            return self._decoded(held.body)
        try:
            body = await asyncio.to_thread(body_of, self._path, decision_id)
        except sqlite3.Error as exc:
            self._log.warning("journal.unreadable", error=exc)
            return None
        return None if body is None else self._decoded(body)

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
            and (record := self._decoded(row.body)) is not None
        )
        held = list(islice(matching, limit))
        if len(held) == limit:
            return held
        try:
            stored = await asyncio.to_thread(
                bodies, self._path, limit, action=action, reason=reason, since_ms=since_ms
            )
        except sqlite3.Error as exc:
            self._log.warning("journal.unreadable", error=exc)
            return held
        known = {record.id for record in held}
        older = [record for body in stored if (record := self._decoded(body)) and record.id not in known]
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
        """Wait until everything put so far is written or counted as lost."""
        done: Future[None] = Future()
        self._queue.put(done)
        await asyncio.wrap_future(done)

    async def aclose(self) -> None:
        """Write what is queued and end the thread."""
        if self._thread.is_alive():
            self._closing.set()
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)

    def collect(self) -> Iterable[Family]:
        for name, text, value in (
            ("journal_dropped_total", "Decisions that found the journal's queue full.", self.dropped),
            ("journal_lost_total", "Journal rows the disk did not take.", self.lost),
            ("journal_written_total", "Journal rows written.", self.written),
        ):
            yield gauge_family(f"pairmesh_{name}", text, (), {(): value}, Shape.COUNTER)

    def _decoded(self, body: bytes) -> DecisionRecord | None:
        try:
            return _DECODER.decode(body)
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
            since_trim += self._write(items)
            for item in items:
                if isinstance(item, Future):
                    item.set_result(None)
            if since_trim >= TRIM_EVERY_ROWS or self._clock.boot_ms() - trimmed_at >= TRIM_EVERY_MS:
                self._guarded(self._trim)
                since_trim, trimmed_at = 0, self._clock.boot_ms()
        self._file.close()

    def _batch(self) -> list[Item]:
        items: list[Item] = [self._queue.get()]
        if isinstance(items[0], Row) and self._queue.qsize() < BATCH:
            self._closing.wait(LINGER_S)
        while len(items) < BATCH:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                break
        return items

    def _write(self, items: list[Item]) -> int:
        rows = {row.id: row for row in items if isinstance(row, Row)}.values()
        audit = [
            AuditRow(at_ms=line.at_ms, event=line.event, body=msgspec.msgpack.encode(line.facts))
            for line in items
            if isinstance(line, AuditLine)
        ]
        count = len(rows) + len(audit)
        if count and self._guarded(lambda: self._file.write(rows, audit)):
            self.written += count
        elif count:
            self.lost += count
        return count

    def _trim(self) -> None:
        self._file.trim(self._clock.wall_ms())

    def _guarded(self, act: Callable[[], None]) -> bool:
        """Run ``act``; False if the disk refuses. A damaged file is set aside and ``act`` tried once more."""
        try:
            try:
                act()
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as exc:
                self._log.error("journal.set_aside", error=exc)
                self._file.set_aside()
                act()
        except (sqlite3.Error, OSError) as exc:
            self._log.warning("journal.not_written", error=exc)
            return False
        return True


def row_of(record: DecisionRecord) -> Row:
    """``record`` as a row of the table; ``node`` is the node part of the chosen row."""
    return Row(
        id=record.id,
        at_ms=record.wall_ms or 0,
        request_id=record.request_id,
        action=record.action.value,
        reason=record.reason.value,
        node=None if record.chosen is None else record.chosen.partition("/")[0],
        model=record.req.model_resolved or None,
        body=_ENCODER.encode(record),
    )
