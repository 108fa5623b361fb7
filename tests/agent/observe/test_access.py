"""Access lines: one per request, in batches, whole or counted as lost."""

import asyncio
import json

from msgspec import Struct

from agent.observe.access import BATCH_S, AccessLog
from router_core import limits


class Line(Struct, frozen=True, kw_only=True):
    route: str = "/v1/models"
    status: int = 200
    request_id: str | None = None


class Wall:
    def boot_ms(self) -> int:
        return 0

    def boot_us(self) -> int:
        return 0

    def wall_ms(self) -> int:
        return 1_700_000_000_123


class Sink:
    def __init__(self) -> None:
        self.writes: list[str] = []
        self.written = asyncio.Event()

    def __call__(self, text: str) -> None:
        self.writes.append(text)
        self.written.set()


async def test_lines_of_one_moment_are_one_write_of_one_json_object_each() -> None:
    sink = Sink()
    log = AccessLog(sink, Wall())
    for number in range(3):
        log.put(Line(status=200 + number))
    assert sink.writes == []
    await asyncio.wait_for(sink.written.wait(), 50 * BATCH_S)
    assert len(sink.writes) == 1
    lines = [json.loads(line) for line in sink.writes[0].splitlines()]
    assert [line["status"] for line in lines] == [200, 201, 202]
    assert lines[0] == {
        "at": "2023-11-14T22:13:20.123Z",
        "level": "info",
        "event": "request",
        "route": "/v1/models",
        "status": 200,
        "request_id": None,
    }


async def test_control_characters_never_start_a_line_of_their_own() -> None:
    sink = Sink()
    log = AccessLog(sink, Wall())
    log.put(Line(request_id='a\n{"level":"error"}'))
    log.flush()
    assert len(sink.writes[0].splitlines()) == 1
    assert json.loads(sink.writes[0])["request_id"].startswith("a\n")


async def test_a_full_queue_drops_and_counts() -> None:
    sink = Sink()
    log = AccessLog(sink, Wall())
    for _ in range(limits.JOURNAL_QUEUE + 5):
        log.put(Line())
    log.flush()
    assert sink.writes[0].count("\n") == limits.JOURNAL_QUEUE
    assert [value for family in log.collect() for *_, value in family.series] == [5]


async def test_a_sink_that_fails_loses_lines_and_nothing_else() -> None:
    def broken(_: str) -> None:
        raise OSError(28, "no space left")

    log = AccessLog(broken, Wall())
    log.put(Line())
    log.flush()
    assert [value for family in log.collect() for *_, value in family.series] == [1]


async def test_people_get_words() -> None:
    sink = Sink()
    log = AccessLog(sink, Wall(), human=True)
    log.put(Line(status=404))
    log.flush()
    assert "request" in sink.writes[0]
    assert "status=404" in sink.writes[0]
