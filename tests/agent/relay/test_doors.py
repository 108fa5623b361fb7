"""Who may knock at the local API, and in which words a refusal is told."""

import json

import pytest

from agent.relay.frontends.local import Doors
from agent.relay.ports import Phase, Turned
from router_core.record.state import Dialect
from tests.agent.relay.client import BODY, Client, ask, get, post
from tests.agent.relay.rig import running
from tests.support.recorder import Recorder


def doors(port: int) -> Doors:
    return Doors.of(("127.0.0.1", port), hosts=("Box.lan", "other:99"), origins=("http://app.example",))


async def told(raw: bytes, **options: object) -> tuple[int, str | None, dict[str, str]]:
    """Status, code and headers of the reply to ``raw``, where ``PORT`` stands for the listener's port."""
    async with running() as relay:
        relay.listed.names = [("m", Dialect.CHAT)]
        for name, value in options.items():
            setattr(relay, name, value)
        heard = await ask(relay.port, raw.replace(b"PORT", b"%d" % relay.port))
        error = json.loads(heard.body).get("error") if heard.body.startswith(b"{") else None
        return heard.status, error and error["code"], heard.headers


@pytest.mark.parametrize(
    "host", [b"127.0.0.1:PORT", b"localhost:PORT", b"LOCALHOST:PORT", b"localhost.:PORT"]
)
async def test_the_listeners_own_names_are_served(host: bytes) -> None:
    assert (await told(b"GET /health HTTP/1.1\r\nHost: %s\r\n\r\n" % host))[0] == 200


@pytest.mark.parametrize(
    "host",
    [b"evil.example", b"evil.example:PORT", b"127.0.0.1:1", b"127.0.0.1", b"localhost:PORT.evil.example"],
)
@pytest.mark.threat("T35")
async def test_any_other_host_is_refused(host: bytes) -> None:
    status, code, headers = await told(b"GET /health HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
    assert (status, code) == (403, "host_refused")
    assert not [name for name in headers if name.startswith("access-control")]


def test_named_hosts_are_served_at_the_listeners_port_or_their_own() -> None:
    assert doors(7).hosts == {b"localhost:7", b"127.0.0.1:7", b"box.lan:7", b"other:99"}


@pytest.mark.parametrize(
    "header",
    [
        b"Origin: http://evil.example",
        b"Origin: null",
        b"Origin: http://127.0.0.1:PORT",
        b"Sec-Fetch-Site: cross-site",
        b"Sec-Fetch-Site: same-site",
    ],
)
@pytest.mark.threat("T36")
async def test_pages_of_other_origins_are_refused(header: bytes) -> None:
    status, code, headers = await told(b"GET /health HTTP/1.1\r\nHost: localhost:PORT\r\n%s\r\n\r\n" % header)
    assert (status, code) == (403, "origin_refused")
    assert not [name for name in headers if name.startswith("access-control")]


async def test_scripts_of_an_allowed_origin_may_read_what_the_mesh_says_of_a_reply() -> None:
    async with Recorder() as up, running(up.port, doors_of=doors) as relay:
        origin = b"Origin: http://app.example\r\n"
        served = await ask(relay.port, post(relay.port, headers=origin))
        refused = await ask(relay.port, post(relay.port, b"{}", headers=origin))
        for heard in (served, refused):
            exposed = set(heard.headers["access-control-expose-headers"].split(", "))
            told = {name for name in heard.headers if name.startswith("x-pairmesh-")}
            assert exposed >= told | {"x-request-id", "retry-after"}
        stranger = await ask(relay.port, post(relay.port))
        assert "access-control-expose-headers" not in stranger.headers


@pytest.mark.parametrize("written", ["http://localhost:80", "http://localhost"])
@pytest.mark.parametrize("sent", [b"http://localhost", b"http://localhost:80"])
async def test_the_port_that_a_scheme_stands_for_makes_no_other_origin(written: str, sent: bytes) -> None:
    def open_doors(port: int) -> Doors:
        return Doors.of(("127.0.0.1", port), origins=(written, "https://a.example:443"))

    async with Recorder() as up, running(up.port, doors_of=open_doors) as relay:
        heard = await ask(relay.port, post(relay.port, headers=b"Origin: %s\r\n" % sent))
        assert (heard.status, heard.headers["access-control-allow-origin"]) == (200, sent.decode())
        heard = await ask(relay.port, post(relay.port, headers=b"Origin: https://a.example\r\n"))
        assert heard.status == 200
        for other in (b"https://localhost", b"http://localhost:8080", b"http://a.example:443"):
            heard = await ask(relay.port, post(relay.port, headers=b"Origin: %s\r\n" % other))
            assert (heard.status, "api.origins" in heard.body.decode()) == (403, True)


async def test_an_allowed_origin_may_read_and_gets_its_preflight() -> None:
    async with Recorder() as up, running(up.port, doors_of=doors) as relay:
        origin = b"Origin: http://app.example\r\n"
        heard = await ask(relay.port, post(relay.port, headers=origin))
        assert heard.headers["access-control-allow-origin"] == "http://app.example"
        assert heard.headers["vary"] == "Origin"
        raw = get(relay.port, b"/v1/chat/completions", method=b"OPTIONS", headers=origin)
        heard = await ask(relay.port, raw)
        assert heard.status == 204
        assert heard.headers["access-control-allow-methods"] == "POST"
        assert heard.headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in heard.headers


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"GET /nope HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n", 404, "route_unknown"),
        (b"GET /v1/chat/completions HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n", 405, "method"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n", 405, "method"),
        (b"GET /v1/models/none HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n", 404, "model_absent"),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost:PORT\r\nVia: 1.0 x, 1.1 PairMesh\r\n\r\n",
            508,
            "loop_detected",
        ),
        (
            b"GET /health HTTP/1.1\r\nHost: localhost:PORT\r\nVia: 1.0 x\r\nVia: 1.1 pairmesh\r\n\r\n",
            508,
            "loop_detected",
        ),
        (b"GET /health HTTP/1.1\r\nHost: localhost:PORT\r\nContent-Length: 1\r\n\r\nx", 400, "bad_request"),
    ],
)
async def test_what_is_no_route_is_told_so(raw: bytes, status: int, code: str) -> None:
    assert (await told(raw))[:2] == (status, code)


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Type: text/plain\r\nReferer: http://x/\r\n",
        b"Cookie: a=b\r\n",
        b"Sec-Fetch-Mode: no-cors\r\nContent-Type: application/x-www-form-urlencoded\r\n",
        b"Content-Type: application/json\r\nContent-Encoding: gzip\r\n",
    ],
)
@pytest.mark.threat("T18")
async def test_a_body_must_be_plain_json(header: bytes) -> None:
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: localhost:PORT\r\n%sContent-Length: 2\r\n\r\n{}" % header
    assert (await told(raw))[:2] == (415, "media_type")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "bad_request"),
        (b"[]", "bad_request"),
        (b"{", "bad_request"),
        (b'{"model":"m"}x', "bad_request"),
        (b"[" * 50_000, "bad_request"),
        (b"{}", "model_missing"),
        (b'{"model":null}', "model_missing"),
        (b'{"model":7}', "model_missing"),
        (b'{"model":"a","model":"b"}', "duplicate_key"),
        (b'{"model":"a","mod\\u0065l":"b"}', "duplicate_key"),
        (b'{"pairmesh":{},"model":"a","pairmesh":{}}', "duplicate_key"),
        (b'\xef\xbb\xbf{"model":7}', "model_missing"),
        (b'\xef\xbb\xbf{"model":"a","model":"b"}', "duplicate_key"),
    ],
)
async def test_a_body_that_names_no_model_is_refused_in_the_dialects_envelope(body: bytes, code: str) -> None:
    async with Recorder() as up, running(up.port) as relay:
        heard = await ask(relay.port, post(relay.port, body))
        error = json.loads(heard.body)["error"]
        assert (heard.status, error["code"], error["type"]) == (400, code, "invalid_request_error")
        assert error["param"] is None
        assert up.requests == []


async def test_a_charset_does_not_make_json_something_else() -> None:
    async with Recorder() as up, running(up.port) as relay:
        raw = post(relay.port).replace(b"application/json", b"Application/JSON; charset=utf-8")
        assert (await ask(relay.port, raw)).status == 200


@pytest.mark.parametrize(("phase", "code"), [(Phase.STARTING, "starting"), (Phase.DRAINING, "shutting_down")])
async def test_a_node_that_does_not_serve_says_when_to_come_back(phase: Phase, code: str) -> None:
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: localhost:PORT\r\nContent-Type: application/json\r\n"
    status, said, headers = await told(raw + b"Content-Length: 2\r\n\r\n{}", phase=phase)
    assert (status, said) == (503, code)
    assert int(headers["retry-after"]) >= 1
    assert (await told(b"GET /health HTTP/1.1\r\nHost: localhost:PORT\r\n\r\n", phase=phase))[0] == 503


async def test_a_refused_request_without_a_body_keeps_its_connection() -> None:
    async with running() as relay:
        client = await Client.to(relay.port)
        for path in (b"/nope", b"/health", b"/v1/models/none", b"/health"):
            await client.send(get(relay.port, path))
            await client.heard()
        client.close()


async def test_a_turned_away_request_tells_counts_and_near_names_and_nothing_of_its_own() -> None:
    async with running() as relay:
        relay.fleet.turned = Turned(
            decision_id="dec1",
            status=404,
            code="model_absent",
            counts=(("unreachable", 2),),
            nearest=("tiny", "tiny-q8"),
            hints="prefer=excluded(model_absent)",
        )
        heard = await ask(relay.port, post(relay.port, b'{"model":"canary-name"}'))
        error = json.loads(heard.body)["error"]
        assert (heard.status, error["code"]) == (404, "model_absent")
        assert "unreachable 2" in error["message"]
        assert "tiny, tiny-q8" in error["message"]
        assert b"canary" not in heard.body
        assert heard.headers["x-pairmesh-decision-id"] == "dec1"
        assert heard.headers["x-pairmesh-reason"] == "model_absent"
        assert heard.headers["x-pairmesh-hints"] == "prefer=excluded(model_absent)"
        relay.fleet.turned = Turned(decision_id="dec2", status=429, code="queue_full", retry_after_s=9)
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.headers["retry-after"]) == (429, "9")
        assert json.loads(heard.body)["error"]["type"] == "rate_limit_error"
        relay.assert_idle()


async def test_too_many_requests_in_flight_are_refused_before_their_bodies() -> None:
    async with running() as relay:
        relay.wiring.in_hand.update(object() for _ in range(1_024))  # type: ignore[misc]
        heard = await ask(relay.port, post(relay.port)[: -len(BODY)])
        assert (heard.status, json.loads(heard.body)["error"]["code"]) == (503, "overloaded")
        relay.wiring.in_hand.clear()


async def test_the_list_holds_equal_names_once_sorted_and_no_node() -> None:
    async with running() as relay:
        relay.listed.names = [
            ("b", Dialect.CHAT),
            ("Org/A", Dialect.EMBED),
            ("b", Dialect.CHAT),
            ("o", Dialect.OLLAMA_CHAT),
        ]
        relay.listed.aka = [("any", Dialect.CHAT | Dialect.OLLAMA_CHAT), ("native", Dialect.OLLAMA_CHAT)]
        heard = await ask(relay.port, get(relay.port, b"/v1/models"))
        assert [entry["id"] for entry in json.loads(heard.body)["data"]] == ["Org/A", "any", "b"]
        one = await ask(relay.port, get(relay.port, b"/v1/models/Org%2FA"))
        assert json.loads(one.body) == {
            "id": "Org/A",
            "object": "model",
            "created": 0,
            "owned_by": "pairmesh",
        }
        assert (await ask(relay.port, get(relay.port, b"/v1/models/o"))).status == 404
        relay.listed.names = []
        assert b'"b"' in (await ask(relay.port, get(relay.port, b"/v1/models"))).body
        relay.listed.generation += 1
        assert b'"b"' not in (await ask(relay.port, get(relay.port, b"/v1/models"))).body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is not valid JSON: it is empty"),
        (b"[]", "the body is JSON, but no object"),
        (b'{"model": "m", nope}', "the body is not valid JSON at byte 15"),
        (b'{"model"', "the body is not valid JSON within its 8 bytes"),
        (b'{"model":"m"}x', "the body is not valid JSON at byte 14"),
        (b'{"a":' * 50_000, "the body is nested too deeply"),
    ],
)
async def test_a_body_that_is_no_object_is_told_where(body: bytes, why: str) -> None:
    async with running() as relay:
        heard = await ask(relay.port, post(relay.port, body))
        assert (heard.status, json.loads(heard.body)["error"]["message"]) == (400, why)


async def test_a_byte_order_mark_is_passed_on_and_the_engine_decides() -> None:
    """llama-server reads such a body."""
    marked = b"\xef\xbb\xbf" + BODY
    async with Recorder() as up, running(up.port) as relay:
        assert (await ask(relay.port, post(relay.port, marked))).status == 200
        assert up.requests[0].body == marked
        relay.fleet.served = "other"
        assert (await ask(relay.port, post(relay.port, marked))).status == 200
        assert up.requests[1].body.startswith(b"\xef\xbb\xbf{")
        assert json.loads(up.requests[1].body)["model"] == "other"
