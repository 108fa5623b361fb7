"""The monitor over real sockets: health, restarts, reports of the relay, and no call too many."""

import asyncio
from collections.abc import Callable

from aiohttp import web
from msgspec.structs import replace

from agent.effects.clock import SystemClock
from agent.engines.contract import EndpointHealth, EndpointStatus, LoadSource, ResidencyState
from agent.engines.monitor import TOO_LARGE, OwnRequests
from agent.settings.manifest import Caps, DeclaredModel, EngineKind
from router_core import limits
from router_core.record.state import Capability, Dialect, EngineState
from tests.support.engine_setup import QUICK, Watched, manifest
from tests.support.fakes.replay import ReplayServer, Sample
from tests.support.ports import HeldPort
from tests.support.until import until

GetSample = Callable[[str], Sample]
PATHS = {
    "/health": "health",
    "/props": "props",
    "/v1/models": "models",
    "/models": "models",
    "/metrics": "metrics",
}


def llama(sample: GetSample) -> ReplayServer:
    return ReplayServer({path: sample(f"llama-single-{name}") for path, name in PATHS.items()})


def with_metrics(server: ReplayServer, sample: GetSample, instance: str, **values: float) -> None:
    """Let ``/metrics`` tell other values, as another process if ``instance`` differs."""
    told = sample("llama-single-metrics")
    body = told.body.decode()
    for name, value in values.items():
        body = body.replace(f"\nllamacpp:{name} 0", f"\nllamacpp:{name} {value}")
    headers = {**told.headers, "Process-Start-Time-Unix": instance}
    server.routes["/metrics"] = Sample(200, headers, body.encode())


def plain(sample: GetSample) -> ReplayServer:
    models = Sample(200, {}, b'{"data":[{"id":"a"},{"id":"b"}]}')
    return ReplayServer({"/v1/models": models, "/health": Sample()})


def health(watched: Watched) -> Callable[[EndpointHealth], Callable[[], bool]]:
    return lambda wanted: lambda: watched.status().health is wanted


async def looks(watched: Watched, count: int) -> None:
    """Wait for ``count`` more good fast polls."""
    seen = {watched.status().observed_ms}

    def enough() -> bool:
        seen.add(watched.status().observed_ms)
        return len(seen) > count

    await until(enough)


async def test_an_engine_becomes_ready_once_and_urgently(sample: GetSample) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        await looks(watched, 5)
    changes = [(status.health, urgent) for status, urgent in watched.told]
    assert (EndpointHealth.READY, True) in changes
    assert len(changes) <= 2, "an unchanged engine is not told of again"
    assert watched.status().health.code is EngineState.READY


async def test_speeds_are_told_from_counters_and_a_reset_gives_no_negative_one(sample: GetSample) -> None:
    server = llama(sample)
    with_metrics(server, sample, "1", tokens_predicted_total=100, tokens_predicted_seconds_total=1)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        await looks(watched, 2)
        with_metrics(server, sample, "1", tokens_predicted_total=300, tokens_predicted_seconds_total=3)
        await until(lambda: speeds(watched) == [100.0])
        with_metrics(server, sample, "1", tokens_predicted_total=10, tokens_predicted_seconds_total=1)
        await looks(watched, 3)
        with_metrics(server, sample, "1", tokens_predicted_total=60, tokens_predicted_seconds_total=2)
        await until(lambda: speeds(watched) == [100.0, 50.0])


def speeds(watched: Watched) -> list[float]:
    loads = [status.load for status, _ in watched.told]
    return [load.tg_tps for load in loads if load is not None and load.tg_tps is not None]


async def test_another_instance_token_or_a_fallen_counter_makes_it_look_again(sample: GetSample) -> None:
    server = llama(sample)
    with_metrics(server, sample, "1", tokens_predicted_total=100)
    slow = type(QUICK)(fast_ms=50, busy_ms=50, quiet_ms=50, slow_ms=60_000, identify_ms=60_000)
    async with server.serving(), Watched(manifest(server.port), cadence=slow) as watched:
        await until(lambda: instance(watched.status()) == "1")
        for number, change in enumerate(
            ({"instance": "2", "tokens_predicted_total": 100}, {"instance": "2"}), 2
        ):
            with_metrics(server, sample, **change)  # type: ignore[arg-type]
            await until(lambda wanted=number: server.calls.count(("GET", "/health")) == wanted)  # type: ignore[misc]
            await until(lambda wanted=number: server.calls.count(("GET", "/v1/models")) == wanted)  # type: ignore[misc]
        assert instance(watched.status()) == "2"


def instance(status: EndpointStatus) -> str | None:
    return status.identity.instance if status.identity is not None else None


async def test_an_engine_that_changes_its_kind_is_refused_for_good(sample: GetSample) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        server.routes = dict(plain(sample).routes)
        await until(health(watched)(EndpointHealth.REFUSED))
        assert watched.status().reason == "identity_changed"
        calls = len(server.calls)
        server.routes = dict(llama(sample).routes)
        await asyncio.sleep(0)
        watched.watch.report_denied("here", "tiny", Dialect.CHAT)
        await until(lambda: watched.status().health is EndpointHealth.REFUSED)
        assert len(server.calls) == calls


async def test_a_loop_to_ourselves_is_refused(sample: GetSample) -> None:
    server = ReplayServer(plain(sample).routes, server="pairmesh")
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.REFUSED))
        assert watched.status().reason == "self_loop"
        assert watched.status().health.code is EngineState.DOWN


async def test_an_engine_that_still_loads_is_starting_and_then_ready(sample: GetSample) -> None:
    loading = Sample(
        503, {"Server": "llama.cpp"}, b'{"error":{"message":"Loading model","type":"unavailable_error"}}'
    )
    server = ReplayServer({"/health": loading})
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.STARTING))
        assert not watched.status().health.takes_requests
        server.routes = dict(llama(sample).routes)
        await until(health(watched)(EndpointHealth.READY))


async def test_garbage_is_health_and_never_a_crash(sample: GetSample) -> None:
    garbage = [
        Sample(200, {}, b"\x00\xff" * 100),
        Sample(200, {}, b"[1,2,3]"),
        Sample(200, {}, b'{"data":"none"}'),
        Sample(200, {}, b'{"data":[{"id":7},{"id":{"a":1}},null]}'),
        Sample(500, {}, b"oops"),
        Sample(200, {}, b"[" * 50_000),
    ]
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        for wrong in garbage:
            server.routes["/v1/models"] = server.routes["/metrics"] = wrong
            calls = len(server.calls)
            await until(lambda: not watched.status().health.takes_requests)
            await until(lambda before=calls: len(server.calls) > before + 10)  # type: ignore[misc]
            server.routes = dict(llama(sample).routes)
            await until(health(watched)(EndpointHealth.READY))


async def test_while_only_the_fast_poll_fails_requests_go_on_and_facts_age(sample: GetSample) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        server.routes["/metrics"] = Sample(501)
        await until(health(watched)(EndpointHealth.DEGRADED))
        assert watched.status().health.takes_requests
        assert watched.status().health.code is EngineState.READY
        seen = watched.status().observed_ms
        await until(lambda: server.calls.count(("GET", "/v1/models")) > 3)
        assert watched.status().observed_ms == seen


async def test_metrics_that_wait_for_a_long_batch_leave_the_load_unknown_and_the_engine_ready(
    sample: GetSample,
) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3_600)
        return web.Response()

    server = llama(sample)
    server.routes["/metrics"] = never
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(lambda: watched.status().observed_ms is not None)
        assert watched.status().load is not None
        assert watched.status().load.source is LoadSource.OWN  # type: ignore[union-attr]
        assert watched.status().health.takes_requests


async def test_a_connect_failure_the_relay_saw_takes_the_endpoint_away_until_it_answers(
    sample: GetSample,
) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        watched.told.clear()
        watched.watch.report_connect_failed("here")
        assert watched.status().health is EndpointHealth.UNREACHABLE
        assert watched.status().resident == ()
        assert watched.told[-1][1], "told at once and as urgent"
        await until(health(watched)(EndpointHealth.READY))
        assert [model.state for model in watched.status().resident] == [ResidencyState.RESIDENT]


async def test_a_model_the_engine_denied_makes_it_read_the_list_at_once(sample: GetSample) -> None:
    server = plain(sample)
    lazy = type(QUICK)(fast_ms=50, slow_ms=60_000)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI), cadence=lazy) as watched:
        await until(lambda: len(watched.status().owned) == 2)
        server.routes["/v1/models"] = Sample(200, {}, b'{"data":[{"id":"b"}]}')
        watched.watch.report_denied("here", "a", Dialect.CHAT)
        await until(lambda: [model.name for model in watched.status().owned] == ["b"])
        assert watched.status().dialects & Dialect.CHAT, "one model's 404 takes no dialect from another"


async def test_a_refusal_the_relay_saw_takes_nothing_away_unless_the_list_is_refused_too(
    sample: GetSample,
) -> None:
    server = plain(sample)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        asked = server.calls.count(("GET", "/v1/models"))
        watched.watch.report_auth("here")
        await until(lambda: server.calls.count(("GET", "/v1/models")) > asked)
        assert watched.status().health is EndpointHealth.READY
        server.routes["/v1/models"] = Sample(401)
        await until(health(watched)(EndpointHealth.UNAUTHORISED))


async def test_a_route_that_was_only_assumed_is_withdrawn_for_a_while_once_the_list_still_has_the_model(
    sample: GetSample,
) -> None:
    server = llama(sample)
    slow = type(QUICK)(fast_ms=50, busy_ms=50, quiet_ms=50, slow_ms=60_000, withdrawn_ms=300)
    async with server.serving(), Watched(manifest(server.port), cadence=slow) as watched:
        await until(health(watched)(EndpointHealth.READY))
        watched.watch.report_denied("here", "tiny", Dialect.RERANK)
        watched.watch.report_denied("here", "tiny", Dialect.CHAT)
        await until(lambda: Dialect.RERANK not in watched.status().dialects)
        assert Dialect.CHAT in watched.status().dialects
        assert watched.status().lacking == ("rerank",)
        await until(lambda: Dialect.RERANK in watched.status().dialects)
        assert watched.status().lacking == ()


async def test_a_route_that_has_served_stays_whatever_a_caller_gets(sample: GetSample) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        watched.watch.report_served("here", Dialect.RERANK)
        watched.watch.report_denied("here", "tiny", Dialect.RERANK)
        asked = server.calls.count(("GET", "/v1/models"))
        await until(lambda: server.calls.count(("GET", "/v1/models")) > asked + 1)
        assert Dialect.RERANK in watched.status().dialects


async def test_that_one_of_several_models_does_not_embed_takes_embeddings_from_no_other(
    sample: GetSample,
) -> None:
    server = plain(sample)
    slow = type(QUICK)(fast_ms=50, busy_ms=50, quiet_ms=50, slow_ms=60_000)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI), cadence=slow) as watched:
        await until(lambda: len(watched.status().owned) == 2)
        watched.watch.report_denied("here", "a", Dialect.EMBED)
        await until(lambda: watched.status().lacking == ("embed of a",))
        status = watched.status()
        assert status.dialects & Dialect.EMBED
        lacking = {model.name: Capability.EMBEDDINGS in model.caps.known for model in status.owned}
        assert lacking == {"a": True, "b": False}


async def never(request: web.Request) -> web.StreamResponse:
    """Accepts, and says nothing."""
    await asyncio.sleep(3_600)
    return web.Response()


def deafen(server: ReplayServer) -> None:
    for path in server.routes:
        server.routes[path] = never


async def test_an_engine_that_is_deaf_while_it_works_as_much_as_never_before_is_doubted_and_not_silent(
    sample: GetSample,
) -> None:
    server = plain(sample)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        deafen(server)
        watched.watch.report_work("here", 1, began=True)
        await until(health(watched)(EndpointHealth.DEAF), 20)
        status = watched.status()
        assert (status.health.code, status.health.takes_requests) == (EngineState.FAILING, True)
        assert len(status.resident) == 2
        watched.watch.report_served("here", Dialect.CHAT)
        calls = len(server.calls)
        await until(lambda: len(server.calls) >= calls + 4, 20)
        assert watched.status().health in (EndpointHealth.READY, EndpointHealth.DEGRADED), (
            "it is known to be deaf, and works"
        )


async def test_an_engine_that_answered_with_as_much_to_do_is_silent_after_three_questions_and_back_with_one_answer(
    sample: GetSample,
) -> None:
    server = plain(sample)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        watched.watch.report_work("here", 2, began=True)
        await looks(watched, 2)
        routes = dict(server.routes)
        deafen(server)
        began = asyncio.get_running_loop().time()
        await until(health(watched)(EndpointHealth.SILENT), 20)
        assert asyncio.get_running_loop().time() - began < 8.0
        status, urgent = watched.told[-1]
        assert (status.health.code, status.reason, urgent) == (EngineState.FAILING, "silent", True)
        assert [model.state for model in status.resident] == [ResidencyState.RESIDENT] * 2, (
            "it forgets nothing"
        )
        assert status.health.takes_requests
        server.routes = routes
        await until(health(watched)(EndpointHealth.READY))


async def test_a_byte_of_its_own_work_makes_up_for_questions_that_it_does_not_answer(
    sample: GetSample,
) -> None:
    server = plain(sample)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        watched.watch.progress = lambda name: OwnRequests(last_byte_ms=SystemClock().boot_ms())
        deafen(server)
        calls = len(server.calls)
        await until(lambda: len(server.calls) >= calls + 5, 20)
        assert watched.status().health is not EndpointHealth.SILENT


async def test_an_engine_that_answers_questions_and_lets_all_requests_wait_is_stuck_until_one_moves(
    sample: GetSample,
) -> None:
    server = plain(sample)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        now = SystemClock().boot_ms()
        watched.watch.report_work("here", 1, began=True)
        waiting = OwnRequests(newest_ms=now - 61_000.0, all_overdue=True)
        monitor = watched.watch._monitors["here"]
        monitor._moved_ms = now - 61_000
        watched.watch.progress = lambda name: replace(waiting, all_overdue=False)
        await looks(watched, 3)
        assert watched.status().health is EndpointHealth.READY
        watched.watch.progress = lambda name: waiting
        await until(health(watched)(EndpointHealth.STUCK))
        assert watched.status().health.code is EngineState.FAILING
        watched.watch.progress = lambda name: replace(waiting, last_byte_ms=float(SystemClock().boot_ms()))
        await until(health(watched)(EndpointHealth.READY))


async def test_own_requests_are_the_load_where_nothing_else_tells_it(sample: GetSample) -> None:
    server = plain(sample)
    described = manifest(server.port, EngineKind.OPENAI, slots=2)
    async with server.serving():
        described = manifest(server.port, EngineKind.OPENAI, slots=2)
        async with Watched(described) as watched:
            await until(health(watched)(EndpointHealth.READY))
            for in_flight, expected in ((1, (1, 0)), (5, (2, 3)), (0, (0, 0))):
                watched.watch.report_work("here", in_flight)
                load = watched.status().load
                assert load is not None
                assert (load.running, load.waiting) == expected
        assert (watched.status().slots, watched.status().max_queue) == (2, 4)


async def test_the_operators_facts_beat_the_engines_and_of_two_limits_the_smaller_counts(
    sample: GetSample,
) -> None:
    server = llama(sample)
    tools = Caps(known=Capability.TOOLS | Capability.VISION, has=Capability.TOOLS)
    declared = (
        DeclaredModel(
            name="org/small", upstream_name="tiny", aliases=("s",), quant="Q4_0", ctx_max=1_000, caps=tools
        ),
    )
    async with server.serving(), Watched(manifest(server.port, models=declared)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        status = watched.status()
    (owned,) = status.owned
    assert (owned.name, owned.native_id, owned.aliases) == ("org/small", "tiny", ("s",))
    assert (owned.quant, owned.ctx_max, owned.ctx_served) == ("Q4_0", 1_000, 1_000)
    assert owned.params_b == 0.000925248
    assert owned.caps.has == Capability.TOOLS
    assert (status.native_id("org/small"), status.native_id("s"), status.native_id("tiny")) == (
        "tiny",
        "tiny",
        None,
    )


async def test_of_a_server_outside_only_declared_models_are_offered_and_its_list_is_not_fetched_again(
    sample: GetSample,
) -> None:
    server = plain(sample)
    big = DeclaredModel(name="big", upstream_name="a")
    async with server.serving():
        declared = manifest(server.port, EngineKind.OPENAI, models=(big,))
        async with Watched(replace(declared, cloud=True, remote_host=True)) as watched:
            await until(health(watched)(EndpointHealth.READY))
            assert [(model.name, model.native_id) for model in watched.status().owned] == [("big", "a")]
    assert [path for _, path in server.calls].count("/v1/models") == 1, "to know that it is one"


async def test_of_a_hundred_thousand_models_the_first_are_looked_at_off_the_loop_and_the_rest_is_told() -> (
    None
):
    ids = ",".join(f'{{"id":"m{number}"}}' for number in range(100_000))
    unfit = '{"id":"a b"},{"id":"../x"},{"id":""},{"id":"' + "x" * 200 + '"}'
    server = ReplayServer(
        {"/v1/models": Sample(200, {}, f'{{"data":[{unfit},{ids}]}}'.encode()), "/health": Sample()}
    )
    loop, beats = asyncio.get_running_loop(), []

    async def beat() -> None:
        while True:
            began = loop.time()
            await asyncio.sleep(0.001)
            beats.append(loop.time() - began)

    async with server.serving():
        beating = asyncio.create_task(beat())
        async with Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
            await until(health(watched)(EndpointHealth.READY))
            status = watched.status()
        beating.cancel()
    assert len(status.owned) == limits.ENGINE_MODELS - 4
    assert (status.unfit_names, status.more_models) == (3, 100_004 - limits.ENGINE_MODELS)
    assert sorted(beats)[-1] < 0.25


async def test_a_list_too_long_to_be_read_leaves_the_last_one_and_is_told_if_there_was_none() -> None:
    huge = Sample(200, {}, b'{"data":[' + b" " * limits.ENGINE_LIST_BODY + b"]}")
    server = ReplayServer({"/v1/models": Sample(200, {}, b'{"data":[{"id":"a"}]}'), "/health": Sample()})
    async with server.serving():
        async with Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
            await until(health(watched)(EndpointHealth.READY))
            server.routes["/v1/models"] = huge
            await looks(watched, 10)
            assert [model.name for model in watched.status().owned] == ["a"]
            assert watched.status().health.takes_requests
        async with Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
            await until(lambda: watched.status().reason == TOO_LARGE)


async def test_a_change_of_a_plain_servers_models_is_seen_at_the_next_look() -> None:
    server = ReplayServer({"/v1/models": Sample(200, {}, b'{"data":[{"id":"a"}]}'), "/health": Sample()})
    lazy = type(QUICK)(fast_ms=50, slow_ms=60_000)
    async with server.serving(), Watched(manifest(server.port, EngineKind.OPENAI), cadence=lazy) as watched:
        await until(health(watched)(EndpointHealth.READY))
        server.routes["/v1/models"] = Sample(200, {}, b'{"data":[{"id":"b","max_model_len":512}]}')
        await until(lambda: [model.name for model in watched.status().owned] == ["b"])
        assert watched.status().resident[0].ctx == 512


async def test_nothing_but_get_of_known_routes_is_ever_sent(sample: GetSample) -> None:
    server = llama(sample)
    async with server.serving(), Watched(manifest(server.port)) as watched:
        await until(health(watched)(EndpointHealth.READY))
        await looks(watched, 10)
    assert {method for method, _ in server.calls} == {"GET"}
    assert {path for _, path in server.calls} <= {"/health", "/props", "/models", "/v1/models", "/metrics"}


async def test_a_closed_port_is_unreachable_and_tried_again(sample: GetSample) -> None:
    held = HeldPort()
    async with Watched(manifest(held.port)) as watched:
        await until(lambda: watched.status().reason == "unreachable" or watched.status().reason is None)
        server = llama(sample)
        async with server.serving(held.port):
            await until(health(watched)(EndpointHealth.READY))


async def test_the_watch_closes_everything_it_opened(sample: GetSample) -> None:
    server = plain(sample)
    async with server.serving():
        before = len(asyncio.all_tasks())
        async with Watched(manifest(server.port, EngineKind.OPENAI)) as watched:
            await until(health(watched)(EndpointHealth.READY))
        await until(lambda: len(asyncio.all_tasks()) <= before + 1)
