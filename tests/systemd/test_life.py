"""A daemon's life as its supervisor sees it: real processes, a real notification socket, real signals."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from router_core import limits
from tests.support.builds import BLOCKED_S, MESSAGE_VARIABLE, PROC_VARIABLE, STALE_MS, entry
from tests.support.cluster import Node, wait_for
from tests.support.scripted_engine import STREAM_HEAD, ScriptedEngine, Wire, event, whole
from tests.support.supervised import Supervised
from tests.support.until import until

PING = "WATCHDOG=1"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(name="alone", ip="127.0.0.2", base=tmp_path / "n")
    made.write_settings([])
    return made


def connects(node: Node, port: str) -> None:
    with socket.create_connection((node.ip, node.ports[port]), timeout=5):
        pass


async def test_ready_is_said_once_every_port_is_bound_and_the_roster_is_loaded(node: Node) -> None:
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        for port in ("api", "mesh", "ingress", "admin"):
            await asyncio.to_thread(connects, node, port)
        assert (await node.get("/v1/status"))["own"]["name"] == "alone"
        assert len(daemon.said("READY=1")) == 1
        first = next(heard.text for heard in daemon.heard if "READY=1" in heard.text)
        assert first == "READY=1\nSTATUS=serving as alone"


async def test_doctor_finds_nothing_bad_about_a_daemon_that_has_just_started(node: Node) -> None:
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        status, said, _ = await node.cli("doctor", "--json")
    findings = json.loads(said)
    assert [finding["said"] for finding in findings if finding["health"] == "bad"] == []
    assert status == 0
    assert {name for name in node.ports if f"{name} {node.ip}" in said} == set(node.ports)


async def test_a_node_that_cannot_bind_is_never_ready(node: Node) -> None:
    with socket.create_server((node.ip, node.ports["ingress"])):
        async with Supervised(node=node) as daemon:
            assert await daemon.status() == os.EX_CONFIG
        assert daemon.said("READY=1") == []


async def test_pings_come_at_a_third_of_the_watchdogs_time(node: Node) -> None:
    async with Supervised(node=node, watchdog_ms=600) as daemon:
        await daemon.says("READY=1")
        pings = await daemon.says(PING, 8)
        gaps = sorted(later - sooner for sooner, later in pairwise(pings))
        assert 0.15 < gaps[len(gaps) // 2] < 0.6, gaps


async def test_a_blocked_loop_says_nothing_and_an_unblocked_one_goes_on(node: Node) -> None:
    node.entry = entry("blocking")
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        await daemon.pings_again()
        daemon.process.send_signal(signal.SIGUSR1)
        asked = asyncio.get_running_loop().time()
        await daemon.pings_again()
        after = [ping for ping in daemon.said(PING) if ping > asked]
        gaps = [later - sooner for sooner, later in pairwise([asked, *after])]
        assert max(gaps) > BLOCKED_S * 0.8, gaps


async def test_a_stuck_host_thread_stops_the_pings_until_it_is_free(node: Node, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)
    stuck = proc / "pressure" / "memory"
    os.mkfifo(stuck)
    node.entry, node.more_env = entry("foreign-proc"), {PROC_VARIABLE: str(proc)}
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        await daemon.says(PING, 3)
        (stale_at,) = await daemon.says("STATUS=stale: sampler")
        assert (await node.get("/v1/status"))["own"]["name"] == "alone", "the loop itself goes on"
        await until(lambda: asyncio.get_running_loop().time() > stale_at + 1.0)
        assert not [ping for ping in daemon.said(PING) if ping > stale_at]
        free(stuck)
        await daemon.says("STATUS=serving")
        await daemon.pings_again()


async def test_a_mesh_that_takes_no_step_stops_the_pings(node: Node) -> None:
    node.entry = entry("stalled-mesh")
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        await daemon.says(PING, 3)
        (stale_at,) = await daemon.says("STATUS=stale: mesh")
        await until(lambda: asyncio.get_running_loop().time() > stale_at + 1.0)
        assert not [ping for ping in daemon.said(PING) if ping > stale_at]


async def test_connections_that_nobody_accepts_stop_the_pings(node: Node) -> None:
    node.entry = entry("deaf-ingress")
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        await daemon.pings_again()
        waiting = socket.create_connection((node.ip, node.ports["ingress"]), timeout=5)
        with waiting:
            (stale_at,) = await daemon.says("STATUS=stale: listeners")
            await until(lambda: asyncio.get_running_loop().time() > stale_at + 1.0)
            assert not [ping for ping in daemon.said(PING) if ping > stale_at]


@pytest.fixture
def descriptors() -> Iterator[None]:
    """As many as this user may have: a crowd takes more than a login shell allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
async def test_more_clients_than_are_let_in_do_not_look_like_a_stuck_listener(node: Node) -> None:
    node.entry = entry("hasty")
    async with Supervised(node=node) as daemon, contextlib.AsyncExitStack() as crowd:
        await daemon.says("READY=1")
        for _ in range(limits.API_CONNECTIONS + 40):
            _, writer = await asyncio.open_connection(node.ip, node.ports["api"])
            crowd.callback(writer.close)
            writer.write(b"GET / HTTP/1.1\r\n")
        full_at = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > full_at + 2 * STALE_MS / 1_000)
        assert not [heard.text for heard in daemon.heard if "listeners" in heard.text]
        await daemon.pings_again()
        await crowd.aclose()
        assert await offers(node, "nothing") is False


async def test_a_reload_does_not_end_the_daemon(node: Node) -> None:
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        for _ in range(3):
            daemon.process.send_signal(signal.SIGHUP)
            await daemon.pings_again()
        assert "reload" in node.log.read_text()
        assert daemon.process.returncode is None


async def test_a_told_stop_is_announced_and_ends_with_0(node: Node) -> None:
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        daemon.process.terminate()
        assert await daemon.status() == 0
        assert daemon.said("STOPPING=1")


async def test_a_running_stream_is_told_the_truth_when_its_time_is_up(node: Node) -> None:
    async def endless(wire: Wire, body: bytes) -> None:
        wire.write(STREAM_HEAD)
        for number in range(1_000_000):
            wire.write(event(f"{number} "))
            await wire.drain()
            await asyncio.sleep(0.05)

    async with ScriptedEngine({"endless": endless}).serving(node.ip) as url:
        write_engine(node, url)
        async with Supervised(node=node) as daemon, aiohttp.ClientSession() as session:
            await daemon.says("READY=1")
            await wait_for(lambda: offers(node, "endless"), 10, "the engine's model is offered")
            body = {"model": "endless", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
            async with session.post(f"{node.api}/v1/chat/completions", json=body) as reply:
                assert reply.status == 200
                lines = [await reply.content.readline()]
                loop = asyncio.get_running_loop()
                told = loop.time()
                daemon.process.terminate()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await read_into(lines, reply)
                streamed_s = loop.time() - told
            assert await daemon.status() == 0
            assert loop.time() - told < 15
            assert daemon.said("STOPPING=1")
            assert streamed_s > 10, "it had its time"
    events = [line for line in lines if line.startswith(b"data: ")]
    assert len(events) > 20
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
    assert b"data: [DONE]\n" not in lines


@pytest.mark.parametrize(
    ("settings", "env", "said"),
    [
        ("nonsense = 1\n", {}, "nonsense"),
        ("", {"PAIRMESH_LOG": "loud"}, "PAIRMESH_LOG is 'loud': one of debug, info, warning, error"),
    ],
)
async def test_what_a_second_start_would_refuse_as_well_is_78(
    node: Node, settings: str, env: dict[str, str], said: str
) -> None:
    toml = node.config / "pairmesh.toml"
    toml.write_text(settings + toml.read_text())
    node.more_env = env
    async with Supervised(node=node) as daemon:
        assert await daemon.status() == os.EX_CONFIG
        assert daemon.heard == []
    assert said in node.log.read_text()


async def test_a_fault_of_our_own_is_1_and_says_where_but_no_text(node: Node) -> None:
    node.entry, node.more_env = entry("broken"), {MESSAGE_VARIABLE: "what somebody asked"}
    async with Supervised(node=node) as daemon:
        assert await daemon.status() == 1
    (line,) = [json.loads(line) for line in node.log.read_text().splitlines()]
    assert (line["event"], line["error"]) == ("crash", "ValueError")
    assert line["where"][-1].startswith("__main__:")
    assert "asked" not in node.log.read_text()


@pytest.mark.parametrize(("level", "told"), [("debug", True), ("info", False)])
async def test_at_debug_every_attempt_is_told(node: Node, level: str, told: bool) -> None:
    async def answer(wire: Wire, body: bytes) -> None:
        wire.write(whole(200, b"{}"))

    node.more_env = {"PAIRMESH_LOG": level}
    async with ScriptedEngine({"known": answer}).serving(node.ip) as url:
        write_engine(node, url)
        async with Supervised(node=node) as daemon, aiohttp.ClientSession() as session:
            await daemon.says("READY=1")
            await wait_for(lambda: offers(node, "known"), 10, "the engine's model is offered")
            url = f"{node.api}/v1/chat/completions"
            async with session.post(url, json={"model": "known", "messages": []}) as reply:
                assert reply.status == 200
            daemon.process.terminate()
            assert await daemon.status() == 0
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    attempts = [line for line in lines if line["event"] == "attempt"]
    assert [(line["level"], line["result"]) for line in attempts] == ([("debug", "done")] if told else [])


async def read_into(lines: list[bytes], reply: aiohttp.ClientResponse) -> None:
    while line := await reply.content.readline():
        lines.append(line)


def write_engine(node: Node, url: str) -> None:
    (node.config / "endpoints" / "engine.toml").write_text(f'engine = "openai"\nurl = "{url}"\n')


async def offers(node: Node, model: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{node.api}/v1/models") as reply:
        return model in {entry["id"] for entry in (await reply.json())["data"]}


def free(fifo: Path) -> None:
    """Put a plain file in its place and let whoever hangs in the old one read its end."""
    aside = fifo.with_name("aside")
    fifo.rename(aside)
    fifo.write_text("some total=0\nfull total=0\n")
    os.close(os.open(aside, os.O_WRONLY | os.O_NONBLOCK))
