"""The adapters, the monitor and the readers of answers against real llama-servers."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent.engines.classify import classify
from agent.engines.contract import (
    EndpointHealth,
    FinishReason,
    LoadSource,
    ResidencyState,
    ResponseMarks,
    TimingSource,
)
from agent.engines.monitor import Cadence
from agent.engines.timings import HEAD_BYTES, TAIL_BYTES, read_timings
from agent.settings.manifest import Caps, DeclaredModel, EngineKind
from router_core.record.state import Capability, Dialect, LoadPolicy
from router_core.router.failure import FailureClass
from tests.agent.engines.conftest import StartLlama
from tests.support.engine_setup import Watched, manifest
from tests.support.llama import LlamaServer, router, single
from tests.support.tiny_gguf import write_model
from tests.support.until import until

HELLO = [{"role": "user", "content": "hello world"}]
LAZY = Cadence(busy_ms=60_000, fast_ms=60_000, quiet_ms=60_000, slow_ms=60_000)
"""Polls so rare that only a pushed event can tell anything in time."""


async def post(server: LlamaServer, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json=body, headers=headers) as r,
    ):
        return r.status, await r.read()


async def chat(server: LlamaServer, **fields: Any) -> tuple[int, bytes]:
    return await post(server, "/v1/chat/completions", {"model": "tiny", "messages": HELLO, **fields})


async def stream(server: LlamaServer, path: str, body: dict[str, Any]) -> tuple[bytes, ResponseMarks]:
    """A streamed answer and the marks a relay would take."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, json={**body, "stream": True}) as answer,
    ):
        head = loop.time()
        chunks = [(loop.time(), line) async for line in answer.content]
    content = [at for at, line in chunks if b'"content":"' in line or b'"type":"text_delta"' in line]
    marks = ResponseMarks(
        sent_ms=started * 1e3,
        head_ms=head * 1e3,
        first_byte_ms=chunks[0][0] * 1e3,
        first_content_ms=content[0] * 1e3,
        last_byte_ms=chunks[-1][0] * 1e3,
        content_events=len(content),
    )
    return b"".join(line for _, line in chunks), marks


def taught(body: bytes, marks: ResponseMarks) -> Any:
    return read_timings(body[:HEAD_BYTES], body[-TAIL_BYTES:], marks)


def states(watched: Watched) -> dict[str, ResidencyState]:
    return {model.native_id: model.state for model in watched.status().resident}


async def test_one_model_is_seen_with_its_size_context_slots_and_load(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny,little", ctx=2048, parallel=2))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        status = watched.status()
    (owned,) = status.owned
    assert {owned.name, *owned.aliases} == {"tiny", "little"}
    assert (owned.ctx_served, owned.ctx_max, owned.parallel, owned.quant) == (1024, 4096, 2, "F16")
    assert owned.size_bytes is not None
    assert abs(owned.size_bytes - (models / "tiny.gguf").stat().st_size) < 100_000
    assert (status.slots, status.max_queue) == (2, 4)
    assert status.load is not None
    assert (status.load.source, status.load.running, status.load.waiting) == (LoadSource.ENGINE, 0, 0)
    assert Dialect.MESSAGES in status.dialects
    assert Dialect.EMBED in status.dialects, "whether it embeds is not told, and not told is not no"
    assert status.identity is not None
    assert status.identity.instance is not None


async def test_a_model_without_alias_is_offered_under_its_file_name_alone(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf"))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        (owned,) = watched.status().owned
    assert owned.name == "tiny.gguf"
    assert owned.native_id == str(models / "tiny.gguf")
    assert owned.aliases == ()


async def test_a_server_with_one_model_is_never_sent_a_foreign_id(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny"))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        status = watched.status()
    assert (await post(server, "/v1/completions", {"model": "other", "prompt": "a", "max_tokens": 1}))[
        0
    ] == 200
    assert status.native_id("tiny") == "tiny"
    assert status.native_id("other") is None


async def test_requests_in_hand_and_speeds_are_seen_while_and_after_they_run(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "mid.gguf", alias="tiny", parallel=1))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)

        def used() -> list[float]:
            return [m.kv_used for s, _ in watched.told for m in s.resident if m.kv_used is not None]

        def full() -> bool:
            return any(s.load and (s.load.running, s.load.waiting) == (1, 1) for s, _ in watched.told)

        async def ask(number: int) -> None:
            while not (full() and used()):
                await chat(server, max_tokens=200, seed=number)

        requests = [asyncio.create_task(ask(number)) for number in range(2)]
        await until(lambda: full() and used())
        await asyncio.gather(*requests)
        await until(lambda: [s for s, _ in watched.told if s.load and s.load.tg_tps])
        await until(lambda: watched.status().load.running == 0)  # type: ignore[union-attr]
        assert all(0 < share <= 1 for share in used())


async def test_router_mode_stays_empty_however_often_it_is_looked_at(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        await looks(watched, 30)
        status = watched.status()
    assert status.resident == ()
    assert {model.name for model in status.owned} == {"tiny", "mid", "broken"}
    assert {model.ctx_served for model in status.owned} == {1024}
    weights = {model.name: model.size_bytes for model in status.owned}
    assert weights == {name: (models / f"{name}.gguf").stat().st_size for name in weights}
    assert status.load_policy is LoadPolicy.ON_DEMAND
    async with aiohttp.ClientSession() as session, session.get(server.url + "/models") as answer:
        listed = await answer.json()
    assert {item["status"]["value"] for item in listed["data"]} == {"unloaded"}


async def test_a_load_and_an_unload_are_urgent_within_a_second_although_polls_are_slow(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port), cadence=LAZY) as watched:
        await until(lambda: watched.status().observed_ms is not None and watched.status().owned)
        watched.told.clear()
        assert (await post(server, "/models/load", {"model": "tiny"}))[0] == 200
        await until(lambda: states(watched) == {"tiny": ResidencyState.RESIDENT})
        (warm,) = [s for s, urgent in watched.told if urgent and _is(s, ResidencyState.RESIDENT)][:1]
        assert any(urgent and _is(status, ResidencyState.LOADING) for status, urgent in watched.told)
        await until(lambda: watched.status().owned[-1].size_bytes)
        assert (await post(server, "/models/unload", {"model": "tiny"}))[0] == 200
        await until(lambda: states(watched) == {})
        status, urgent = watched.told[-1]
    assert urgent
    assert status.resident == ()
    assert warm.health is EndpointHealth.READY
    tiny = next(model for model in status.owned if model.name == "tiny")
    assert tiny.quant == "F16", "what a load taught about the weights is kept after the unload"


async def looks(watched: Watched, count: int) -> None:
    """Wait for ``count`` more fast polls."""
    seen: set[int | None] = set()

    def enough() -> bool:
        seen.add(watched.status().observed_ms)
        return len(seen) > count

    await until(enough)


def _is(status: Any, state: ResidencyState) -> bool:
    return [model.state for model in status.resident] == [state]


async def test_a_model_that_cannot_be_loaded_is_told_as_failed(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        await post(server, "/models/load", {"model": "broken"})
        await until(lambda: states(watched) == {"broken": ResidencyState.FAILED})


async def test_a_sleeping_model_is_seen_and_not_woken_by_looking(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny", sleep_idle_s=1))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: states(watched) == {"tiny": ResidencyState.SLEEPING})
        await looks(watched, 30)
        assert states(watched) == {"tiny": ResidencyState.SLEEPING}
        status = watched.status()
    assert status.load is not None
    assert status.load.source is LoadSource.OWN
    assert status.load_policy is LoadPolicy.ON_DEMAND, "a request wakes it"
    assert (await chat(server, max_tokens=1))[0] == 200


async def test_a_killed_and_restarted_server_is_gone_then_back_as_another_instance(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny"))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        first = watched.status().identity
        server.send(signal.SIGKILL)
        await until(lambda: watched.status().health is EndpointHealth.UNREACHABLE)
        assert watched.status().resident == ()
        assert watched.status().owned, "what it owns stays known"
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await until(lambda: watched.status().health is EndpointHealth.READY)
        second = watched.status().identity
    assert first is not None
    assert second is not None
    assert first.instance != second.instance


async def test_the_end_of_a_router_is_noticed_through_its_event_stream(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port), cadence=LAZY) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        server.send(signal.SIGKILL)
        await until(lambda: watched.status().health is EndpointHealth.UNREACHABLE)


async def test_a_wrong_key_is_unauthorised_and_the_right_one_is_not(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny", api_key="key of right"))
    entries = [manifest(server.port, name=name, credential=name) for name in ("right", "wrong")]
    async with Watched(*entries) as watched:
        await until(lambda: watched.status("right").health is EndpointHealth.READY)
        await until(lambda: watched.status("wrong").health is EndpointHealth.UNAUTHORISED)
        assert not watched.status("wrong").health.takes_requests


async def test_an_engine_that_contradicts_its_manifest_is_refused(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf"))
    async with Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.REFUSED)
        assert watched.status().reason == "identity_changed"


async def test_an_engine_on_a_known_loopback_port_is_found_and_named_after_its_kind(
    start_llama: StartLlama, models: Path
) -> None:
    one, two = (start_llama(single(models / "tiny.gguf", alias="tiny")) for _ in range(2))
    async with Watched(ports=(one.port, two.port)) as watched:
        await until(lambda: len(watched.watch.endpoints()) == 2)
        await until(lambda: all(s.health is EndpointHealth.READY for s in watched.watch.endpoints().values()))
        found = watched.watch.endpoints()
    assert set(found) == {"llamacpp", "llamacpp-2"}
    assert all(status.detected for status in found.values())
    assert found["llamacpp"].base == ("127.0.0.1", one.port)


async def test_failures_of_a_single_server_fall_into_their_classes(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny", ctx=512, parallel=1, api_key="k"))
    long = [{"role": "user", "content": "zz " * 2_000}]
    with_key = {"Authorization": "Bearer k"}
    path = "/v1/chat/completions"
    assert classify("llamacpp", *await post(server, path, {"messages": HELLO})) is FailureClass.AUTH
    told = await post(server, path, {"messages": long}, **with_key)
    assert classify("llamacpp", *told) is FailureClass.TOO_LONG
    told = await post(server, "/v1/no-such-route", {}, **with_key)
    assert classify("llamacpp", *told) is FailureClass.ROUTE
    told = await post(server, "/v1/embeddings", {"input": "a"}, **with_key)
    assert classify("llamacpp", *told) is FailureClass.ROUTE
    told = await post(server, path, {"messages": "no list"}, **with_key)
    assert classify("llamacpp", *told) is FailureClass.OTHER


async def test_failures_of_a_router_fall_into_their_classes(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(router(models))
    told = await chat(server, model="no-such-model")
    assert classify("llamacpp", *told) is FailureClass.ABSENT
    told = await chat(server, model="broken")
    assert classify("llamacpp", *told) is FailureClass.LOAD_FAILED


async def test_refusals_of_a_server_that_still_loads_are_of_class_loading(
    start_llama: StartLlama, models: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "big.gguf", size_mb=150)
    server = start_llama(single(models / "tiny.gguf"))
    await asyncio.to_thread(server.stop)
    server.arguments = single(tmp_path / "big.gguf", alias="tiny")
    server.start(wait=False)
    told: list[tuple[int, bytes]] = []

    async def answered() -> bool:
        try:
            told.append(await chat(server, max_tokens=1))
        except aiohttp.ClientError:
            return False
        return told[-1][0] == 200

    while not await answered():
        await asyncio.sleep(0)
    assert {classify("llamacpp", *failure) for failure in told[:-1]} == {FailureClass.LOADING}


@pytest.mark.parametrize("include_usage", [True, False])
async def test_timings_of_a_stream_are_the_engines_own_within_one_percent(
    start_llama: StartLlama, models: Path, include_usage: bool
) -> None:
    server = start_llama(single(models / "mid.gguf", alias="tiny"))
    body = {"messages": [{"role": "user", "content": "hello world " * 60}], "max_tokens": 60}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    raw, marks = await stream(server, "/v1/chat/completions", body)
    told = json.loads(raw[raw.rindex(b'"timings":') + 10 :].split(b"}")[0] + b"}")
    timings = taught(raw, marks)
    assert timings.source is TimingSource.ENGINE
    assert timings.finish is FinishReason.LENGTH
    assert (timings.gen_tokens, timings.prompt_tokens) == (60, told["prompt_n"])
    assert timings.tg_tps == pytest.approx(told["predicted_per_second"], rel=0.01)
    assert timings.pp_tps == pytest.approx(told["prompt_per_second"], rel=0.01)
    if include_usage:
        usage = json.loads(raw[raw.rindex(b'"usage":') + 8 :].split(b"}}")[0] + b"}}")
        assert marks.content_events == usage["completion_tokens"]


async def test_a_cached_prompt_gives_no_prompt_speed(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny", parallel=1))
    body = {"messages": [{"role": "user", "content": "hello world " * 60}], "max_tokens": 4}
    cold = taught(*await stream(server, "/v1/chat/completions", body))
    warm = taught(*await stream(server, "/v1/chat/completions", body))
    assert cold.pp_tps is not None
    assert warm.cached_tokens > 64
    assert warm.pp_tps is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 40}),
        ("/v1/messages", {"model": "tiny", "messages": HELLO, "max_tokens": 40}),
        ("/v1/responses", {"model": "tiny", "input": "hello", "max_output_tokens": 40}),
    ],
)
async def test_every_dialect_tells_its_token_counts(
    start_llama: StartLlama, models: Path, path: str, body: dict[str, Any]
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny"))
    _, raw = await post(server, path, body)
    marks = ResponseMarks(sent_ms=0, head_ms=50, last_byte_ms=50)
    assert taught(raw, marks).gen_tokens == 40
    assert taught(raw, marks).prompt_tokens > 0


async def test_an_embedding_server_embeds(start_llama: StartLlama, models: Path) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny", embedding=True))
    status, raw = await post(server, "/v1/embeddings", {"model": "tiny", "input": "hello"})
    assert status == 200
    assert len(json.loads(raw)["data"][0]["embedding"]) == 64


async def test_a_model_that_the_manifest_says_cannot_embed_is_not_offered_for_it(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(single(models / "tiny.gguf", alias="tiny"))
    declared = (DeclaredModel(name="tiny", caps=Caps(known=Capability.EMBEDDINGS)),)
    async with Watched(manifest(server.port, models=declared)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        assert Dialect.EMBED not in watched.status().dialects
        assert Dialect.CHAT in watched.status().dialects


async def test_the_models_of_a_router_tell_by_their_arguments_that_they_do_not_embed(
    start_llama: StartLlama, models: Path
) -> None:
    server = start_llama(router(models))
    async with Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().health is EndpointHealth.READY)
        assert Dialect.EMBED not in watched.status().dialects
