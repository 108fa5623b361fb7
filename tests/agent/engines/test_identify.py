"""Which engine answers, told from recorded answers and from made-up impostors."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from agent.engines.contract import EngineMisspoke, EngineRefusal, EngineUnreachable, Identity
from agent.engines.identify import Starting, Verdict, identify
from agent.engines.openai import OpenAiPlain
from agent.settings.manifest import DeclaredModel, EngineKind, Manifest
from router_core.record.state import Dialect
from tests.support.engine_setup import client_of, manifest
from tests.support.fakes.replay import ReplayServer, Sample
from tests.support.ports import HeldPort

GetSample = Callable[[str], Sample]
LLAMA_404 = Sample(404, {"Server": "llama.cpp"}, b'{"error":{"message":"File Not Found","code":404}}')


async def told(
    server: ReplayServer, engine: EngineKind | None = None, models: tuple[DeclaredModel, ...] = ()
) -> Verdict:
    async with server.serving(), client_of(manifest(server.port)) as client:
        described = manifest(server.port, engine, models=models) if engine is not None else None
        verdict = await identify(client, described)
    assert all(method == "GET" for method, _ in server.calls)
    return verdict


async def test_a_single_llama_server_is_known(sample: GetSample) -> None:
    routes = {path: sample(f"llama-single-{path[1:]}") for path in ("/health", "/props")}
    verdict = await told(ReplayServer({**routes, "/models": sample("llama-single-models")}))
    assert isinstance(verdict, Identity)
    assert (verdict.engine, verdict.flavour, verdict.version) == ("llamacpp", "single", "b1-86a2835")
    assert verdict.metrics
    assert not verdict.pushes_state


async def test_a_llama_router_is_known_by_its_role_or_by_the_states_in_its_list(sample: GetSample) -> None:
    health = sample("llama-router-health")
    props = Sample(200, health.headers, b'{"role":"router","models_autoload":true,"build_info":"b1"}')
    by_role = await told(ReplayServer({"/health": health, "/props": props}))
    by_list = await told(ReplayServer({"/health": health, "/models": sample("llama-router-models")}))
    for verdict in (by_role, by_list):
        assert isinstance(verdict, Identity)
        assert (verdict.flavour, verdict.pushes_state, verdict.loads_on_demand) == ("router", True, True)


async def test_a_router_that_loads_nothing_by_itself_is_told_as_such(sample: GetSample) -> None:
    props = Sample(200, {}, b'{"role":"router","models_autoload":false,"build_info":"b1"}')
    verdict = await told(ReplayServer({"/health": sample("llama-router-health"), "/props": props}))
    assert isinstance(verdict, Identity)
    assert not verdict.loads_on_demand


async def test_old_llama_cpp_is_not_ollama_although_it_answers_api_tags(sample: GetSample) -> None:
    routes = {
        "/health": sample("llama-2026-04-health"),
        "/props": sample("llama-2026-04-props"),
        "/v1/models": sample("llama-2026-04-models"),
        "/api/tags": Sample(200, {}, b'{"models":[]}'),
    }
    verdict = await told(ReplayServer(routes))
    assert isinstance(verdict, Identity)
    assert (verdict.engine, verdict.flavour) == ("llamacpp", "single")


async def test_llama_cpp_behind_a_proxy_that_hides_its_name_is_known_by_its_props(sample: GetSample) -> None:
    props = sample("llama-single-props")
    server = ReplayServer({"/health": Sample(), "/props": props}, server="nginx")
    verdict = await told(server)
    assert isinstance(verdict, Identity)
    assert verdict.engine is EngineKind.LLAMACPP


async def test_a_llama_server_that_loads_is_starting() -> None:
    loading = Sample(
        503, {"Server": "llama.cpp"}, b'{"error":{"message":"Loading model","type":"unavailable_error"}}'
    )
    assert await told(ReplayServer({"/health": loading})) == Starting(engine=EngineKind.LLAMACPP)


async def test_ollama_is_not_taken_for_a_plain_server_although_it_has_an_openai_list() -> None:
    routes = {
        "/api/version": Sample(200, {}, b'{"version":"0.13.3"}'),
        "/api/ps": Sample(200, {}, b'{"models":[]}'),
        "/v1/models": Sample(200, {}, b'{"object":"list","data":[]}'),
    }
    verdict = await told(ReplayServer(routes))
    assert isinstance(verdict, Identity)
    assert (verdict.engine, verdict.version) == (EngineKind.OLLAMA, "0.13.3")


@pytest.mark.parametrize("server", ["pairmesh", "pairmesh/0.1.0"])
async def test_pairmesh_itself_is_a_self_loop(server: str) -> None:
    assert await told(ReplayServer({}, server=server)) is EngineRefusal.SELF_LOOP


async def test_a_pair_proxy_is_not_adopted_by_itself() -> None:
    conflict = Sample(409, {}, b'{"code":"proxy-facade","error":"identity probe"}')
    assert await told(ReplayServer({"/health": conflict})) is EngineRefusal.PAIR_NOT_ADOPTED


async def test_any_server_with_an_openai_list_is_plain(sample: GetSample) -> None:
    verdict = await told(ReplayServer({"/v1/models": sample("llama-cpp-python-0.3.36-models")}))
    assert isinstance(verdict, Identity)
    assert (verdict.engine, verdict.flavour) == ("openai", "plain")
    assert verdict.dialects == Dialect.CHAT | Dialect.COMPLETION


async def test_a_plain_server_speaks_what_its_own_description_tells(sample: GetSample) -> None:
    openapi = Sample(200, {}, b'{"paths":{"/v1/chat/completions":{},"/v1/embeddings":{},"/v1/messages":{}}}')
    models = sample("llama-cpp-python-0.3.36-models")
    verdict = await told(ReplayServer({"/v1/models": models, "/openapi.json": openapi}))
    assert isinstance(verdict, Identity)
    assert verdict.dialects == Dialect.CHAT | Dialect.EMBED | Dialect.MESSAGES


async def test_a_server_that_cannot_list_is_plain_only_with_a_declared_inventory(sample: GetSample) -> None:
    def transformers() -> ReplayServer:
        return ReplayServer(
            {
                "/health": sample("transformers-5.19.0-serve-health"),
                "/v1/models": sample("transformers-5.19.0-serve-models"),
            }
        )

    assert await told(transformers()) is None
    assert await told(transformers(), EngineKind.OPENAI) is None
    declared = (DeclaredModel(name="hf-tiny"),)
    assert isinstance(await told(transformers(), EngineKind.OPENAI, declared), Identity)


async def test_a_web_site_is_no_engine() -> None:
    page = Sample(200, {"Content-Type": "text/html"}, b"<html>hello</html>")
    assert (
        await told(ReplayServer({"/health": page, "/v1/models": page, "/props": page, "/api/version": page}))
        is None
    )


async def test_a_manifest_that_names_another_engine_is_contradicted(sample: GetSample) -> None:
    routes = {path: sample(f"llama-single-{path[1:]}") for path in ("/health", "/props", "/models")}
    assert await told(ReplayServer(routes), EngineKind.OPENAI) is EngineRefusal.IDENTITY_CHANGED
    assert await told(ReplayServer(routes), EngineKind.VLLM) is EngineRefusal.UNSUPPORTED


async def test_a_refused_key_is_told_apart_from_no_engine(sample: GetSample) -> None:
    denied = Sample(401, {"Server": "llama.cpp"}, b'{"error":{"message":"Invalid API Key"}}')
    with pytest.raises(EngineMisspoke) as caught:
        await told(ReplayServer({"/health": sample("llama-single-health"), "/props": denied}))
    assert caught.value.reason == "auth"


async def test_a_closed_port_is_unreachable() -> None:
    closed = HeldPort()
    described = manifest(closed.port)
    async with client_of(described) as client:
        with pytest.raises(EngineUnreachable) as caught:
            await identify(client, described)
    assert caught.value.reason == "connect"


def below(port: int, models: tuple[DeclaredModel, ...] = ()) -> Manifest:
    plain = manifest(port, EngineKind.OPENAI, models=models)
    return replace(plain, url=replace(plain.url, path="/openai/v1"))


async def below_path(server: ReplayServer, models: tuple[DeclaredModel, ...] = ()) -> Verdict:
    async with server.serving(), client_of(below(server.port)) as client:
        return await identify(client, below(server.port, models))


async def test_a_server_whose_api_lies_below_a_path_is_asked_there_alone() -> None:
    listed = Sample(200, {}, b'{"data":[{"id":"big"}]}')
    site = Sample(200, {"Content-Type": "text/html"}, b"x" * 200_000)
    routes = {"/health": site, "/openapi.json": Sample(200, {}, b'{"paths":{"/v1/embeddings":{}}}')}
    server = ReplayServer({**routes, "/openai/v1/models": listed})
    verdict = await below_path(server)
    assert isinstance(verdict, Identity)
    assert (verdict.engine, verdict.flavour) == (EngineKind.OPENAI, "plain")
    assert verdict.dialects == Dialect.CHAT | Dialect.COMPLETION
    assert server.calls == [("GET", "/openai/v1/models")]


async def test_a_server_below_a_path_that_cannot_list_is_known_by_a_declared_inventory() -> None:
    assert await below_path(ReplayServer({})) is None
    assert isinstance(await below_path(ReplayServer({}), (DeclaredModel(name="big"),)), Identity)
    loop = ReplayServer({}, server="pairmesh")
    assert await below_path(loop, (DeclaredModel(name="big"),)) is EngineRefusal.SELF_LOOP
    denied = ReplayServer({"/openai/v1/models": Sample(401)})
    with pytest.raises(EngineMisspoke, match="auth"):
        await below_path(denied, (DeclaredModel(name="big"),))


async def test_what_the_rest_of_a_host_says_of_its_health_is_not_about_the_api_below_a_path() -> None:
    listed = Sample(200, {}, b'{"data":[{"id":"big"}]}')
    server = ReplayServer({"/health": Sample(302, {"Location": "/login"}), "/openai/v1/models": listed})
    async with server.serving(), client_of(below(server.port)) as client:
        identity = await identify(client, below(server.port))
        assert isinstance(identity, Identity)
        adapter = OpenAiPlain(client=client, identity=identity, manifest=below(server.port))
        await adapter.inventory()
        seen = await adapter.observe(0, 1_000)
    assert [model.native_id for model in seen.resident] == ["big"]
