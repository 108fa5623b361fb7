"""The ``ollama`` package, unchanged, against the local APIs of two nodes; the engines follow Ollama's wire schema."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import ollama
import openai
import pytest
import pytest_asyncio

from router_core.record.state import ModelState
from tests.support.cluster import Cluster, Node, closing, pair, wait_for
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.fakes.ollama_schema import check
from tests.support.fakes.replay import ReplayServer, Sample

pytestmark = pytest.mark.asyncio(loop_scope="module")

IPS = {"alpha": "127.0.0.2", "beta": "127.0.0.3"}
SMALL: dict[str, Any] = {"size": 500 * 2**20, "params": 494_032_768, "shown_params": "494M"}
TINY = FakeModel(name="tiny:latest", **SMALL)
MID = FakeModel(name="hf.co/bart/Mid-GGUF:Q4_K_M", **SMALL)
EMBEDDER = FakeModel(name="embedder:v1", family="bert", capabilities=("embedding",), **SMALL)
CLOUD = FakeModel(name="huge:cloud", size=384, cloud="https://cloud.example:443")
OTHER_BUILD = FakeModel(name="forked:1b", salt="here", **SMALL)
OWN_BUILD = FakeModel(name="forked:1b", salt="there", **SMALL)
MESSAGES: Any = [{"role": "user", "content": "hello world"}]
THREE = {"num_predict": 3}


@dataclass(slots=True, kw_only=True)
class Mesh:
    """Two nodes and their engines."""

    cluster: Cluster
    fakes: dict[str, FakeOllama]

    def client(self, node: str = "alpha") -> ollama.AsyncClient:
        return ollama.AsyncClient(host=self.cluster[node].api)

    async def raw(self, path: str, node: str = "alpha", **options: Any) -> tuple[int, bytes, Any]:
        method = options.pop("method", "POST" if "json" in options or "data" in options else "GET")
        async with (
            aiohttp.ClientSession(self.cluster[node].api) as session,
            session.request(method, path, **options) as reply,
        ):
            return reply.status, await reply.read(), reply.headers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    base = tmp_path_factory.mktemp("ollama")
    made = Cluster(base=base, nodes=[], engines=[])
    fakes = {
        "alpha": FakeOllama(models=[TINY, EMBEDDER, CLOUD, OWN_BUILD], vram=0.5),
        "beta": FakeOllama(models=[TINY, MID, OTHER_BUILD], version="0.13.10"),
    }
    listed = Sample(200, {}, b'{"object":"list","data":[{"id":"plain"}]}')
    plain = ReplayServer({"/v1/models": listed, "/health": Sample()})
    async with AsyncExitStack() as stack:
        for name, fake in fakes.items():
            await stack.enter_async_context(fake.serving(IPS[name]))
        await stack.enter_async_context(plain.serving())
        await stack.enter_async_context(closing(made))
        made.nodes += [Node(name=name, ip=ip, base=base / name) for name, ip in IPS.items()]
        for node in made.nodes:
            others = [other for other in made.nodes if other is not node]
            node.write_settings([f"@{other.name}={other.ip}:{other.ports['mesh']}" for other in others])
            endpoint = f'engine = "ollama"\nurl = "{fakes[node.name].url}"\nmax_queue = 16\n'
            (node.config / "endpoints" / "ollama.toml").write_text(endpoint)
        alpha = made["alpha"]
        (alpha.config / "endpoints" / "plain.toml").write_text(
            f'engine = "openai"\nurl = "http://127.0.0.1:{plain.port}"\n'
        )
        for node in made.nodes:
            await node.start()
        await pair(made.nodes)
        await made.full_view()
        yield Mesh(cluster=made, fakes=fakes)


async def until_error(pieces: AsyncIterator[Any]) -> tuple[int, str]:
    """How many pieces came before the client raised, and what it was told."""
    count = 0
    try:
        async for _ in pieces:
            count += 1
    except ollama.ResponseError as error:
        return count, error.error
    raise AssertionError("the stream ended as if nothing had happened")


@pytest.fixture(
    params=[("alpha", "tiny"), ("beta", "tiny"), ("alpha", MID.name), ("beta", MID.name)], ids=str
)
def asked(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A node to ask, and a model: of both nodes, or of beta alone, so that alpha has to ask beta."""
    found: tuple[str, str] = request.param
    return found


# --- work ----------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_whole_and_in_pieces(mesh: Mesh, asked: tuple[str, str]) -> None:
    node, model = asked
    async with mesh.client(node) as client:
        whole = await client.chat(model, MESSAGES, options=THREE)
        pieces = [piece async for piece in await client.chat(model, MESSAGES, options=THREE, stream=True)]
    assert whole.message.content == "w0 w1 w2 "
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 3)
    assert "".join(piece.message.content or "" for piece in pieces) == "w0 w1 w2 "
    assert [piece.done for piece in pieces] == [False, False, False, True]
    assert pieces[-1].eval_count == 3


async def test_a_prompt_is_completed_whole_and_in_pieces(mesh: Mesh, asked: tuple[str, str]) -> None:
    node, model = asked
    async with mesh.client(node) as client:
        whole = await client.generate(model, "the world", options=THREE)
        pieces = [piece async for piece in await client.generate(model, "x", options=THREE, stream=True)]
    assert whole.response == "w0 w1 w2 "
    assert whole.context == [0, 1, 2]
    assert "".join(piece.response for piece in pieces) == "w0 w1 w2 "


@pytest.mark.parametrize("node", ["alpha", "beta"])
async def test_embeddings_are_made_by_the_node_that_can(mesh: Mesh, node: str) -> None:
    async with mesh.client(node) as client:
        many = await client.embed("embedder:v1", ["hello", "world"])
        one = await client.embeddings("embedder:v1", "hello")
    assert [len(vector) for vector in many.embeddings] == [32, 32]
    assert list(one.embedding) == list(many.embeddings[0])


@pytest.mark.scenario("OpenAI and Ollama requests without hints are as they were")
async def test_without_hints_bytes_pass_and_the_reply_says_who_served(mesh: Mesh) -> None:
    body = {"model": MID.name, "prompt": "x", "options": THREE, "stream": False, "raw": True, "seed": 2**60}
    status, raw, headers = await mesh.raw("/api/generate", json=body)
    assert status == 200
    assert check("/api/generate", raw).response == "w0 w1 w2 "
    assert headers["x-pairmesh-node"] == "@beta/ollama"
    assert mesh.fakes["beta"].bodies[-1] == body
    assert "x-pairmesh-hints" not in headers
    record = await mesh.cluster["alpha"].get(f"/v1/decisions/{headers['x-pairmesh-decision-id']}")
    assert record["chosen"]
    assert (record["reason"], record["hints"]) == ("native", [])


async def test_hints_in_a_body_are_heeded_and_no_engine_gets_to_see_them(mesh: Mesh) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "options": THREE, "stream": False}
    for name in ("alpha", "beta"):
        hints = {"require": f"node=@{name}", "prefer": "@nobody", "class": "batch"}
        status, _, headers = await mesh.raw("/api/chat", json=body | {"pairmesh": hints})
        assert (status, headers["x-pairmesh-node"]) == (200, f"@{name}/ollama")
        told = set(headers["x-pairmesh-hints"].split(", "))
        assert told == {"prefer=ignored_unknown", "require=honoured", "class=honoured"}
        assert mesh.fakes[name].bodies[-1] == body | {"model": "tiny:latest"}


async def test_a_model_without_its_default_tag_is_found_on_both_nodes(mesh: Mesh) -> None:
    status, raw, headers = await mesh.raw("/api/chat", json={"model": "tiny", "messages": MESSAGES})
    assert status == 200
    assert headers["content-type"] == "application/x-ndjson"
    assert headers["x-pairmesh-model"] == "tiny:latest"
    for line in raw.splitlines():
        check("/api/chat", line)


async def test_an_empty_prompt_loads_where_the_model_is_and_leaves_no_output(mesh: Mesh) -> None:
    mesh.fakes["beta"].unload_all()
    async with mesh.client() as client:
        loaded = await client.generate(MID.name, keep_alive="20m")
        assert (loaded.done, loaded.done_reason) == (True, "load")
        assert (await client.chat(MID.name, [])).done_reason == "load"
    assert mesh.fakes["beta"].runners[MID.name].keep_s == 1_200


@pytest.mark.parametrize(
    "keep_alive", [0, 0.0, 0.9, "0", "0s", "-0s", "999ms", "0h0m0.5s", "000000000000000000s"]
)
@pytest.mark.parametrize(
    ("path", "prompt"), [("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})]
)
async def test_unloading_is_engine_administration_and_reaches_no_engine(
    mesh: Mesh, keep_alive: Any, path: str, prompt: dict[str, Any]
) -> None:
    for fake in mesh.fakes.values():
        fake.calls.clear()
    body = {"model": "tiny", "keep_alive": keep_alive, **prompt}
    status, raw, _ = await mesh.raw(path, json=body)
    assert status == 403
    assert "is not done here" in json.loads(raw)["error"]
    assert not [call for fake in mesh.fakes.values() for call in fake.calls if call[1] == path]


@pytest.mark.parametrize("key", ["Keep_Alive", "KEEP_ALIVE", "PROMPT", "Model", "\u212aeep_alive"])
async def test_a_key_in_another_case_cannot_slip_past(mesh: Mesh, key: str) -> None:
    body = {"model": "tiny", "prompt": "x", "keep_alive": "5m", key: 0}
    status, _, _ = await mesh.raw("/api/generate", json=body)
    assert status == 400


async def test_a_second_spelling_of_the_model_cannot_reach_a_model_that_is_not_offered(mesh: Mesh) -> None:
    body = {"model": "tiny", "Model": CLOUD.name, "messages": MESSAGES}
    status, raw, _ = await mesh.raw("/v1/chat/completions", json=body)
    assert (status, json.loads(raw)["error"]["code"]) == (400, "duplicate_key")
    assert CLOUD.name not in mesh.fakes["alpha"].loads


async def test_an_openai_client_uses_ollama_engines_too(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{mesh.cluster['alpha'].api}/v1", api_key="unused", max_retries=0
    ) as client:
        chat = await client.chat.completions.create(model=MID.name, messages=MESSAGES, max_tokens=3)
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=3, stream=True
        )
        chunks = [chunk async for chunk in stream]
        completion = await client.completions.create(model="tiny", prompt="x", max_tokens=2)
        vectors = await client.embeddings.create(model="embedder:v1", input=["a", "b"])
        names = [model.id async for model in await client.models.list()]
    assert chat.choices[0].message.content == "w0 w1 w2 "
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "w0 w1 w2 "
    assert completion.choices[0].text == "w0 w1 "
    assert len(vectors.data) == 2
    assert {"plain", "tiny:latest", MID.name} <= set(names)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_record_of_a_request_has_the_engines_own_count_of_tokens(mesh: Mesh, stream: bool) -> None:
    body = {"model": MID.name, "prompt": "x", "options": {"num_predict": 5}, "stream": stream}
    _, _, headers = await mesh.raw("/api/generate", json=body)

    async def ended() -> Any:
        decision = headers["x-pairmesh-decision-id"]
        return (await mesh.cluster["alpha"].get(f"/v1/decisions/{decision}"))["outcome"]

    outcome = await wait_for(ended, 10, "the record's ending")
    assert (outcome["status"], outcome["out_tokens"]) == (200, 5)


async def test_a_load_is_seen_by_every_node_while_it_lasts(mesh: Mesh) -> None:
    fake = mesh.fakes["beta"]
    fake.unload_all()
    fake.gate = asyncio.Event()

    async def states(node: str) -> set[int]:
        view = await mesh.cluster[node].get("/v1/view")
        (beta,) = (each for each in view["nodes"] if each["name"] == "beta")
        names = [model["name"] for model in beta["static"]["models"]]
        return {each["state"] for each in beta["volatile"]["residents"] if names[each["model"]] == MID.name}

    async def seen_as(state: ModelState | None) -> bool:
        wanted = set() if state is None else {state.value}
        return all([await states(node) == wanted for node in ("alpha", "beta")])

    await wait_for(lambda: seen_as(None), 15, "the model gone")
    asked = asyncio.create_task(mesh.raw("/api/generate", json={"model": MID.name, "prompt": "x"}))
    try:
        await wait_for(lambda: seen_as(ModelState.LOADING), 15, "the model loading")
        listed = json.loads((await mesh.raw("/api/ps"))[1])["models"]
        assert MID.name in [model["name"] for model in listed]
    finally:
        fake.gate.set()
    assert (await asked)[0] == 200
    await wait_for(lambda: seen_as(ModelState.RESIDENT), 15, "the model loaded")
    counted = 'pairmesh_model_loads_total{trigger="request",result="ok"} '
    async with (
        aiohttp.ClientSession(mesh.cluster["beta"].admin) as session,
        session.get("/metrics") as reply,
    ):
        (line,) = [line for line in (await reply.text()).splitlines() if line.startswith(counted)]
    assert int(line.removeprefix(counted)) > 0


# --- lists ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["alpha", "beta"])
async def test_the_list_names_what_ollama_clients_can_reach_and_nothing_else(mesh: Mesh, node: str) -> None:
    async with mesh.client(node) as client:
        listed = (await client.list()).models
    told = [(model.model, model.digest) for model in listed]
    expected = [TINY, MID, EMBEDDER, OTHER_BUILD, OWN_BUILD]
    assert sorted(told) == sorted((model.name, model.digest) for model in expected), (
        "two digests: two entries"
    )
    by_name = {model.model: model for model in listed}
    tiny = by_name["tiny:latest"]
    assert tiny.details is not None
    assert (tiny.size, tiny.details.family, tiny.details.parameter_size) == (TINY.size, "llama", "494M")
    assert tiny.details.quantization_level == "Q4_K_M"
    status, raw, _ = await mesh.raw("/api/tags", node)
    assert status == 200
    check("/api/tags", raw)
    assert not any(name in raw for name in (b"alpha", b"beta", mesh.cluster["alpha"].node_id.encode()))


async def test_running_models_are_told_once_per_node(mesh: Mesh) -> None:
    for node in ("alpha", "beta"):
        mesh.fakes[node].unload_all()
        body = {"model": "tiny", "keep_alive": "30m"}
        async with aiohttp.ClientSession(mesh.fakes[node].url) as session:
            await (await session.post("/api/generate", json=body)).read()

    async def told() -> Any:
        async with mesh.client() as client:
            models = (await client.ps()).models
        return models if [model.model for model in models] == ["tiny:latest"] * 2 else None

    first, second = await wait_for(told, 15, "two running models")
    vram = sorted((model.size_vram, model.size) for model in (first, second))
    assert vram == [(0, TINY.size), (TINY.size // 2, TINY.size)]
    assert {first.context_length, second.context_length} == {4_096}
    assert all(model.expires_at is not None for model in (first, second)), "a peer's is what Ollama fills in"
    _, raw, _ = await mesh.raw("/api/ps")
    assert len(json.loads(raw)["models"]) == 2


async def test_the_version_is_the_least_of_the_servers(mesh: Mesh) -> None:
    status, raw, _ = await mesh.raw("/api/version")
    assert (status, check("/api/version", raw).version) == (200, "0.13.3")


@pytest.mark.parametrize("path", ["/", "/api/tags", "/api/ps", "/api/version", "/v1/models", "/health"])
async def test_head_is_answered_as_get_is(mesh: Mesh, path: str) -> None:
    status, body, headers = await mesh.raw(path)
    silent = await mesh.raw(path, method="HEAD")
    assert (silent[0], silent[1]) == (status, b"")
    assert silent[2]["content-type"] == headers["content-type"]
    assert int(silent[2]["content-length"]) == len(body)


# --- questions -----------------------------------------------------------------------------------------------


async def test_a_model_is_described_by_whoever_has_it(mesh: Mesh, asked: tuple[str, str]) -> None:
    node, model = asked
    async with mesh.client(node) as client:
        shown = await client.show(model)
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.parameter_count"] == TINY.params
    assert shown.capabilities == ["completion", "tools"]


async def test_an_older_clients_name_is_understood(mesh: Mesh) -> None:
    for body in ({"name": "tiny"}, {"model": "", "name": MID.name}):
        status, raw, headers = await mesh.raw("/api/show", json=body)
        assert status == 200, raw
        check("/api/show", raw)
        assert "x-pairmesh-decision-id" not in headers, "a question is no decision"


async def test_the_own_node_is_asked_before_its_peer(mesh: Mesh) -> None:
    for node in ("alpha", "beta"):
        _, _, headers = await mesh.raw("/api/show", node, json={"model": "tiny:latest"})
        assert headers["x-pairmesh-node"] == f"@{node}/ollama"


async def test_the_next_owner_is_asked_if_the_first_has_lost_the_model(mesh: Mesh) -> None:
    fake = mesh.fakes["alpha"]
    kept, fake.models = fake.models, [model for model in fake.models if model is not TINY]
    try:
        status, _, headers = await mesh.raw("/api/show", json={"model": "tiny"})
    finally:
        fake.models = kept
    assert (status, headers["x-pairmesh-node"]) == (200, "@beta/ollama")

    async def back() -> bool:
        _, raw, headers = await mesh.raw("/api/show", json={"model": "tiny"})
        return bool(headers["x-pairmesh-node"] == "@alpha/ollama" and raw)

    await wait_for(back, 40, "alpha's list read again", every_s=0.5)


# --- errors --------------------------------------------------------------------------------------------------


async def test_an_unknown_model_is_not_found_in_ollamas_words(mesh: Mesh) -> None:
    async with mesh.client() as client:
        for ask in (client.chat, client.generate, client.show, client.embed):
            with pytest.raises(ollama.ResponseError) as caught:
                await ask("tinny:latest")
            assert caught.value.status_code == 404
            assert "tiny:latest" in caught.value.error
            assert "tinny" not in caught.value.error


async def test_models_of_other_engines_cannot_be_reached_through_ollamas_routes(mesh: Mesh) -> None:
    async with mesh.client() as client:
        with pytest.raises(ollama.ResponseError) as caught:
            await client.chat("plain", MESSAGES)
        assert caught.value.status_code == 400
        with pytest.raises(ollama.ResponseError) as caught:
            await client.chat("huge:cloud", MESSAGES)
        assert caught.value.status_code == 404


async def test_an_engines_own_error_passes_unaltered(mesh: Mesh) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        async with mesh.client() as client:
            await client.generate(MID.name, "x", keep_alive="soon")
    assert caught.value.status_code == 400
    assert "invalid duration" in caught.value.error


async def test_an_error_in_an_engines_stream_reaches_the_client_as_its_exception(mesh: Mesh) -> None:
    fake = mesh.fakes["beta"]
    fake.break_after = 2
    try:
        async with mesh.client() as client:
            heard, error = await until_error(await client.chat(MID.name, MESSAGES, stream=True))
    finally:
        fake.break_after = None
    assert heard == 2
    assert "running the model" in error


async def test_a_stream_that_breaks_ends_with_an_error_line_through_a_peer(mesh: Mesh) -> None:
    fake = mesh.fakes["beta"]
    fake.cut_after = 2
    try:
        for node in ("beta", "alpha"):
            async with mesh.client(node) as client:
                heard, error = await until_error(await client.chat(MID.name, MESSAGES, stream=True))
            assert heard == 2
            assert error == "the endpoint broke off its answer"
    finally:
        fake.cut_after = None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pull", {"model": "x"}),
        ("push", {"model": "x"}),
        ("create", {"model": "x", "from_": "tiny"}),
        ("copy", {"source": "tiny", "destination": "x"}),
        ("delete", {"model": "tiny"}),
    ],
)
async def test_engines_are_not_administered_through_the_mesh(
    mesh: Mesh, name: str, arguments: dict[str, str]
) -> None:
    async with mesh.client() as client:
        with pytest.raises(ollama.ResponseError) as caught:
            await getattr(client, name)(**arguments)
    assert caught.value.status_code == 403
    assert "is not done here" in caught.value.error


async def test_blobs_are_not_taken(mesh: Mesh) -> None:
    for method in ("POST", "HEAD"):
        status, _, _ = await mesh.raw(f"/api/blobs/sha256:{'0' * 64}", method=method)
        assert status == 403


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
async def test_a_bare_curl_works_and_a_browsers_page_does_not(mesh: Mesh, kind: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": False})
    options: dict[str, Any] = {"data": body, "skip_auto_headers": ["Content-Type"]}
    headers = {"Content-Type": kind} if kind else {}
    for path in ("/api/generate", "/v1/completions"):
        assert (await mesh.raw(path, headers=headers, **options))[0] == 200
        for header in ("Referer", "Cookie", "Sec-Fetch-Mode"):
            status, raw, _ = await mesh.raw(path, headers=headers | {header: "x"}, **options)
            assert status == 415, header
            assert list(json.loads(raw)) == ["error"]
