"""Two daemons whose engines take one request each: the rest waits at the router, and everybody can tell."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
import pytest_asyncio

from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.scripted_engine import ScriptedEngine, Wire, whole

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
BODY = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
ENDPOINT = 'engine = "openai"\nurl = "{}"\nslots = 1\nmax_queue = 0\n[[models]]\nname = "toy"\n'

Told = tuple[int, dict[str, str]]


class Stage:
    """``answer`` lets so many requests go that the engines were asked, or will be."""

    def __init__(self, cluster: Cluster, asked: list[str], may_answer: asyncio.Semaphore) -> None:
        self.cluster = cluster
        self.asked = asked
        self._may_answer = may_answer

    def answer(self, times: int) -> None:
        for _ in range(times):
            self._may_answer.release()

    async def ask(self, session: aiohttp.ClientSession) -> Told:
        url = f"{self.cluster['alpha'].api}/v1/chat/completions"
        async with session.post(url, json=BODY) as reply:
            await reply.read()
            return reply.status, {name.lower(): value for name, value in reply.headers.items()}

    async def figures(self) -> str:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.cluster['alpha'].admin}/metrics") as reply,
        ):
            return await reply.text()

    def depth(self, count: int) -> Callable[[], Awaitable[bool]]:
        async def reached() -> bool:
            return f'pairmesh_queue_depth{{class="interactive"}} {count}\n' in await self.figures()

        return reached


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    base = tmp_path_factory.mktemp("hold")
    asked: list[str] = []
    may_answer = asyncio.Semaphore(0)

    def engine(name: str) -> ScriptedEngine:
        async def answer(wire: Wire, _body: bytes) -> None:
            asked.append(name)
            await may_answer.acquire()
            wire.write(whole(200, b'{"object":"chat.completion","choices":[]}'))

        return ScriptedEngine({"toy": answer})

    nodes = [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
    async with contextlib.AsyncExitStack() as stack:
        for node in nodes:
            url = await stack.enter_async_context(engine(node.name).serving(node.ip))
            (node.config / "endpoints" / "toy.toml").write_text(ENDPOINT.format(url))
            node.write_settings([f"@{o.name}={o.ip}:{o.ports['mesh']}" for o in nodes if o is not node])
        cluster = await stack.enter_async_context(closing(Cluster(base=base, nodes=nodes, engines=[])))
        for node in nodes:
            await node.start()
        await pair(nodes)
        await cluster.full_view()
        yield Stage(cluster, asked, may_answer)


async def test_what_the_fleet_has_no_room_for_waits_and_is_served_without_an_error(stage: Stage) -> None:
    async with aiohttp.ClientSession() as session:
        asked = [asyncio.create_task(stage.ask(session)) for _ in range(6)]
        await wait_for(stage.depth(4), 10, "four requests wait")
        await wait_for(lambda: served_there(stage, 2), 10, "both engines are at work")
        assert sorted(stage.asked) == ["alpha", "beta"]
        stage.answer(6)
        told = await asyncio.gather(*asked)
    assert [status for status, _ in told] == [200] * 6
    waited = [headers for _, headers in told if "server-timing" in headers]
    assert len(waited) == 4
    assert all(headers["server-timing"].startswith("queue;dur=") for headers in waited)
    record = await stage.cluster["alpha"].get(f"/v1/decisions/{waited[0]['x-pairmesh-decision-id']}")
    assert record["outcome"]["held_ms"] > 0
    _, text, _ = await stage.cluster["alpha"].cli("explain", record["id"])
    assert " for room" in text
    assert 'pairmesh_queue_wait_seconds_count{class="interactive"} 4\n' in await stage.figures()
    await wait_for(stage.depth(0), 5, "nobody waits any more")


async def test_a_client_that_leaves_while_it_waits_never_reaches_an_engine(stage: Stage) -> None:
    before = len(stage.asked)
    async with aiohttp.ClientSession() as session:
        served = [asyncio.create_task(stage.ask(session)) for _ in range(2)]
        await wait_for(lambda: served_there(stage, before + 2), 10, "both engines are at work")
        async with aiohttp.ClientSession() as leaving:
            gone = asyncio.create_task(stage.ask(leaving))
            await wait_for(stage.depth(1), 10, "one request waits")
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await wait_for(stage.depth(0), 5, "it waits no more")
        stage.answer(2)
        assert [status for status, _ in await asyncio.gather(*served)] == [200, 200]
    assert len(stage.asked) == before + 2


async def test_a_daemon_that_stops_answers_who_waits_at_once(stage: Stage) -> None:
    alpha, before = stage.cluster["alpha"], len(stage.asked)
    async with aiohttp.ClientSession() as session:
        served = [asyncio.create_task(stage.ask(session)) for _ in range(2)]
        await wait_for(lambda: served_there(stage, before + 2), 10, "both engines are at work")
        held = asyncio.create_task(stage.ask(session))
        await wait_for(stage.depth(1), 10, "one request waits")
        assert alpha.process is not None
        alpha.process.send_signal(signal.SIGTERM)
        status, headers = await asyncio.wait_for(held, 5)
        assert (status, headers["x-pairmesh-reason"]) == (503, "shutting_down")
        stage.answer(2)
        assert [status for status, _ in await asyncio.gather(*served)] == [200, 200]
    assert await asyncio.wait_for(alpha.process.wait(), 15) == 0


async def served_there(stage: Stage, count: int) -> bool:
    return len(stage.asked) >= count
