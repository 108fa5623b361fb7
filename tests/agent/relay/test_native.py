"""Ollama's routes over real sockets: the local API before a recording engine, and the ingress behind mutual TLS."""

import json
from pathlib import Path
from typing import Any

import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.relay.dialects.ollama import NATIVE
from agent.relay.frontends.codes import CODES
from agent.relay.frontends.native_lists import least_version, ps_of, tags_of
from agent.relay.frontends.routes import ROUTES, Closed, View, route_for
from agent.relay.ports import Held, Offered, Turned
from router_core.record.state import Dialect
from tests.agent.relay.client import BODY, Client, ask, get, post
from tests.agent.relay.ingress_rig import chunked, code_of, head, ingress, pair
from tests.agent.relay.rig import running
from tests.support.fakes.ollama_schema import check
from tests.support.recorder import Exchange, Recorder

PROMPT = b'{"model":"m","prompt":"hello"}'
SHOW = b'{"model":"m"}'
WORD = b'{"model":"m","response":"word","done":false}\n'
NDJSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


# --- the local API -------------------------------------------------------------------------------------------


async def broken_line(exchange: Exchange) -> None:
    await exchange.write(NDJSON)
    await exchange.chunk(WORD)
    await exchange.chunk(WORD[:9])
    exchange.reset()


async def test_a_stream_that_breaks_in_a_line_ends_with_an_error_line() -> None:
    async with Recorder(broken_line) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, PROMPT, path=b"/api/generate"))
        assert heard.headers["content-type"] == "application/x-ndjson"
        assert "x-accel-buffering" not in heard.headers
        assert not heard.clean
        lines = heard.body.splitlines()
        assert lines[:2] == [WORD.strip(), WORD[:9]]
        assert json.loads(lines[2]) == {"error": "the endpoint broke off its answer"}
        (report,) = relay.watch.attempts
        assert report.marks is not None
        assert report.marks.content_events == 1
        relay.assert_idle()


async def test_an_answer_that_was_no_stream_is_only_cut() -> None:
    async def short(exchange: Exchange) -> None:
        await exchange.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        exchange.reset()

    async with Recorder(short) as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, PROMPT, path=b"/api/generate"))
        assert (heard.body, heard.clean) == (b"{", False)


@pytest.mark.parametrize(
    "path", [b"/api/chat", b"/api/generate", b"/api/embed", b"/api/embeddings", b"/api/show"]
)
async def test_a_refusal_is_told_in_ollamas_envelope(path: bytes) -> None:
    async with running() as relay:
        relay.fleet.turned = Turned(decision_id="d1", status=404, code="model_absent", nearest=("mini",))
        heard = await ask(relay.port, post(relay.port, BODY, path=path))
        assert heard.status == 404
        told = json.loads(heard.body)
        assert list(told) == ["error"]
        assert told["error"].endswith("similar models: mini")


ROWS = sorted((code, status) for code, (status, _) in CODES.items() if status >= 400)


@pytest.mark.parametrize(("code", "status"), ROWS)
async def test_ollamas_own_client_reads_every_refusal_as_its_exception(code: str, status: int) -> None:
    async with running() as relay:
        relay.fleet.turned = Turned(decision_id="d1", status=status, code=code)
        async with ollama.AsyncClient(f"http://127.0.0.1:{relay.port}") as client:
            for ask_for in (
                client.generate("m", "x"),
                client.chat("m", [{"role": "user", "content": "x"}]),
                client.embed("m", "x"),
                client.show("m"),
            ):
                with pytest.raises(ollama.ResponseError) as caught:
                    await ask_for
                assert (caught.value.status_code, caught.value.error) == (status, CODES[code][1])
            with pytest.raises(ollama.ResponseError) as caught:
                await anext(await client.generate("m", "x", stream=True))
            assert (caught.value.status_code, caught.value.error) == (status, CODES[code][1])


async def test_a_question_is_no_work() -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, SHOW, path=b"/api/show"))
        assert (heard.status, up.requests[0].line) == (200, b"POST /api/show HTTP/1.1")
        assert heard.headers["x-pairmesh-node"] == "@here/e0"
        assert not {"x-pairmesh-decision-id", "x-pairmesh-reason"} & set(heard.headers)
        (asked,) = relay.fleet.asked
        assert (asked.is_work, asked.dialect, asked.facts.model) == (False, NATIVE, "m")
        assert relay.wiring.router.dispatch.total == 0
        assert not relay.watch.attempts[0].is_work
        await ask(relay.port, post(relay.port, PROMPT, path=b"/api/generate"))
        assert relay.fleet.asked[1].is_work
        assert relay.wiring.router.dispatch.total == 1


async def test_engines_are_told_of_while_a_first_byte_is_awaited() -> None:
    told: list[tuple[str, str, str]] = []

    class Waits:
        def sent(self, endpoint: str, model: str, sent_ms: int) -> None:
            told.append(("sent", endpoint, model))

        def heard(self, endpoint: str, model: str, sent_ms: int) -> None:
            told.append(("heard", endpoint, model))

    async def answer(exchange: Exchange) -> None:
        told.append(("answered", "", ""))
        await exchange.answer(b"{}")

    async def hang_up(exchange: Exchange) -> None:
        exchange.reset()

    async with (
        Recorder(answer) as up,
        Recorder(hang_up) as bad,
        running(bad.port, up.port, first_bytes=Waits()) as relay,
    ):
        assert (await ask(relay.port, post(relay.port, PROMPT, path=b"/api/generate"))).status == 200
        assert told == [
            ("sent", "e0", "m"),
            ("heard", "e0", "m"),
            ("sent", "e1", "m"),
            ("answered", "", ""),
            ("heard", "e1", "m"),
        ]


@pytest.mark.parametrize("method", [b"POST", b"DELETE", b"HEAD"])
async def test_administration_of_engines_is_refused_before_the_body(method: bytes) -> None:
    async with Recorder() as up, running(up.port) as relay:
        closed = [(path, route) for path, route in ROUTES.items() if isinstance(route.what, Closed)]
        blob = b"/api/blobs/sha256:" + b"0" * 64
        one_blob = route_for(blob)
        assert one_blob is not None
        for path, route in [*closed, (blob, one_blob)]:
            if method not in route.methods:
                continue
            raw = get(relay.port, path, method=method, headers=b"Content-Length: 9999999\r\n")
            heard = await ask(relay.port, raw, bodyless=method == b"HEAD")
            assert heard.status == 403
            if method != b"HEAD":
                assert list(json.loads(heard.body)) == ["error"]
        assert relay.watch.lines
        assert {line.code for line in relay.watch.lines} == {"engine_admin_disabled"}
        assert up.requests == []


async def test_unloading_is_refused_and_never_placed() -> None:
    async with Recorder() as up, running(up.port) as relay:
        body = b'{"model":"m","keep_alive":0}'
        heard = await ask(relay.port, post(relay.port, body, path=b"/api/generate"))
        assert heard.status == 403
        assert relay.fleet.asked == []
        assert up.requests == []


async def test_a_body_of_another_type_is_read_on_loopback_and_from_no_page() -> None:
    form = b"Content-Type: application/x-www-form-urlencoded\r\n"

    async def status(path: bytes, headers: bytes, port: int) -> int:
        raw = b"POST %s HTTP/1.1\r\nHost: localhost:%d\r\nContent-Length: %d\r\n%s\r\n%s"
        return (await ask(port, raw % (path, port, len(PROMPT), headers, PROMPT))).status

    async with Recorder() as up, running(up.port) as relay:
        for headers in (form, b"Content-Type: text/plain; charset=utf-8\r\n", b""):
            assert await status(b"/api/generate", headers, relay.port) == 200
        assert {request.value(b"content-type") for request in up.requests} == {b"application/json"}
        marks = b"Referer: http://x/", b"Cookie: a=b", b"Sec-Fetch-Site: none", b"Content-Encoding: gzip"
        for extra in (mark + b"\r\n" for mark in marks):
            assert await status(b"/api/generate", form + extra, relay.port) == 415
            assert await status(b"/v1/completions", form + extra, relay.port) == 415
        assert await status(b"/api/generate", b"Content-Type: multipart/form-data\r\n", relay.port) == 200
        for headers in (form, b"Content-Type: text/plain\r\n", b""):
            assert await status(b"/v1/completions", headers, relay.port) == 200
        assert len(up.requests) == 7


async def test_an_unknown_route_below_api_is_told_in_ollamas_envelope() -> None:
    async with running() as relay:
        for path in (b"/api/nope", b"/api"):
            heard = await ask(relay.port, get(relay.port, path))
            assert (heard.status, json.loads(heard.body)) == (404, {"error": CODES["route_unknown"][1]})


async def test_a_node_without_ollama_answers_as_one_at_its_root_and_for_its_version() -> None:
    async with running() as relay:
        root = await ask(relay.port, get(relay.port, b"/"))
        assert (root.status, root.body) == (200, b"Ollama is running")
        assert root.headers["content-type"] == "text/plain; charset=utf-8"
        version = json.loads((await ask(relay.port, get(relay.port, b"/api/version"))).body)["version"]
        assert (0, 6, 4) <= tuple(map(int, version.split("."))) < (0, 13, 4)
        relay.listed.ollama = ["0.9.0", "0.14.2"]
        heard = await ask(relay.port, get(relay.port, b"/api/version"))
        assert json.loads(heard.body) == {"version": "0.9.0"}


async def test_head_and_get_agree_on_every_view() -> None:
    async with running() as relay:
        relay.listed.ollama = ["0.9.0"]
        relay.listed.names = [("m:1b", NATIVE | Dialect.CHAT)]
        relay.listed.running = [Held(offered=Offered(name="m:1b", dialects=NATIVE))]
        views = [path for path, route in ROUTES.items() if isinstance(route.what, View)]
        for path in (*views, b"/v1/models/m:1b"):
            told = await ask(relay.port, get(relay.port, path))
            silent = await ask(relay.port, get(relay.port, path, method=b"HEAD"), bodyless=True)
            assert told.status == silent.status == 200, path
            assert silent.headers["content-length"] == str(len(told.body))
            assert silent.headers["content-type"] == told.headers["content-type"]
            if path.startswith(b"/api/"):
                assert json.loads(told.body)


async def test_lists_follow_the_picture() -> None:
    async with running() as relay:
        relay.listed.names = [("m:1b", NATIVE), ("plain", Dialect.CHAT)]
        first = json.loads((await ask(relay.port, get(relay.port, b"/api/tags"))).body)
        assert [model["name"] for model in first["models"]] == ["m:1b"]
        relay.listed.names = [("n:1b", NATIVE)]
        relay.listed.generation += 1
        second = json.loads((await ask(relay.port, get(relay.port, b"/api/tags"))).body)
        assert [model["name"] for model in second["models"]] == ["n:1b"]


# --- the lists -----------------------------------------------------------------------------------------------


def test_two_digests_of_one_name_are_two_models_and_no_digest_is_none_of_its_own() -> None:
    one, two = b"\1" * 32, b"\2" * 32
    told = check("/api/tags", tags_of([
        Offered(name="m:1b", dialects=NATIVE),
        Offered(name="m:1b", dialects=NATIVE, digest=two),
        Offered(name="m:1b", dialects=NATIVE, digest=one),
        Offered(name="m:1b", dialects=NATIVE, digest=one, modified_at="2026-01-01T00:00:00Z"),
        Offered(name="a:1b", dialects=NATIVE),
        Offered(name="a:1b", dialects=NATIVE),
    ]))  # fmt: skip
    assert [(model.name, model.digest) for model in told.models] == [
        ("a:1b", "0" * 64),
        ("m:1b", one.hex()),
        ("m:1b", two.hex()),
    ]
    assert [model.modified_at[:4] for model in told.models] == ["1970", "2026", "1970"]


@pytest.mark.parametrize(
    ("size", "share", "told"),
    [
        (1_000, 25, (1_000, 250)),
        (1_000, 0, (1_000, 0)),
        (1_000, None, (1_000, 1_001)),
        (None, 50, (0, 1)),
        (None, None, (0, 1)),
    ],
)
def test_a_split_that_is_not_known_is_told_as_ollamas_client_reads_it(
    size: int | None, share: int | None, told: tuple[int, int]
) -> None:
    offered = Offered(name="m:1b", dialects=NATIVE)
    held = Held(offered=offered, size_bytes=size, vram_share_pct=share)
    (model,) = check("/api/ps", ps_of([held], WALL_MS)).models
    assert (model.size, model.size_vram) == told


WALL_MS = 1_767_225_600_000


def test_an_expiry_that_is_not_known_is_told_as_five_minutes_from_now() -> None:
    (model,) = check("/api/ps", ps_of([Held(offered=Offered(name="m:1b", dialects=NATIVE))], WALL_MS)).models
    assert model.expires_at == "2026-01-01T00:05:00.000Z"


def test_an_expiry_and_a_context_are_told_where_they_are_known() -> None:
    offered = Offered(name="m:1b", dialects=NATIVE)
    (model,) = check(
        "/api/ps", ps_of([Held(offered=offered, expires_ms=1_767_225_600_123, ctx=4_096)], WALL_MS)
    ).models
    assert (model.expires_at, model.context_length) == ("2026-01-01T00:00:00.123Z", 4_096)


@pytest.mark.parametrize(
    ("versions", "least"),
    [
        (["0.13.10", "0.13.9", "0.14.0"], "0.13.9"),
        (["0.10.0"], "0.10.0"),
        (["main", "0.9.1"], "main"),
        ([], None),
    ],
)
def test_versions_are_compared_number_by_number(versions: list[str], least: str | None) -> None:
    assert least_version(versions) == least


TEXTS = st.none() | st.text(max_size=12)
OFFERS = st.builds(
    Offered,
    name=st.sampled_from(["a", "b:1", "c"]),
    dialects=st.just(NATIVE),
    digest=st.none() | st.binary(max_size=3),
    size_bytes=st.none() | st.integers(0, 2**52),
    family=TEXTS,
    params_m=st.none() | st.integers(0, 2**32 - 1),
    quant=TEXTS,
    format=TEXTS,
)


@given(st.lists(OFFERS, max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_offers_make_a_list_that_ollamas_clients_can_read(offers: list[Offered]) -> None:
    told = check("/api/tags", tags_of(offers))
    assert {model.name for model in told.models} == {offer.name for offer in offers}
    listed = [(model.name, model.digest) for model in told.models]
    assert len(set(listed)) == len(listed)
    assert json.loads(
        ps_of((Held(offered=offer, size_bytes=7, vram_share_pct=3) for offer in offers), WALL_MS)
    )


# --- the ingress ---------------------------------------------------------------------------------------------


async def through(client: Client, path: bytes, body: bytes) -> Any:
    await client.send(head(len(body), path=path))
    assert (await client.head())[0] == 100
    await client.send(chunked(body))
    return await client.heard()


async def test_every_native_path_goes_through_a_peer(tmp_path: Path) -> None:
    async with Recorder() as up, pair(tmp_path, up.port) as (router, peer):
        for path in (b"/api/generate", b"/api/chat", b"/api/embed", b"/api/embeddings", b"/api/show"):
            heard = await ask(router.port, post(router.port, PROMPT, path=path))
            assert (heard.status, heard.body) == (200, b'{"ok":true}')
            assert up.requests[-1].line == b"POST %s HTTP/1.1" % path
            assert up.requests[-1].body == PROMPT
        assert up.faults == []
        seen = peer.local.seen(peer.relay.clock.boot_ms())
        assert [row.accepted for row in seen] == [4], "a question is not counted as work"
        peer.assert_idle()


async def test_a_question_holds_no_place_at_the_ingress(tmp_path: Path) -> None:
    in_flight = []

    async def note(exchange: Exchange) -> None:
        in_flight.append(peer.local.in_flight("e0"))
        await exchange.answer(b"{}")

    async with Recorder(note) as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        assert (await through(client, b"/api/show", SHOW)).status == 200
        assert (await through(client, b"/api/generate", PROMPT)).status == 200
        assert in_flight == [0, 1]
        peer.relay.gate.cause = "model_absent"
        await client.send(head(path=b"/api/show"))
        assert (await client.heard()).headers["x-pairmesh-refused"] == "model_absent"
        client.close()


async def test_a_peer_cannot_unload_a_model(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        heard = await through(client, b"/api/generate", b'{"model":"m","prompt":"","keep_alive":"0s"}')
        assert (heard.status, code_of(heard)) == (403, "engine_admin_disabled")
        heard = await through(client, b"/api/generate", b'{"model":"m","Model":"n","prompt":"x"}')
        assert (heard.status, code_of(heard)) == (400, "route_mismatch")
        client.close()
        assert up.requests == []
        peer.assert_idle()


@pytest.mark.parametrize("path", [b"/api/pull", b"/api/delete", b"/api/tags", b"/api/ps", b"/api/version"])
async def test_nothing_but_work_and_questions_passes_the_ingress(tmp_path: Path, path: bytes) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(path=path))
        assert code_of(await client.heard()) == "route_unknown"
        client.close()
        assert up.requests == []


async def test_a_peers_broken_stream_ends_with_the_routers_error_line(tmp_path: Path) -> None:
    async with Recorder(broken_line) as up, pair(tmp_path, up.port) as (router, _):
        heard = await ask(router.port, post(router.port, PROMPT, path=b"/api/generate"))
        assert json.loads(heard.body.splitlines()[-1]) == {"error": "the endpoint broke off its answer"}
        assert heard.body.count(b"error") == 1
        assert not heard.clean
