"""The config folder of a running daemon: what is changed there takes effect whole, what is wrong there is told, and no
request under way is lost by either."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router_core import limits
from router_core.policy.placement import PRESETS
from tests.support.cluster import Node, wait_for
from tests.support.scripted_engine import STREAM_HEAD, ScriptedEngine, Wire, chunk, event, whole
from tests.support.supervised import Supervised

BALANCED, LATENCY = PRESETS["balanced"].hash, PRESETS["latency"].hash


class Held(ScriptedEngine):
    """Answers ``quick`` at once; ``held`` streams one event and ends when it is let go."""

    def __init__(self) -> None:
        super().__init__({"quick": self._quick, "held": self._held})
        self.let_go = asyncio.Event()

    async def _quick(self, wire: Wire, _body: bytes) -> None:
        wire.write(whole(200, b'{"choices": []}'))

    async def _held(self, wire: Wire, _body: bytes) -> None:
        wire.write(STREAM_HEAD + event("one"))
        await self.let_go.wait()
        wire.write(event("two") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


class Live:
    """A daemon that runs, with one engine."""

    def __init__(self, node: Node, daemon: Supervised, engine: Held, url: str) -> None:
        self.node, self.daemon, self.engine, self.url = node, daemon, engine, url
        self.session = aiohttp.ClientSession()

    def write(self, file: str, text: str) -> None:
        (self.node.config / file).write_text(text)

    def manifest(self, name: str = "engine", more: str = "") -> None:
        self.write(f"endpoints/{name}.toml", f'engine = "openai"\nurl = "{self.url}"\n{more}')

    def hang_up(self) -> None:
        self.daemon.process.send_signal(signal.SIGHUP)

    async def own(self) -> dict[str, Any]:
        status: dict[str, Any] = (await self.node.get("/v1/status"))["own"]
        return status

    async def engines(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in (await self.node.members())["alone"]["engines"]}

    async def ask(self, model: str, **headers: str) -> aiohttp.ClientResponse:
        body = {"model": model, "stream": model == "held", "messages": [{"role": "user", "content": "hello"}]}
        return await self.session.post(f"{self.node.api}/v1/chat/completions", json=body, headers=headers)

    async def code(self) -> str | None:
        """Ask for ``quick``: None if it is served, else the code of the refusal."""
        async with await self.ask("quick") as reply:
            return None if reply.status == 200 else (await reply.json())["error"]["code"]

    async def sees(self, what: str, **wanted: Any) -> None:
        """Wait until the own status says this."""

        async def seen() -> bool:
            own = await self.own()
            return all(own[key] == value for key, value in wanted.items())

        await wait_for(seen, 10, what)

    async def offers(self, *names: str) -> None:
        """Wait until exactly these endpoints are there and ready."""

        async def seen() -> bool:
            found = await self.engines()
            return {name for name, each in found.items() if each["state"] == "ready" and each["models"]} == {
                *names
            }

        await wait_for(seen, 10, f"the endpoints {names} are ready")


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    node = Node(name="alone", ip="127.0.0.3", base=tmp_path / "n")
    node.write_settings([])
    engine = Held()
    async with engine.serving(node.ip) as url, Supervised(node=node) as daemon:
        made = Live(node, daemon, engine, url)
        await daemon.says("READY=1")
        try:
            yield made
        finally:
            engine.let_go.set()
            await made.session.close()


@pytest.fixture
async def serving(live: Live) -> Live:
    live.manifest()
    live.hang_up()
    await live.offers("engine")
    return live


async def test_a_policy_is_swapped_whole_and_a_bad_one_is_refused_and_told(live: Live) -> None:
    assert (await live.own())["policy"] == {"preset": "balanced", "hash": BALANCED}
    live.write("policy.toml", 'preset = "latency"')
    live.hang_up()
    await live.sees("the new policy", policy={"preset": "latency", "hash": LATENCY})

    live.write("policy.toml", 'preset = "balanced"\n[weights]\nslo = 7\n')
    live.hang_up()
    fault = "policy.toml: weights.slo: out of range: 7; allowed: 0 to 1 (the policy before it stays in force)"
    await live.sees("the fault", faults=[fault])
    assert (await live.own())["policy"]["hash"] == LATENCY
    assert fault in (await live.node.cli("status"))[1]
    assert fault in (await live.node.cli("doctor"))[1]
    events = [json.loads(line) for line in live.node.log.read_text().splitlines()]
    assert [line["fault"] for line in events if line["event"] == "config.refused"] == [fault]

    (live.node.config / "policy.toml").unlink()
    live.hang_up()
    await live.sees("the defaults", policy={"preset": "balanced", "hash": BALANCED}, faults=[])


async def test_a_changed_file_is_noticed_without_a_signal(live: Live) -> None:
    live.write("policy.toml", 'preset = "latency"')
    await live.sees("the new policy", policy={"preset": "latency", "hash": LATENCY})


async def test_a_decision_names_the_policy_it_was_made_by(serving: Live) -> None:
    async with await serving.ask("quick") as reply:
        first = reply.headers["x-pairmesh-decision-id"]
    serving.write(
        "policy.toml", 'preset = "latency"\n[aliases]\nmini = ["quick"]\n[session]\nheaders = ["x-chat"]'
    )
    serving.hang_up()

    async def aliased() -> bool:
        async with await serving.ask("mini") as reply:
            return reply.status == 200

    await wait_for(aliased, 10, "the alias serves")
    async with await serving.ask("mini", **{"x-chat": "a"}) as reply:
        second = reply.headers["x-pairmesh-decision-id"]
        assert reply.headers["x-pairmesh-session"] == "miss"
    hashes = [
        (await serving.node.get(f"/v1/decisions/{number}"))["policy_hash"] for number in (first, second)
    ]
    assert hashes == [BALANCED, (await serving.own())["policy"]["hash"]]
    assert hashes[0] != hashes[1]


async def test_a_bad_manifest_disables_its_endpoint_alone(serving: Live) -> None:
    serving.manifest("other")
    serving.manifest("broken", "slots = 0\nspeed = 1\n")
    serving.hang_up()
    await serving.offers("engine", "other")
    faults = (await serving.own())["faults"]
    assert [fault.split(":")[:2] for fault in faults] == [
        ["endpoints/broken.toml", " slots"],
        ["endpoints/broken.toml", " speed"],
    ]
    serving.manifest("other", "slots = 0\n")
    (serving.node.config / "endpoints" / "broken.toml").unlink()
    serving.hang_up()
    await serving.offers("engine")
    assert await serving.code() is None
    serving.manifest("other")
    serving.hang_up()
    await serving.offers("engine", "other")
    assert (await serving.own())["faults"] == []


async def test_models_that_cannot_be_offered_are_counted_and_never_spelled(serving: Live) -> None:
    serving.engine.scripts |= dict.fromkeys(("two words", "../up"), serving.engine.scripts["quick"])
    serving.manifest(more="slots = 3\n")
    serving.hang_up()
    await serving.sees("the count", unfit_names={"engine": 2})
    for verb in ("status", "doctor"):
        said = (await serving.node.cli(verb))[1]
        assert "engine has 2 models whose names are unfit to be offered" in said
        assert "two words" not in said


async def test_models_beyond_what_a_node_can_tell_of_are_counted(serving: Live) -> None:
    many = {f"model-{number}": serving.engine.scripts["quick"] for number in range(limits.MODELS)}
    serving.engine.scripts |= many
    serving.manifest(more="slots = 3\n")
    serving.hang_up()
    await serving.sees("the count", hidden_models=2)
    assert "2 models more than a node can tell of" in (await serving.node.cli("doctor"))[1]


async def test_a_manifest_whose_key_cannot_be_read_is_told_and_no_more(serving: Live) -> None:
    serving.manifest("keyed", 'credential = "sk-absent"\n')
    serving.hang_up()
    where = serving.node.state / "credentials"
    await serving.sees(
        "the fault",
        faults=[f"endpoints: keyed: credential: the file that it names in {where} cannot be read"],
    )
    assert "sk-absent" not in serving.node.log.read_text(), "it may be the key itself"
    assert await serving.code() is None


async def test_a_key_of_an_engine_that_was_renewed_is_shown_from_then_on(live: Live) -> None:
    credentials = live.node.state / "credentials"
    credentials.mkdir(mode=0o700)
    (credentials / "key").write_text("first")
    live.manifest(more='credential = "key"\n')
    live.hang_up()
    await live.offers("engine")
    assert await live.code() is None
    assert b"Bearer first" in live.engine.head
    (credentials / "key").write_text("renewed")

    async def renewed() -> bool:
        assert await live.code() is None
        return b"Bearer renewed" in live.engine.head

    await wait_for(renewed, 10, "the new key")


async def test_an_engine_that_takes_no_requests_is_told_with_the_reason(serving: Live) -> None:
    serving.write("endpoints/other.toml", f'engine = "llamacpp"\nurl = "{serving.url}"\n')
    serving.write("endpoints/self.toml", f'engine = "openai"\nurl = "{serving.node.api}"\n')
    serving.write("endpoints/gone.toml", 'engine = "openai"\nurl = "http://127.0.0.1:9"\n')
    serving.hang_up()
    troubles = {"other": "identity_changed", "self": "self_loop", "gone": "unreachable"}
    await serving.sees("the reasons", engine_errors=troubles)
    assert "other (identity changed)" in (await serving.node.cli("status"))[1]
    assert "gone (openai) does not answer at its url" in (await serving.node.cli("doctor"))[1]
    told = [json.loads(line) for line in serving.node.log.read_text().splitlines()]
    down = {line["endpoint"]: line["reason"] for line in told if line["event"] == "engine.down"}
    assert down == troubles
    assert {line["endpoint"] for line in told if line["event"] == "engine.up"} == {"engine"}


async def test_a_changed_manifest_is_replaced_and_what_is_under_way_goes_on(serving: Live) -> None:
    async with await serving.ask("held") as reply:
        assert (await reply.content.readline()).startswith(b"data: ")
        serving.manifest(more="slots = 3\n")
        serving.hang_up()

        async def replaced() -> bool:
            slots: int | None = (await serving.engines())["engine"]["slots"]
            return slots == 3

        await wait_for(replaced, 10, "the new manifest")
        assert await serving.code() is None
        assert (await serving.engines())["engine"]["ours"] == 1
        serving.engine.let_go.set()
        assert b"data: [DONE]" in await reply.read()
    await serving.offers("engine")


async def test_a_removed_manifest_drains_before_its_endpoint_goes(serving: Live) -> None:
    async with await serving.ask("held") as reply:
        await reply.content.readline()
        (serving.node.config / "endpoints" / "engine.toml").unlink()
        serving.hang_up()
        drain = {
            "endpoint": "engine",
            "stage": "draining",
            "in_flight": 1,
            "why": "its manifest is gone or not fit",
        }
        await serving.sees("the drain", drains=[drain])
        assert await serving.code() == "draining"
        assert (await serving.node.cli("drain", "engine", "--undo"))[0] == 1
        serving.engine.let_go.set()
        assert b"data: [DONE]" in await reply.read()
    await serving.sees("nothing drains", drains=[])
    assert await serving.engines() == {}
    assert await serving.code() == "model_absent"


async def test_a_manifest_that_comes_back_takes_work_again(serving: Live) -> None:
    async with await serving.ask("held") as reply:
        await reply.content.readline()
        (serving.node.config / "endpoints" / "engine.toml").unlink()
        serving.hang_up()

        async def drains() -> bool:
            return await serving.code() == "draining"

        await wait_for(drains, 10, "it drains")
        serving.manifest()
        serving.hang_up()
        await serving.offers("engine")
        assert await serving.code() is None
        serving.engine.let_go.set()
        assert b"data: [DONE]" in await reply.read()


async def test_an_endpoint_is_drained_and_taken_back_by_command(serving: Live) -> None:
    async with await serving.ask("held") as reply:
        await reply.content.readline()
        status, said, _ = await serving.node.cli("drain", "engine")
        assert (status, said) == (0, "engine drains: 1 request under way\n")
        assert await serving.code() == "draining"
        assert "engine (draining)" in (await serving.node.cli("status"))[1]
        serving.engine.let_go.set()
        assert b"data: [DONE]" in await reply.read()
    await serving.sees(
        "it is drained",
        drains=[{"endpoint": "engine", "stage": "drained", "in_flight": 0, "why": "asked for"}],
    )
    assert "engine is drained" in (await serving.node.cli("status"))[1]
    assert "engine (openai) is draining" in (await serving.node.cli("doctor"))[1]
    assert (await serving.node.cli("drain", "engine", "--undo"))[:2] == (0, "engine takes requests\n")
    assert await serving.code() is None


async def test_a_whole_node_is_drained_and_taken_back(serving: Live) -> None:
    assert (await serving.node.cli("drain"))[:2] == (0, "this node is drained\n")
    assert "draining" in (await serving.node.members())["alone"]["flags"]
    assert await serving.code() == "draining"
    await serving.node.do("drain", endpoint="engine")
    answer = json.loads((await serving.node.cli("drain", "--undo", "--json"))[1])
    assert answer["stage"] == "active"
    assert await serving.code() is None


async def test_an_unknown_endpoint_is_named_with_the_known_ones(serving: Live) -> None:
    status, _, said = await serving.node.cli("drain", "enigne")
    assert status == 1
    assert "it has: engine" in said


async def test_a_folder_that_cannot_be_read_takes_nothing_away(serving: Live) -> None:
    endpoints = serving.node.config / "endpoints"
    endpoints.rename(serving.node.config / "aside")
    endpoints.write_text("no folder")
    serving.write("policy.toml", "x = " + "9" * 5_000)
    serving.hang_up()

    async def told() -> bool:
        return len((await serving.own())["faults"]) == 2

    await wait_for(told, 10, "both faults")
    assert (await serving.own())["drains"] == []
    assert await serving.code() is None


async def test_what_is_no_file_holds_up_neither_the_daemon_nor_its_end(serving: Live) -> None:
    credentials = serving.node.state / "credentials"
    credentials.mkdir(mode=0o700)
    os.mkfifo(credentials / "pipe")
    os.mkfifo(serving.node.config / "policy.toml")
    os.mkfifo(serving.node.config / "endpoints" / "other.toml")
    serving.manifest("keyed", 'credential = "pipe"\n')
    serving.hang_up()

    async def told() -> bool:
        return len((await serving.own())["faults"]) == 3

    await wait_for(told, 10, "three faults")
    assert await serving.code() is None
    (serving.node.config / "policy.toml").unlink()
    serving.write("policy.toml", 'preset = "latency"')
    serving.hang_up()
    await serving.sees("the new policy", policy={"preset": "latency", "hash": LATENCY})
    serving.daemon.process.terminate()
    assert await asyncio.wait_for(serving.daemon.process.wait(), 15) == 0


async def test_a_key_that_no_header_can_carry_is_told(serving: Live) -> None:
    credentials = serving.node.state / "credentials"
    credentials.mkdir(mode=0o700)
    (credentials / "odd").write_text("one\r\ntwo")
    serving.manifest("keyed", 'credential = "odd"\n')
    serving.hang_up()

    async def told() -> bool:
        return any("no header can carry" in fault for fault in (await serving.own())["faults"])

    await wait_for(told, 10, "the fault")


async def test_a_heap_of_faults_is_told_in_part(serving: Live) -> None:
    serving.write("policy.toml", "".join(f"key{number} = 1\n" for number in range(20_000)))
    serving.hang_up()

    async def told() -> bool:
        return len((await serving.own())["faults"]) > 0

    await wait_for(told, 10, "the faults")
    faults = (await serving.own())["faults"]
    assert len(faults) == 65
    assert faults[-1] == "and 19936 more: see pairmesh config check"


async def test_a_node_with_too_many_manifests_starts_and_says_so(tmp_path: Path) -> None:
    node = Node(name="alone", ip="127.0.0.3", base=tmp_path / "n")
    node.write_settings([])
    for number in range(18):
        (node.config / "endpoints" / f"e{number:02}.toml").write_text(
            'engine = "openai"\nurl = "http://127.0.0.1:9"\n'
        )
    async with Supervised(node=node) as daemon:
        await daemon.says("READY=1")
        assert (await node.get("/v1/status"))["own"]["faults"] == [
            "endpoints: e16: more than 16 endpoints",
            "endpoints: e17: more than 16 endpoints",
        ]
        (node.config / "endpoints" / "e00.toml").unlink()
        daemon.process.send_signal(signal.SIGHUP)

        async def told() -> bool:
            faults: list[str] = (await node.get("/v1/status"))["own"]["faults"]
            return faults == ["endpoints: e17: more than 16 endpoints"]

        await wait_for(told, 10, "the one that is still too many")
        names = {engine["name"] for engine in (await node.members())["alone"]["engines"]}
        assert names == {f"e{number:02}" for number in range(1, 17)}
