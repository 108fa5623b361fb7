"""Under concurrency every reply is explained by the record of its own request: a real relay, real placing, real sockets."""

import asyncio
from pathlib import Path

import pytest

from agent.effects.clock import SystemClock
from agent.node.status.recall import Recalling
from agent.observe.journal import Journal
from agent.observe.log import Log
from router_core.placement.record import DecisionRecord
from tests.agent.node.rig import an_endpoint, key_of
from tests.agent.node.test_observing import Watched
from tests.agent.relay.client import BODY, Heard, ask, post
from tests.agent.relay.rig import running
from tests.support.recorder import Exchange, Recorder, Script

CONCURRENT = 64
CHAT = BODY.replace(b'"m"', b'"tiny"')


class Engines:
    """Engines that drop every eighth request once, and answer only when all are held and the test says so."""

    def __init__(self) -> None:
        self.all_held, self.release = asyncio.Event(), asyncio.Event()
        self.dropped: dict[str, str] = {}
        self.holding: dict[str, str] = {}

    def script(self, name: str) -> Script:
        async def answer(exchange: Exchange) -> None:
            told = exchange.request.value(b"x-request-id") or b""
            request_id, _, again = told.decode().partition("-a")
            if int(request_id.removeprefix("r")) % 8 == 0 and not again:
                self.dropped[request_id] = name
                exchange.reset()
                return
            self.holding[request_id] = name
            if len(self.holding) == CONCURRENT:
                self.all_held.set()
            await self.release.wait()
            await exchange.answer(b'{"ok":true}')

        return answer


@pytest.mark.lesson("decisions swapped between requests")
async def test_64_concurrent_replies_name_their_own_records(tmp_path: Path) -> None:
    watched, engines = Watched(), Engines()
    world = watched.world
    world.own(*(an_endpoint(f"e{number}", slots=CONCURRENT) for number in range(3)))
    journal = Journal(tmp_path / "journal.sqlite", SystemClock(), Log(world.lines.append, world.clock))
    recalling = Recalling(world.placing, journal, watched.observing.settle)

    async def one(port: int, number: int) -> Heard:
        headers = b"x-request-id: r%d\r\nx-pairmesh-prefer: @me/e%d\r\n" % (number, number % 3)
        return await ask(port, post(port, CHAT, headers=headers))

    async with (
        Recorder(engines.script("e0")) as e0,
        Recorder(engines.script("e1")) as e1,
        Recorder(engines.script("e2")) as e2,
        running(
            e0.port, e1.port, e2.port, clock=world.clock, place=world.placing, observer=watched.observing
        ) as relay,
    ):
        asking = [asyncio.ensure_future(one(relay.port, number)) for number in range(CONCURRENT)]
        await asyncio.wait_for(engines.all_held.wait(), 20)
        for decision_id in world.placing.open:
            told = await recalling.get(decision_id)
            assert told is not None
            assert (told.id, told.outcome) == (decision_id, None)
            assert told.chosen == key_of("me", engines.holding[told.request_id])
        assert len(world.placing.open) == CONCURRENT
        engines.release.set()
        replies = await asyncio.wait_for(asyncio.gather(*asking), 20)

    watched.observing.settle()
    kept = {record.id: record for record in world.kept.records}
    assert len(kept) == len(world.kept.records) == CONCURRENT
    assert len(engines.dropped) == CONCURRENT // 8
    for number, reply in enumerate(replies):
        record = kept[reply.headers["x-pairmesh-decision-id"]]
        assert reply.headers["x-request-id"] == record.request_id == f"r{number}"
        assert_is_of(record, reply, engines.holding[f"r{number}"], engines.dropped.get(f"r{number}"))
        assert record.hints[0].ref == f"@me/e{number % 3}"
    assert (len(world.router.ledger), world.placing.open) == (0, {})
    assert not any("relay.failed" in line for line in world.lines)


def assert_is_of(record: DecisionRecord, reply: Heard, served: str, dropped: str | None) -> None:
    """``record`` tells what happened to the request that got ``reply``."""
    assert reply.status == 200
    assert record.chosen == key_of("me", served)
    assert reply.headers["x-pairmesh-node"] == f"@me/{served}"
    tried = [served] if dropped is None else [dropped, served]
    assert [attempt.row for attempt in record.attempts] == [f"@me/{name}" for name in tried]
    assert record.outcome is not None
    assert record.outcome.status == 200
