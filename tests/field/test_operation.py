"""What operators do to a daemon, and hosts do to both: logs nobody reads, full disks, files of other versions, equal names."""

import asyncio
import fcntl
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from hashlib import sha256
from pathlib import Path

import aiohttp
import pytest

from tests.support.cluster import Node, wait_for
from tests.support.field import Endpoint, OpenAiEngine, chat

DEBUG = {"PAIRMESH_LOG": "debug"}


def a_node(base: Path, url: str | None = None, *, name: str = "alpha", settings: str = "") -> Node:
    """A node with its files written, not started."""
    node = Node(name=name, ip="127.0.0.2", base=base / name)
    node.write_settings([], settings)
    if url is not None:
        (node.config / "endpoints" / "engine.toml").write_text(Endpoint(url=url).manifest())
    return node


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Node]:
    """Start it, and stop it as a supervisor does: it must end by itself and clean, unless the test has killed it."""
    await node.start()
    try:
        yield node
    finally:
        assert await node.term() in (0, -signal.SIGKILL)


async def ready(node: Node) -> None:
    async def offers() -> bool:
        return any(engine["models"] for engine in (await node.members())[node.name]["engines"])

    await wait_for(offers, 10, "the engine's models")


async def many(node: Node, count: int, at_once: int = 64) -> list[int]:
    """So many chats; their statuses."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    free = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:

        async def one() -> int:
            async with free, session.post(f"{node.api}/v1/chat/completions", json=body) as reply:
                await reply.read()
                return reply.status

        return list(await asyncio.gather(*(one() for _ in range(count))))


async def metric(node: Node, name: str) -> float:
    """A sample of the exposition by its name with labels."""
    async with aiohttp.ClientSession() as session, session.get(f"{node.admin}/metrics") as reply:
        text = await reply.text()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
    assert found, f"no {name}"
    return float(found.group(1))


# --- nobody reads the log (systemd/systemd#16456) ------------------------------------------------------------


async def test_a_reader_of_the_log_that_stands_still_holds_up_nothing(tmp_path: Path) -> None:
    engine = OpenAiEngine()
    async with engine.serving() as url:
        node = a_node(tmp_path, url)
        os.mkfifo(node.log)
        reader = os.open(node.log, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4_096)
        async with running(node):
            await ready(node)
            statuses = await many(node, 400)
            assert statuses == [200] * 400
            waiting = os.read(reader, 65_536)
            assert waiting, "the daemon did not log to the pipe"
            statuses = await many(node, 100)
            assert statuses == [200] * 100
        os.close(reader)


async def test_lines_that_a_standing_reader_cost_are_counted_and_told(tmp_path: Path) -> None:
    engine = OpenAiEngine()
    async with engine.serving() as url:
        node = a_node(tmp_path, url)
        node.more_env |= DEBUG
        os.mkfifo(node.log)
        reader = os.open(node.log, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4_096)
        async with running(node):
            await ready(node)
            dropped = 'pairmesh_log_lines_dropped_total{why="full"}'
            async with aiohttp.ClientSession() as session:
                while not await metric(node, dropped):
                    for _ in range(400):
                        async with session.get(f"{node.api}/v1/models") as reply:
                            assert reply.status == 200
            _, said, _ = await node.cli("doctor")
            assert "log line" in said
            os.set_blocking(reader, True)
            text = await asyncio.to_thread(_read_until, reader, b'"event":"log.dropped"')
            assert b'"level":"warning"' in text
            statuses = await many(node, 10)
            assert statuses == [200] * 10
        os.close(reader)


def _read_until(fd: int, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        found += os.read(fd, 1 << 20)
    return found


@pytest.mark.parametrize("log", ["dead reader", "full disk"])
async def test_a_log_that_cannot_be_written_holds_up_nothing(tmp_path: Path, log: str) -> None:
    engine = OpenAiEngine()
    async with engine.serving() as url:
        node = a_node(tmp_path, url)
        if log == "full disk":
            node.log.symlink_to("/dev/full")
            reader = None
        else:
            os.mkfifo(node.log)
            reader = os.open(node.log, os.O_RDONLY | os.O_NONBLOCK)
        async with running(node):
            if reader is not None:
                os.close(reader)
            await ready(node)
            assert set(await many(node, 50)) == {200}

            async def counted() -> float:
                return await metric(node, 'pairmesh_log_lines_dropped_total{why="unwritable"}')

            await wait_for(counted, 5, "lost lines are counted")


# --- descriptors ---------------------------------------------------------------------------------------------


async def test_a_shell_that_allows_few_descriptors_is_no_limit(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    node.prefix = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
    async with running(node):
        assert node.process is not None
        soft, hard = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, 8_192)


async def test_a_daemon_without_descriptors_pauses_and_comes_back(tmp_path: Path) -> None:
    """The trial's A6: idle connections beyond the limit ended the whole daemon, by way of the config folder's watcher."""
    engine = OpenAiEngine()
    async with engine.serving() as url:
        node = a_node(tmp_path, url)
        node.prefix = ("sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
        async with running(node):
            await ready(node)
            async with aiohttp.ClientSession() as kept:
                async with kept.get(f"{node.api}/health") as reply:
                    assert reply.status == 200
                idle: list[socket.socket] = []
                try:
                    for _ in range(200):
                        sock = socket.socket()
                        sock.settimeout(2.0)
                        sock.connect((node.ip, node.ports["api"]))
                        idle.append(sock)
                    await wait_for(lambda: _said(node, "accept.paused"), 5, "accepting pauses")
                    await wait_for(lambda: _said(node, "part.failed"), 5, "the config folder is not seen")
                    async with kept.get(f"{node.api}/health") as reply:
                        assert reply.status == 200
                finally:
                    for sock in idle:
                        sock.close()

            async def served() -> bool:
                return (await chat(node, within_s=5)).status == 200

            await wait_for(served, 10, "served again")
            assert len(node.log.read_text().splitlines()) < 120


async def _said(node: Node, event: str) -> bool:
    return f'"event":"{event}"' in node.log.read_text()


# --- names (gpustack/gpustack#2046) --------------------------------------------------------------------------


async def paired(*nodes: Node) -> None:
    """Each admits each by file, whatever they are called, and is told where the others are."""
    exported = [(node, (await node.do("trust-export"))) for node in nodes]
    for node in nodes:
        for other, told in exported:
            if other is node:
                other.node_id = told["id"]
            else:
                await node.do("trust-add", file=told["file"], id=told["id"], roles=[])


def meet(*nodes: Node) -> None:
    """Write the settings of nodes that dial each other."""
    for node in nodes:
        others = [f"@{other.name}={other.ip}:{other.ports['mesh']}" for other in nodes if other is not node]
        node.write_settings(list(dict.fromkeys(others)))


async def test_hosts_of_one_name_are_told_apart(tmp_path: Path) -> None:
    engine = OpenAiEngine()
    async with engine.serving() as url:
        watcher, *twins = (
            Node(name=name, ip=f"127.0.0.{number}", base=tmp_path / str(number))
            for number, name in ((2, "watcher"), (3, "ubuntu"), (4, "ubuntu"))
        )
        for twin in twins:
            (twin.config / "endpoints" / "engine.toml").write_text(Endpoint(url=url).manifest())
        meet(watcher, *twins)
        async with running(watcher), running(twins[0]), running(twins[1]):
            await paired(watcher, *twins)
            marks = {f"ubuntu~{twin.node_id[:4]}": twin for twin in twins}
            assert len(marks) == 2

            async def both() -> bool:
                seen = (await watcher.get("/v1/status"))["members"]
                return sum(bool(each["engines"] and each["engines"][0]["models"]) for each in seen) == 2

            await wait_for(both, 15, "the watcher sees both")
            for mark in marks:
                reply = await chat(watcher, headers={"x-pairmesh-require": f"node=@{mark}"})
                assert reply.status == 200
                assert reply.headers["x-pairmesh-node"] == f"@{mark}/engine"
                _, said, _ = await watcher.cli("explain", reply.headers["x-pairmesh-decision-id"])
                assert f"@{mark}/engine" in said
            _, table, _ = await watcher.cli("status")
            assert all(f"\n{mark} " in table for mark in marks), table
            for twin in twins:
                age = f'pairmesh_mesh_record_age_seconds{{node="{twin.node_id}",name="ubuntu"}}'
                assert await metric(watcher, age) < 60
            _, said, _ = await watcher.cli("doctor")
            assert "2 are called ubuntu" in said
            code, _, said = await watcher.cli("trust", "remove", "@ubuntu")
            assert (code, "more than one" in said) == (1, True)
            gone, left = marks
            code, said, _ = await watcher.cli("trust", "remove", f"@{gone}")
            assert (code, marks[gone].node_id in said) == (0, True)
            reply = await chat(watcher)
            assert reply.headers["x-pairmesh-node"] == "@ubuntu/engine"
            assert left not in (await watcher.cli("status"))[1]


async def test_the_log_tells_who_came_fell_silent_went_and_is_back(tmp_path: Path) -> None:
    alpha, beta = (
        Node(name=name, ip=f"127.0.0.{n}", base=tmp_path / name) for n, name in ((2, "alpha"), (3, "beta"))
    )
    meet(alpha, beta)
    async with running(alpha):
        async with running(beta):
            await paired(alpha, beta)
            await wait_for(lambda: _said(alpha, "member.new"), 15, "a new member")
        await wait_for(lambda: _said(alpha, "member.left"), 5, "it left")
        async with running(beta):
            await wait_for(lambda: _said(alpha, "member.back"), 10, "it is back")
            await beta.kill()
            await wait_for(lambda: _said(alpha, "member.suspect"), 15, "it fell silent")


# --- files of another version --------------------------------------------------------------------------------


def altered(path: Path, script: str) -> bytes:
    """Change a database as another version of the daemon would have left it; its bytes then."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)
    return path.read_bytes()


def of_version(payload: bytes, version: int) -> bytes:
    """A checked file of a later schema, by the layout that its page states."""
    number = version.to_bytes(2, "big")
    return (
        b"PMF2" + number + len(payload).to_bytes(4, "big") + payload + sha256(number + payload).digest()[:16]
    )


async def tells_when(node: Node, decision_id: str, before_ms: int) -> None:
    """A decision says when it was made in epoch time, kept, listed or never carried out."""
    kept = await node.get(f"/v1/decisions/{decision_id}")
    listed = (await node.get("/v1/decisions"))["decisions"][0]
    _, said, _ = await node.cli("explain", "--model", "m", "--json")
    for each in (kept, listed, json.loads(said)):
        assert before_ms - 1_000 <= each["at_ms"] <= time.time_ns() // 1_000_000 + 1_000


async def test_what_a_newer_version_left_is_kept_for_it_and_work_goes_on(tmp_path: Path) -> None:
    engine = OpenAiEngine()
    async with engine.serving() as url:
        node = a_node(tmp_path, url)
        async with running(node):
            await ready(node)
            assert (await chat(node)).status == 200
        journal = altered(
            node.state / "journal.sqlite",
            "alter table decisions add column cost integer not null default 0; pragma user_version = 99",
        )
        profiles = altered(
            node.state / "profiles.sqlite",
            "alter table profiles add column kind text not null default ''; pragma user_version = 3",
        )
        epoch = of_version(b"\x91\x01", 2)
        (node.state / "epoch").write_bytes(epoch)
        async with running(node):
            await ready(node)
            before = time.time_ns() // 1_000_000
            reply = await chat(node)
            assert reply.status == 200
            await tells_when(node, reply.headers["x-pairmesh-decision-id"], before)
            _, said, _ = await node.cli("doctor")
            for name, version in (("journal.sqlite", 99), ("profiles.sqlite", 3), ("epoch", 2)):
                assert f"{node.state}/{name} was written by a newer version" in said
                assert f"schema is {version}" in said
        for name, content in (
            ("journal.sqlite.v99", journal),
            ("profiles.sqlite.v3", profiles),
            ("epoch.v2", epoch),
        ):
            assert (node.state / name).read_bytes() == content
        log = node.log.read_text()
        assert '"event":"state.newer"' in log
        assert str(node.state / "journal.sqlite") in log
        async with running(node):
            code, said, _ = await node.cli("explain", reply.headers["x-pairmesh-decision-id"])
            assert (code, "@alpha/engine" in said) == (0, True), "it was recorded"
            assert (await node.get("/v1/status"))["own"]["faults"] == []


async def test_a_newer_identity_or_roster_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    async with running(node):
        node_id = (await node.get("/v1/status"))["own"]["id"]
    newer = of_version(b"\x81\xa1v\x02", 2)
    (node.state / "roster").mkdir(exist_ok=True)
    for name in (f"roster/{node_id}", "identity/mesh"):
        path = node.state / name
        path.write_bytes(newer)
        with pytest.raises(RuntimeError, match="did not become ready"):
            await node.start()
        assert node.process is not None
        assert await node.process.wait() == 78
        assert path.read_bytes() == newer
        said = node.log_tail(2)
        assert f"pairmesh: {path} was written by a newer version" in said
        assert "install that version again" in said


# --- what operators are told ---------------------------------------------------------------------------------


async def test_a_reload_tells_what_waits_for_a_restart(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    async with running(node):
        assert node.process is not None
        toml = node.config / "pairmesh.toml"
        before = toml.read_text()
        toml.write_text(before.replace("[api]\n", '[api]\nhosts = ["box.lan:11433"]\n'))
        (node.config / "policy.toml").write_text('preset = "latency"\n')
        node.process.send_signal(signal.SIGHUP)
        await wait_for(lambda: _said(node, "config.reloaded"), 5, "the reload is told")
        assert '"waits_for_restart":["api.hosts"]' in node.log.read_text()
        _, shown, _ = await node.cli("config", "show")
        in_force, _, waits = shown.partition("these wait for a restart:")
        assert "hosts = []  # default" in in_force
        assert 'api.hosts = ["box.lan:11433"]  # pairmesh.toml; in force: []' in waits
        assert 'preset = "latency"  # policy.toml' in in_force
        assert "waits for a restart: api.hosts" in (await node.cli("status"))[1]
        assert re.search(r"^warning +settings +api.hosts", (await node.cli("doctor"))[1], re.M)
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{node.api}/v1/models", headers={"host": "box.lan:11433"}) as reply,
        ):
            assert reply.status == 403, "as it says, the name is not in force"
        toml.write_text(before.replace("[api]\n", "[api]\nengine_admin = false\n"))
        await wait_for(lambda: _said(node, "config.key_removed"), 8, "a key without effect is told")
        assert re.search(
            r"^warning +settings +pairmesh.toml: api.engine_admin: removed",
            (await node.cli("doctor"))[1],
            re.M,
        )
        toml.write_text("nmae = 3\n")
        (node.config / "polcy.toml").write_text("")
        await wait_for(lambda: _said(node, "config.unread"), 8, "a misspelt file is told")
        assert "pairmesh.toml: nmae: unknown key" in node.log.read_text()
        assert "hosts = []  # default" in (await node.cli("config", "show"))[1]
        toml.write_text(before)


async def test_trust_says_what_it_wants_and_what_it_did(tmp_path: Path) -> None:
    alpha, beta = (
        Node(name=name, ip=f"127.0.0.{n}", base=tmp_path / name) for n, name in ((2, "alpha"), (3, "beta"))
    )
    meet(alpha, beta)
    async with running(alpha), running(beta):
        _, file, _ = await beta.cli("trust", "export")
        (tmp_path / "beta.trust").write_text(file)
        short = re.search(r"beta \((\S+)\)", (await beta.cli("status"))[1])
        assert short is not None
        code, _, said = await alpha.cli("trust", "add", str(tmp_path / "beta.trust"), "--id", short.group(1))
        assert (code, "whole id" in said) == (1, True)
        assert "do not trust" not in said
        await paired(alpha, beta)

        async def linked() -> bool:
            seen = [(await alpha.members()).get("beta"), (await beta.members()).get("alpha")]
            return all(each is not None and each["link"]["state"] == "up" for each in seen)

        await wait_for(linked, 15, "both links")
        _, said, _ = await alpha.cli("trust", "remove", beta.node_id)
        assert "; 1 of its connections cut" in said
        await wait_for(lambda: _said(beta, "member.suspect"), 20, "its link is gone")


async def test_a_second_daemon_of_one_state_folder_is_refused_whatever_else_it_has(tmp_path: Path) -> None:
    """A login session and a shell without one have other runtime folders, but one state folder."""
    first = a_node(tmp_path)
    second = Node(name="alpha", ip="127.0.0.3", base=tmp_path / "second")
    second.write_settings([])
    second.more_env["STATE_DIRECTORY"] = str(first.state)
    async with running(first):
        with pytest.raises(RuntimeError, match="did not become ready"):
            await second.start()
        assert second.process is not None
        assert await second.process.wait() == 78
        assert f"another daemon runs with {first.state}" in second.log_tail(1)
        assert (await first.get("/v1/status"))["own"]["faults"] == []


async def test_pipes_in_place_of_files_hold_up_neither_start_nor_end(tmp_path: Path) -> None:
    node = a_node(tmp_path)
    async with running(node):
        pass
    names = ("journal.sqlite", "profiles.sqlite", "epoch", "floors")
    for name in names:
        (node.state / name).unlink(missing_ok=True)
        os.mkfifo(node.state / name)
    async with running(node):
        assert (await node.get("/v1/status"))["own"]["epoch"] >= 1
    assert all((node.state / name).is_file() for name in names[:3])


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "1>&-"])
async def test_a_starter_that_closes_the_standard_streams_harms_nothing(tmp_path: Path, closed: str) -> None:
    node = a_node(tmp_path)
    node.prefix = ("sh", "-c", f'exec "$@" {closed}', "sh")
    async with running(node):
        assert (await node.get("/v1/status"))["own"]["name"] == "alpha"
