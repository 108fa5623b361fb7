"""Engines that die, hang or talk nonsense under a daemon: what had no byte yet is served elsewhere, the rest is told."""

import signal

import pytest

from tests.support import llama, tiny_gguf
from tests.support.chaos import invariants
from tests.support.chaos.engine import CRASHED, OK, Behaviour
from tests.support.chaos.lan import Lan
from tests.support.chaos.mesh import Mesh, lines_of, meshed
from tests.support.chaos.node import NodeProc
from tests.support.chaos.run import Run
from tests.support.chaos.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

FIRST_BYTE_MS = 2_000
SLACK_S = 1.0
BACK_S = 10.0
PREFER_B = {"x-pairmesh-prefer": "@b"}
ONLY_B = {"x-pairmesh-require": "node=@b"}
TOKENS = 20
K = 7


async def engine_is_back(mesh: Mesh, name: str = "b") -> None:
    """Restart a node's engine and wait until others would use it."""
    engine = mesh[name].engine
    assert engine is not None
    engine.behave(OK)
    if engine.process is None or engine.process.returncode is not None:
        await engine.start()
    await mesh.full_view(within_s=BACK_S)


async def test_an_engine_that_dies_before_the_first_byte_costs_one_attempt(whole: Mesh) -> None:
    engine = whole["b"].engine
    assert engine is not None
    for stream in (0.0, 1.0):
        engine.behave(Behaviour(kind="exit_before_first"))
        (line,) = await whole.burst("a", 1, headers=PREFER_B, stream_share=stream)
        assert await engine.crashed() == CRASHED
        assert line["outcome"] == "whole"
        record = await whole["a"].get(f"/v1/decisions/{line['decision']}")
        assert [attempt["row"] for attempt in record["attempts"]] == ["@b/fake", line["node"]]
        await engine_is_back(whole)


async def test_an_engine_that_dies_in_mid_stream_is_told_and_never_retried(whole: Mesh) -> None:
    engine = whole["b"].engine
    assert engine is not None
    engine.behave(Behaviour(kind="exit_after", k=K))
    (line,) = await whole.burst("a", 1, headers=PREFER_B, stream_share=1.0, tokens=TOKENS)
    assert (line["outcome"], line["node"], line["status"]) == ("told", "@b/fake", 200)
    assert 0 < line["events"] <= K
    record = await whole["a"].get(f"/v1/decisions/{line['decision']}")
    assert len(record["attempts"]) == 1
    assert await engine.crashed() == CRASHED
    await engine_is_back(whole)


async def test_an_engine_that_dies_in_mid_answer_without_a_stream_is_served_elsewhere(whole: Mesh) -> None:
    engine = whole["b"].engine
    assert engine is not None
    engine.behave(Behaviour(kind="exit_after", k=K))
    (line,) = await whole.burst("a", 1, headers=PREFER_B, tokens=TOKENS)
    assert await engine.crashed() == CRASHED
    assert line["outcome"] == "whole"
    assert line["node"] != "@b/fake"
    await engine_is_back(whole)


async def test_an_engine_that_is_silent_is_left_at_the_limit_and_named(run: Run) -> None:
    async with meshed(run.base, "silent", ("a", "b"), first_byte_ms=FIRST_BYTE_MS) as mesh:
        engine = mesh["a"].engine
        assert engine is not None
        engine.behave(Behaviour(kind="silent"))
        (line,) = await mesh.burst("a", 1, headers={"x-pairmesh-prefer": "@a"})
        assert (line["outcome"], line["node"]) == ("whole", "@b/fake")
        assert line["ended"] - line["begun"] < FIRST_BYTE_MS / 1_000 + SLACK_S
        record = await mesh["a"].get(f"/v1/decisions/{line['decision']}")
        assert [attempt["row"] for attempt in record["attempts"]] == ["@a/fake", "@b/fake"]
        assert record["attempts"][0]["first_byte_ms"] is None
        lines = await mesh.burst("a", 12)
        assert {line["outcome"] for line in lines} == {"whole"}
        after = await mesh.burst("a", 12)
        assert {line["node"] for line in after} == {"@b/fake"}, "its breaker is open"
        engine.behave(OK)
        await mesh.quiet()
        assert await mesh.violations() == []


async def test_nonsense_in_a_stream_passes_and_a_quoted_prompt_stays_out_of_every_sink(whole: Mesh) -> None:
    engine = whole["b"].engine
    assert engine is not None
    engine.behave(Behaviour(kind="garbage_chunk"))
    (line,) = await whole.burst("a", 1, headers=ONLY_B, stream_share=1.0, tokens=TOKENS)
    assert line["outcome"] == "whole"
    engine.behave(Behaviour(kind="echo_prompt_in_error"))
    (line,) = await whole.burst("a", 1, headers=ONLY_B)
    assert line["outcome"] == "refused"
    engine.behave(OK)
    lines = await whole.burst("a", 12)
    assert {line["outcome"] for line in lines} == {"whole"}


async def test_a_real_engine_that_is_killed_while_it_serves(run: Run) -> None:
    try:
        llama.find_binary()
    except llama.LlamaUnavailable as why:
        pytest.skip(str(why))
    base = run.base / "llama"
    base.mkdir()
    model = base / "tiny.gguf"
    tiny_gguf.write_model(model, name="tiny")
    lan = Lan.made("llama", ("a", "b"))
    mesh = Mesh(base=base, lan=lan, nodes={name: NodeProc.on(lan, name, base) for name in lan.hosts})
    engines = {
        name: llama.LlamaServer(
            llama.single(model, alias="tiny"), base / name / "llama.log", prefix=node.prefix, port=8000
        )
        for name, node in mesh.nodes.items()
    }
    try:
        for name, node in mesh.nodes.items():
            node.mount()
            node.write_chaos_settings()
            engines[name].start(wait=False)
            node.declare("llama", "llamacpp", engines[name].url)
        await mesh.form()
        lines = await mesh.burst("a", 4, headers=PREFER_B)
        assert {line["outcome"] for line in lines} == {"whole"}
        load = mesh.load("a", burst=6, headers=PREFER_B, stream_share=1.0, tokens=900)
        await load.start()
        await until(mesh["b"].is_busy, BACK_S, "b serves")
        engines["b"].send(signal.SIGKILL)
        await load.ended()
        assert {line["outcome"] for line in lines_of(load)} <= {"whole", "told"}
        assert invariants.reservations_end(invariants.parse(mesh["a"].trace.read_text())) == []
        after = await mesh.burst("a", 4)
        assert {(line["outcome"], line["node"]) for line in after} == {("whole", "@a/llama")}
    finally:
        await mesh.close()
        for engine in engines.values():
            engine.stop()
