"""What clients of all kinds send first, and what they are told: the documents' own commands, SDKs, browsers.

Black box: whole daemons, real sockets, real clients where this host has them.
"""

import asyncio
import http.client
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import openai
import pytest
from aiohttp import web

from tests.support.cluster import Node
from tests.support.fakes.ollama import FakeOllama
from tests.support.fakes.ollama_engine import FakeModel
from tests.support.field import Endpoint, OpenAiEngine, chat, mesh, post

PICTURE = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "what is this?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}},
        ],
    }
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED = '{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


@asynccontextmanager
async def one(base: Path, *, settings: str = "", extra: str = "") -> AsyncIterator[tuple[Node, OpenAiEngine]]:
    """A node beside one engine."""
    engine = OpenAiEngine(models={"m": 8_192})
    async with (
        engine.serving() as url,
        mesh(base, settings=settings, alpha=[Endpoint(url=url, extra=extra)]) as cluster,
    ):
        yield cluster["alpha"], engine


async def ran(*words: str) -> str:
    """What a program prints, which ends well."""
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def got(node: Node, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.get(f"{node.api}{path}", headers=headers) as reply:
        told = {name.lower(): value for name, value in reply.headers.items()}
        return reply.status, told, await reply.read()


# --- programs ------------------------------------------------------------------------------------------------


async def test_the_commands_of_ollamas_and_llama_cpps_documents_work_as_they_stand(tmp_path: Path) -> None:
    """``curl URL -d '{...}'`` names a form, and no JSON."""
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    shown = ("-s", "-o", str(tmp_path / "body"), "-w", "%{http_code}", "-d", ASKED)
    async with one(tmp_path) as (node, engine):
        url = f"{node.api}/v1/chat/completions"
        assert await ran("curl", url, *shown) == "200"
        assert json.loads((tmp_path / "body").read_text())["choices"]
        assert engine.asked[0].headers["content-type"] == "application/json"
        for extra in (
            ("-H", "Content-Type: text/plain"),
            ("-H", "Content-Type:"),
            ("-H", "Expect: 100-continue"),
        ):
            assert await ran("curl", url, *shown, *extra) == "200"
        for mark in ("Referer: http://x/", "Cookie: a=b", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Site: none"):
            assert await ran("curl", url, *shown, "-H", mark) == "415"
        assert await ran("curl", url, *shown, "-H", "Origin: http://x") == "403"
        assert len(engine.asked) == 4


async def test_a_body_with_a_byte_order_mark_is_the_engines_to_judge(tmp_path: Path) -> None:
    """Windows' editors write such files; llama-server and Python's servers read them."""
    async with one(tmp_path) as (node, engine):
        marked = b"\xef\xbb\xbf" + ASKED.encode()
        await post(node, "/v1/chat/completions", marked)
        assert engine.asked[0].raw == marked
        broken = await post(node, "/v1/chat/completions", ASKED.encode()[:-1])
        assert (broken.status, "not valid JSON" in broken.body["error"]["message"]) == (400, True)


async def test_pythons_own_client_reads_answers_and_refusals_on_one_connection(tmp_path: Path) -> None:
    async with one(tmp_path) as (node, _engine):

        def talk() -> list[int]:
            connection = http.client.HTTPConnection(node.ip, node.ports["api"], timeout=30)
            heard = []
            for model in ("m", "absent", "m"):
                connection.request("POST", "/v1/chat/completions", ASKED.replace('"m"', f'"{model}"'))
                reply = connection.getresponse()
                heard.append(reply.status)
                reply.read()
            connection.close()
            return heard

        assert await asyncio.to_thread(talk) == [200, 404, 200]


async def test_javas_client_offers_http_2_and_is_served(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        pytest.skip("no JDK here")
    (tmp_path / "Ask.java").write_text(
        """
        import java.net.URI; import java.net.http.*;
        public class Ask { public static void main(String[] a) throws Exception {
            var client = HttpClient.newHttpClient();
            for (int n = 0; n < 2; n++) {
                var ask = HttpRequest.newBuilder(URI.create(a[0])).header("Content-Type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(a[1])).build();
                System.out.print(client.send(ask, HttpResponse.BodyHandlers.ofString()).statusCode() + " ");
            } } }
        """
    )
    async with one(tmp_path) as (node, _engine):
        url = f"{node.api}/v1/chat/completions"
        assert await ran("java", "-Xshare:auto", str(tmp_path / "Ask.java"), url, ASKED) == "200 200 "


async def test_nodes_fetch_is_served(tmp_path: Path) -> None:
    """It sends ``sec-fetch-mode: cors`` with every request although it is no browser."""
    if shutil.which("node") is None:
        pytest.skip("no node here")
    script = (
        "const [url, body] = process.argv.slice(1); fetch(url, {method: 'POST', body, headers: "
        "{'content-type': 'application/json'}}).then(async r => console.log(r.status, (await r.json()).model))"
    )
    async with one(tmp_path) as (node, _engine):
        assert (await ran("node", "-e", script, f"{node.api}/v1/chat/completions", ASKED)).split() == [
            "200",
            "m",
        ]


async def test_what_ollamas_clients_ask_first_is_answered_as_ollama_does(tmp_path: Path) -> None:
    engine = FakeOllama(models=[FakeModel(name="m:latest")])
    async with (
        engine.serving(),
        mesh(tmp_path, alpha=[Endpoint(url=engine.url, engine="ollama")], beta=[]) as cluster,
    ):
        beta = cluster["beta"]
        async with ollama.AsyncClient(beta.api) as client:
            assert (await client.generate("m", "hello", options={"num_predict": 2})).done
            (listed,) = (await client.list()).models
            assert (listed.model, len(listed.digest or "")) == ("m:latest", 64)
            running: Any = []
            while not running:
                running = (await client.ps()).models
                await asyncio.sleep(0.05)
            assert running[0].size >= engine.models[0].size
            assert running[0].expires_at.timestamp() > 0
        assert (await got(beta, "/"))[2] == b"Ollama is running"
        assert json.loads((await got(beta, "/api/version"))[2]) == {"version": engine.version}


async def test_a_node_without_ollama_is_an_ollama_server_too(tmp_path: Path) -> None:
    async with one(tmp_path) as (node, _engine):
        status, headers, body = await got(node, "/")
        assert (status, body, headers["content-type"]) == (
            200,
            b"Ollama is running",
            "text/plain; charset=utf-8",
        )
        status, _, body = await got(node, "/api/version")
        assert (status, json.loads(body)["version"][0]) == (200, "0")
        async with ollama.AsyncClient(node.api) as client:
            assert (await client.list()).models == []
            with pytest.raises(ollama.ResponseError) as caught:
                await client.chat("m", [{"role": "user", "content": "x"}])
            assert caught.value.status_code == 400
            assert "do not speak ollama_chat; it is served on /v1/chat/completions" in caught.value.error


# --- refusals ------------------------------------------------------------------------------------------------


async def test_a_refusal_names_what_is_lacking_and_what_is_allowed(tmp_path: Path) -> None:
    caps = '[[models]]\nname = "m"\ncaps = {vision = false, tools = false}\n'
    async with one(tmp_path, extra=caps) as (node, engine):
        asked: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
            ({"messages": PICTURE}, {}, "capability", "no endpoint of this model supports vision"),
            ({"tools": TOOLS}, {}, "capability", "no endpoint of this model supports tools"),
            (
                {},
                {"x-pairmesh-require": "cap=flying"},
                "hint_malformed",
                "x-pairmesh-require: term 1: cap takes",
            ),
            ({}, {"x-pairmesh-require": "colour=red"}, "hint_malformed", "node engine label cap"),
            (
                {},
                {"x-pairmesh-locality": "here"},
                "hint_malformed",
                "x-pairmesh-locality: must be told once, as",
            ),
            ({}, {"x-pairmesh-require": "node=@nobody"}, "not_in_subset", "unmet are node"),
            ({}, {"x-pairmesh-require": "label=room:attic"}, "not_in_subset", "unmet are label"),
            ({}, {"x-pairmesh-require": "ctx>=9000"}, "context_length_exceeded", "length is 8192 tokens"),
            ({"pairmesh": {"require": "cap=flying"}}, {}, "hint_malformed", "pairmesh.require: term 1"),
        ]
        for more, headers, code, words in asked:
            reply = await chat(
                node, headers=headers, **({"messages": None} | more if "messages" in more else more)
            )
            assert (reply.status, reply.code) == (400, code), reply.raw
            assert words in reply.body["error"]["message"]
            assert "retry-after" not in reply.headers
        assert engine.asked == []
        unknown = await post(node, "/v1/chat", {"model": "m"})
        assert (unknown.status, unknown.code) == (404, "route_unknown")
        assert "/v1" in unknown.body["error"]["message"]


async def test_an_sdk_does_not_repeat_what_a_retry_cannot_help(tmp_path: Path) -> None:
    async with one(tmp_path) as (node, _engine):
        async with openai.AsyncOpenAI(base_url=f"{node.api}/v1", api_key="unused") as client:
            for header in ({"x-pairmesh-require": "node=@nobody"}, {"x-pairmesh-require": "engine=none"}):
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "x"}], extra_headers=header
                    )
        decisions = (await node.get("/v1/decisions?limit=100"))["decisions"]
        assert len(decisions) == 2, "each was asked once"


async def test_an_engine_that_dies_in_mid_answer_is_told_as_that(tmp_path: Path) -> None:
    engine = OpenAiEngine(models={"m": 8_192})

    async def die(request: web.Request, _body: dict[str, Any]) -> None:
        assert request.transport is not None
        request.transport.abort()

    engine.answer = die
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        reply = await chat(cluster["alpha"])
        assert (reply.status, reply.code) == (502, "upstream_unreachable")
        assert "took the request and" in reply.body["error"]["message"]
        assert reply.headers["x-pairmesh-node"] == "@alpha/engine1"
        assert reply.headers["x-pairmesh-attempts"] == "1"
        through = await chat(cluster["beta"])
        assert through.status in (502, 503)
        assert through.status == 503 or through.headers["x-pairmesh-node"] == "@alpha/engine1"


async def test_a_dry_run_says_what_the_api_would(tmp_path: Path) -> None:
    async with one(tmp_path) as (node, _engine):
        status, _, err = await node.cli("explain", "--model", "m", "--dialect", "messages")
        assert status != 0
        assert "404" in err
        assert (await post(node, "/v1/messages", {"model": "m"})).status == 404
        status, out, _ = await node.cli("explain", "--model", "m", "--ctx-need", "100000")
        assert (status, "chosen: @alpha/engine" in out) == (0, True)


# --- browsers ------------------------------------------------------------------------------------------------


async def test_a_page_of_an_allowed_origin_is_served_and_reads_the_headers(tmp_path: Path) -> None:
    settings = '[api]\norigins = ["http://localhost:80", "https://ui.example"]\n'
    async with one(tmp_path) as (plain, _engine):
        refused = await chat(plain, headers={"origin": "http://localhost"})
        assert (refused.status, refused.code) == (403, "origin_refused")
        assert "api.origins" in refused.body["error"]["message"]
        told = (plain.config / "pairmesh.toml").read_text()
        (plain.config / "pairmesh.toml").write_text(told.replace("[api]\n", settings, 1))
        await plain.term()
        await plain.start()
        for origin in ("http://localhost", "https://ui.example"):
            reply = await chat(plain, headers={"origin": origin})
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, origin)
            exposed = reply.headers["access-control-expose-headers"]
            assert {"x-pairmesh-node", "x-request-id"} <= set(exposed.split(", "))
        assert (await chat(plain, headers={"origin": "http://localhost:8080"})).status == 403


# --- a start -------------------------------------------------------------------------------------------------


async def test_a_request_right_after_a_restart_waits_for_who_has_the_model(tmp_path: Path) -> None:
    engine = OpenAiEngine(models={"m": 8_192})
    async with engine.serving() as url, mesh(tmp_path, alpha=[url], beta=[]) as cluster:
        beta = cluster["beta"]
        assert (await chat(beta)).status == 200
        await beta.kill()
        await beta.start()
        asked = [asyncio.create_task(chat(beta)) for _ in range(4)]
        assert [(await each).status for each in asked] == [200] * 4
        absent = await chat(beta, "nobody-has-this")
        assert absent.status == 404, "all were heard"
        await cluster["alpha"].kill()
        await beta.kill()
        await beta.start()
        reply = await chat(beta, headers={"x-pairmesh-deadline-ms": "1500"})
        assert (reply.status, reply.code) == (503, "starting")
        assert int(reply.headers["retry-after"]) >= 1
