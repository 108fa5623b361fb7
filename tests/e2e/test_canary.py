"""What clients send and engines answer reaches no sink: logs at debug, files, metrics, views, gossip, other replies.

Marked text is planted in every part of a request and of an answer, through one node and through two, and every place
that a node keeps or tells anything is searched for it in every spelling. The search is shown to work by a build of
the daemon that leaks on purpose.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.support.builds import entry
from tests.support.canary import Canaries
from tests.support.canary_engines import engines
from tests.support.canary_plants import Sent, bodies, broken, chat, native, requests, user
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.overhearing import Overhearing, overhearing
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

pytestmark = [pytest.mark.threat("T37"), pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
KEY = "engine-key"


@dataclass(kw_only=True)
class Stage:
    """Two nodes at debug with the same engines, and a third member that keeps what it is sent."""

    marks: Canaries
    nodes: list[Node]
    engines: dict[str, ScriptedEngine]
    ollama: FakeOllama
    overheard: Overhearing

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)


@contextlib.asynccontextmanager
async def staged(base: Path, start: tuple[str, ...], names: Sequence[str]) -> AsyncIterator[Stage]:
    marks = Canaries(seed=1)
    made = engines(marks)
    nodes = [
        Node(name=name, ip=IPS[name], base=base / name, entry=start, flags=("--trace", str(base / name / "trace")))
        for name in names
    ]  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(engine.serving()) for name, engine in made.items()}
        ollama = await stack.enter_async_context(
            FakeOllama(models=[FakeModel(name="native:latest")]).serving()
        )
        await stack.enter_async_context(closing(Cluster(base=base, nodes=nodes, engines=[])))
        for node in nodes:
            others = [other for other in nodes if other is not node]
            node.write_settings([f"@{other.name}={other.ip}:{other.ports['mesh']}" for other in others])
            node.more_env = {"PAIRMESH_LOG": "debug", "PYTHONFAULTHANDLER": "1", "PYTHONDEVMODE": "1"}
            keys = node.state / "credentials"
            keys.mkdir(mode=0o700)
            (keys / KEY).write_text(marks.mint("key of an engine"))
            for name, url in urls.items():
                (node.config / "endpoints" / f"{name}.toml").write_text(
                    f'engine = "openai"\nurl = "{url}"\ncredential = "{KEY}"\n'
                )
            (node.config / "endpoints" / "ollama.toml").write_text(
                f'engine = "ollama"\nurl = "{ollama.url}"\njit_load = true\n'
            )
            await node.start()
        await pair(nodes)
        overheard = await stack.enter_async_context(overhearing(base, "127.0.0.9", nodes))
        for node in nodes:
            await wait_for(
                partial(sees, node, len(nodes), len(made) + 1), 20, f"{node.name} sees every engine"
            )
        yield Stage(marks=marks, nodes=nodes, engines=made, ollama=ollama, overheard=overheard)


async def sees(node: Node, nodes: int, ready: int) -> bool:
    members = [member for member in (await node.members()).values() if member["name"] in IPS]
    offered = [[engine for engine in member["engines"] if engine["models"]] for member in members]
    return len(members) == nodes and all(len(engines) == ready for engines in offered)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged(tmp_path_factory.mktemp("canary"), ("-m", "agent", "run"), tuple(IPS)) as made:
        yield made


# --- planting ------------------------------------------------------------------------------------------------


async def ask(session: aiohttp.ClientSession, node: Node, sent: Sent) -> tuple[bool, bytes]:
    """Whether an endpoint answered, and the reply, head and body; an answer that breaks off ends where it does."""
    headers = {"content-type": "application/json"} | sent.headers
    reply = b""
    try:
        async with session.request(
            "POST" if sent.body else "GET", node.api + sent.path, data=sent.body or None, headers=headers
        ) as answer:
            reply = repr(answer.raw_headers).encode()
            async for piece in answer.content.iter_any():
                reply += piece
            return "x-pairmesh-node" in answer.headers, reply
    except aiohttp.ClientError:
        return True, reply


async def send_raw(ip: str, port: int, data: bytes) -> bytes:
    """What comes back before the other end closes."""
    reader, writer = await asyncio.open_connection(ip, port)
    reply = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        await writer.drain()
        with contextlib.suppress(OSError):  # asyncio of Python 3.11.2 minds that the other end has gone
            writer.write_eof()
        async with asyncio.timeout(10):
            reply = await reader.read()
    writer.close()
    return reply


def variants(sent: Sent, by: str) -> list[Sent]:
    """Streamed and not, for the endpoints of node ``by``."""
    required = {"x-pairmesh-require": f"node=@{by}"} | sent.headers
    streamed = sent.body.replace(b'"max_tokens": 4', b'"stream": true, "max_tokens": 4', 1)
    return [
        Sent(body=body, path=sent.path, headers=required) for body in dict.fromkeys((sent.body, streamed))
    ]


async def plant_in_requests(stage: Stage, session: aiohttp.ClientSession) -> dict[str, bytes]:
    """Every plant of a client at alpha, for alpha's own endpoints and for beta's; our own refusals by request."""
    alpha = stage["alpha"]
    refusals = {}
    for sent in requests(stage.marks):
        for by in [node.name for node in stage.nodes]:
            for number, variant in enumerate(variants(sent, by)):
                answered, reply = await ask(session, alpha, variant)
                if not answered:
                    refusals[f"{sent.path} {sent.headers} {sent.body[:60]!r} {by} {number}"] = reply
    return refusals


async def plant_in_native_requests(stage: Stage, session: aiohttp.ClientSession) -> None:
    """What Ollama's clients send, for each node's own; at last one answer that turns into an error."""
    for stage.ollama.break_after in (None, 3):
        for sent in native(stage.marks, "native"):
            for node in stage.nodes:
                headers = {"x-pairmesh-require": f"node=@{node.name}"}
                await ask(session, stage["alpha"], Sent(body=sent.body, path=sent.path, headers=headers))


async def plant_in_answers(stage: Stage, session: aiohttp.ClientSession) -> dict[str, bytes]:
    """Each engine's script, with a prompt to echo; afterwards what another client gets from the same sockets."""
    others = {}
    for node in stage.nodes:
        for name in stage.engines:
            for stream in (False, True):
                prompt = user(stage.marks.mint(f"prompt for {name}"))
                for model, messages in ((name, prompt), (f"{name}-plain", user("x"))):
                    body = chat(model=model, messages=messages, stream=stream)
                    headers = {"x-pairmesh-require": f"node=@{node.name}"}
                    _, reply = await ask(session, stage["alpha"], Sent(body=body, headers=headers))
                    if model != name:
                        others[f"{model} {node.name} {stream}"] = reply
    return others


async def plant_in_bytes(stage: Stage) -> dict[str, bytes]:
    """Broken requests at every TCP port of alpha; what came back."""
    alpha = stage["alpha"]
    replies: dict[str, bytes] = {}
    for what, port in alpha.ports.items():
        pieces = list(broken(stage.marks, f"{alpha.ip}:{port}"))
        sent = await asyncio.gather(*(send_raw(alpha.ip, port, data) for data in pieces))
        replies |= {f"{what} {data[:80]!r}": reply for data, reply in zip(pieces, sent, strict=True)}
    return replies


async def plant_in_admin(stage: Stage, session: aiohttp.ClientSession) -> None:
    mark = stage.marks.mint("admin path")
    for path in (
        f"/{mark}",
        f"/v1/decisions/{mark}",
        f"/v1/decisions?limit={mark}",
        f"/metrics?{mark}={mark}",
    ):
        async with session.get(stage["alpha"].admin + path) as reply:
            await reply.read()
    with pytest.raises(RuntimeError):
        await stage["alpha"].do(mark)


# --- sinks ---------------------------------------------------------------------------------------------------


def files(node: Node) -> dict[str, bytes]:
    """Every file a node has written, its log and its trace among them; what the operator wrote is not its doing."""
    return {
        str(path.relative_to(node.base)): path.read_bytes()
        for path in node.base.rglob("*")
        if path.is_file()
        and path.parent.name not in ("credentials", "endpoints", "models")
        and path.name not in ("engine.log", "embedder.log")
    }


def process(node: Node) -> dict[str, bytes]:
    """What other users of the host see of the process."""
    assert node.process is not None
    proc = Path(f"/proc/{node.process.pid}")
    threads = b"\n".join(thread.read_bytes() for thread in sorted(proc.glob("task/*/comm")))
    return {"command line": (proc / "cmdline").read_bytes(), "thread names": threads}


async def told(node: Node, session: aiohttp.ClientSession) -> dict[str, bytes]:
    """What anybody may ask a node for."""
    found = {}
    for path in ("/metrics", "/v1/status", "/v1/view", "/v1/decisions?limit=1000"):
        async with session.get(f"{node.admin}{path}") as reply:
            assert reply.status == 200
            found[path] = await reply.read()
    for path in ("/v1/models", "/api/tags", "/api/ps", "/v1/models/nobody-has-this", "/nowhere"):
        async with session.get(f"{node.api}{path}") as reply:
            found[path] = repr(reply.raw_headers).encode() + await reply.read()
    for words in (("explain",), ("explain", "--json"), ("status",), ("status", "--json"), ("doctor",), ("doctor", "--json")):  # fmt: skip
        _, out, err = await node.cli(*words)
        found[f"pairmesh {' '.join(words)}"] = (out + err).encode()
    return found


async def sinks(stage: Stage, session: aiohttp.ClientSession) -> list[tuple[str, bytes]]:
    found = [("mesh frames", b"\n".join(stage.overheard.frames))]
    for node in stage.nodes:
        each = files(node) | process(node) | await told(node, session)
        found += [(f"{node.name}: {name}", blob) for name, blob in each.items()]
    return found


# --- claims --------------------------------------------------------------------------------------------------


@pytest.mark.scenario("telemetry explains and holds nothing of what was said")
async def test_no_sink_holds_a_word_of_a_request_or_an_answer(stage: Stage) -> None:
    limit = aiohttp.TCPConnector(limit=4)
    async with aiohttp.ClientSession(connector=limit) as session, aiohttp.ClientSession() as other:
        refusals = await plant_in_requests(stage, session)
        await plant_in_native_requests(stage, session)
        others = await plant_in_answers(stage, session)
        replies = await plant_in_bytes(stage)
        await plant_in_admin(stage, session)
        assert stage.marks.search(refusals.items()) == {}, "a refusal of ours echoes nothing"
        assert stage.marks.search(replies.items()) == {}, "nor does one of a broken request"
        assert stage.marks.search(others.items()) == {}, "nobody gets what another one's answer left behind"
        await heard_again(stage)
        found = await sinks(stage, other)
    for name, engine in stage.engines.items():
        assert engine.asked.count(name) >= 4, f"{name} was not reached often enough: {engine.asked}"
    assert stage.engines["answers"].asked.count("answers-plain") > 200, "most plants went through a node"
    natively = stage.marks.found_in(json.dumps(stage.ollama.bodies).encode())
    assert {"native prompt", "native message", "native value of an argument"} <= natively
    assert stage.marks.search(found) == {}
    searched = {name for name, _ in found}
    for expected in ("daemon.log", "trace", "state/journal.sqlite", "state/journal.sqlite-wal", "/metrics"):
        assert f"alpha: {expected}" in searched
    assert sum(len(blob) for _, blob in found) > 200_000


async def test_nothing_that_was_planted_struck_a_fault_of_our_own(stage: Stage) -> None:
    for node in stage.nodes:
        lines = [json.loads(line) for line in node.log.read_text().splitlines()]
        assert [line for line in lines if line["level"] == "error"] == []


async def heard_again(stage: Stage) -> None:
    """Wait until every node has said something new since now, so that nothing planted is still on its way."""
    before = len(stage.overheard.frames)
    await until(lambda: len(stage.overheard.frames) > before + 2 * len(stage.nodes), 20)


async def test_the_frames_that_were_searched_are_those_of_both_nodes(stage: Stage) -> None:
    frames = b"\n".join(stage.overheard.frames)
    assert b"answers-plain" in frames, "the models that a node offers are no secret"
    assert stage.overheard.speakers == {node.node_id for node in stage.nodes}


async def test_a_proper_request_id_is_kept_because_its_sender_wants_to_find_it(stage: Stage) -> None:
    async with aiohttp.ClientSession() as session:
        sent = Sent(body=chat(), headers={"x-request-id": "mine-0815"})
        assert b"mine-0815" in (await ask(session, stage["alpha"], sent))[1]
        await wait_for(lambda: logged(stage["alpha"], '"mine-0815"'), 10, "the access line is written")


async def logged(node: Node, text: str) -> bool:
    return text in node.log.read_text()


async def test_a_crash_and_an_orderly_end_say_no_more(stage: Stage) -> None:
    alpha, beta = stage["alpha"], stage["beta"]
    assert beta.process is not None
    beta.process.send_signal(signal.SIGABRT)
    await asyncio.wait_for(beta.process.wait(), 20)
    assert "Fatal Python error: Aborted" in beta.log.read_text()
    assert await alpha.term() == 0
    found = {f"{node.name}: {name}": blob for node in stage.nodes for name, blob in files(node).items()}
    assert stage.marks.search(found.items()) == {}


@pytest.mark.scenario("telemetry explains and holds nothing of what was said")
async def test_asking_real_engines_about_their_work_keeps_none_of_it(cluster: Cluster) -> None:
    """Their slots show the very prompts."""
    marks = Canaries(seed=2)
    async with aiohttp.ClientSession() as session:
        for body in bodies(marks):
            for by in IPS:
                headers = {"x-pairmesh-require": f"node=@{by}"}
                sent = Sent(body=body.replace(b"answers-plain", b"tiny"), headers=headers)
                await ask(session, cluster["alpha"], sent)
        for node in cluster.nodes:
            found = files(node) | process(node) | await told(node, session)
            assert marks.search(found.items()) == {}, node.name


async def test_a_build_that_leaks_is_caught_in_every_kind_of_sink(tmp_path: Path) -> None:
    async with staged(tmp_path, entry("leaking"), ["alpha"]) as leaking, aiohttp.ClientSession() as session:
        await plant_in_answers(leaking, session)
        await until(lambda: leaking.marks.found_in(b"\n".join(leaking.overheard.frames)), 20)
        hits = leaking.marks.search(await sinks(leaking, session))
    kinds = {
        "alpha: daemon.log": "engine: answer",
        "alpha: state/scratch": "engine: answer",
        "alpha: thread names": "engine: answer",
        "alpha: /metrics": "engine: answer",
        "alpha: /v1/status": "engine: answer",
        "alpha: /v1/view": "engine: answer",
        "alpha: pairmesh status --json": "engine: answer",
        "mesh frames": "engine: answer",
    }
    assert {sink: plant for sink, plant in kinds.items() if plant in hits.get(sink, ())} == kinds
