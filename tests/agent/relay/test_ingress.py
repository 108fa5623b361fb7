"""The ingress of one node: roles, announcements, admission before the body, nothing else to be had."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from agent.relay.upstream.route_header import decode_state
from router_core.record.state import Role
from tests.agent.relay.client import BODY, CHAT
from tests.agent.relay.ingress_rig import ROUTE, STATE, chunked, code_of, head, ingress
from tests.support.members import start_node
from tests.support.ports import HeldPort
from tests.support.recorder import Recorder
from tests.support.until import until


async def test_an_admitted_request_is_asked_for_its_body_and_served(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        assert (await client.head())[0] == 100
        assert peer.local.in_flight("e0") == 1
        await client.send(chunked())
        heard = await client.heard()
        assert (heard.status, heard.body) == (200, b'{"ok":true}')
        assert decode_state(heard.headers["x-pairmesh-state"].encode()) == STATE
        assert up.requests[0].body == BODY
        assert not [name for name, _ in up.requests[0].headers if name.startswith(b"x-pairmesh")]
        seen = peer.local.seen(peer.relay.clock.boot_ms())
        assert [(row.inst, row.seq, row.accepted) for row in seen] == [(7, 3, 1)]
        client.close()
        peer.assert_idle()


async def test_a_peers_hints_move_nothing_and_reach_no_engine(tmp_path: Path) -> None:
    body = b'{"model":"m","pairmesh":{"require":"node=@elsewhere"},"messages":[]}'
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(
            head(len(body), x_pairmesh_require="node=@elsewhere", x_pairmesh_prefer="@elsewhere")
        )
        assert (await client.head())[0] == 100
        await client.send(chunked(body))
        heard = await client.heard()
        assert heard.status == 200
        assert "x-pairmesh-hints" not in heard.headers
        assert up.requests[0].body == b'{"model":"m","messages":[]}'
        assert not [name for name, _ in up.requests[0].headers if name.startswith(b"x-pairmesh")]
        client.close()


@pytest.mark.threat("T29")
@pytest.mark.parametrize(
    ("roles", "status"),
    [
        (Role.ROUTER, 100),
        (Role.NODE | Role.ROUTER, 100),
        (Role.NODE, 403),
        (Role.OBSERVER, 403),
        (Role.INTRODUCER, 403),
        (0, 403),
    ],
)
async def test_only_a_router_may_send_requests(tmp_path: Path, roles: int, status: int) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port, roles=roles) as peer:
        client = await peer.dial()
        await client.send(head())
        answered, told = await client.head()
        assert answered == status
        assert "x-pairmesh-state" not in told
        client.close()
        assert up.requests == []


@pytest.mark.threat("T29")
@pytest.mark.parametrize("sent", [head(), head(path=b"/metrics", method=b"GET"), b"nonsense\r\n\r\n"])
async def test_nothing_is_told_of_the_node_to_who_has_no_role_for_it(tmp_path: Path, sent: bytes) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port, roles=Role.OBSERVER) as peer:
        client = await peer.dial()
        await client.send(sent)
        heard = await client.heard()
        assert heard.status in (400, 403, 404)
        assert "x-pairmesh-state" not in heard.headers
        assert json.loads(heard.body).keys() == {"code"}
        client.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [(b"GET", CHAT), (b"POST", b"/health"), (b"GET", b"/v1/models"), (b"GET", b"/"), (b"POST", b"/x")],
)
async def test_there_is_nothing_else_on_the_ingress(tmp_path: Path, method: bytes, path: bytes) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(method=method, path=path))
        heard = await client.heard()
        assert (heard.status, code_of(heard)) == (404, "route_unknown")
        client.close()


@pytest.mark.threat("T27")
async def test_a_member_that_was_removed_is_cut_at_its_next_request(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        await client.head()
        await client.send(chunked())
        assert (await client.heard()).status == 200
        peer.relay.gate.members.clear()
        await client.send(head())
        await client.ended()
        client.close()
        assert len(up.requests) == 1


async def test_a_stranger_gets_no_handshake(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        stranger = await start_node(tmp_path / "stranger")
        with contextlib.suppress(OSError):
            client = await peer.dial(stranger)
            client.close()
        await until(lambda: peer.serving.refusals)
        await stranger.tasks.aclose()
        assert len(peer.relay.roll) == 0
        assert up.requests == []


@pytest.mark.parametrize(
    "changes",
    [
        {"x_pairmesh_route": None},
        {"x_pairmesh_route": "v=2;" + ROUTE[4:]},
        {"x_pairmesh_route": ROUTE + ";z=1"},
        {"x_pairmesh_route": ROUTE.replace("i=7", "i=4294967296")},
        {"x_pairmesh_model": None},
        {"x_pairmesh_length": None},
        {"x_pairmesh_length": "-1"},
        {"x_pairmesh_ahead": "-1"},
        {"x_pairmesh_ahead": "nan"},
    ],
)
async def test_a_head_that_announces_nothing_is_malformed(tmp_path: Path, changes: dict[str, Any]) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(**changes))
        heard = await client.heard()
        assert (heard.status, heard.headers["x-pairmesh-error"]) == (400, "route_malformed")
        client.close()
        assert up.requests == []


@pytest.mark.parametrize("told", [None, "0", "2.062"])
async def test_what_the_router_expects_reaches_admission_and_an_older_one_says_nothing(
    tmp_path: Path, told: str | None
) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(x_pairmesh_ahead=told))
        await client.head()
        await client.send(chunked())
        assert (await client.heard()).status == 200
        client.close()
        ((route, _),) = peer.relay.gate.admitted
        assert route.ahead == (None if told is None else float(told))


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (len(BODY) + 1, BODY),
        (len(BODY), BODY[:-1] + b" }"),
        (13, b'{"model":"x"}'),
        (2, b"{}"),
        (2, b"[]"),
        (25, b'{"model":"m","model":"x"}'),
    ],
)
async def test_a_body_other_than_announced_never_reaches_the_engine(
    tmp_path: Path, length: int, body: bytes
) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head(length))
        await client.head()
        await client.send(chunked(body))
        heard = await client.heard()
        assert (heard.status, code_of(heard)) == (400, "route_mismatch")
        client.close()
        assert up.requests == []
        peer.assert_idle()


async def test_a_refusal_comes_before_the_body_and_keeps_the_connection(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        peer.relay.gate.cause = "queue_full"
        for _ in range(2):
            await client.send(head())
            heard = await client.heard()
            assert (heard.status, heard.headers["x-pairmesh-refused"]) == (429, "queue_full")
            assert decode_state(heard.headers["x-pairmesh-state"].encode()) == STATE
            await client.send(b"0\r\n\r\n")
        peer.relay.gate.cause = None
        await client.send(head())
        assert (await client.head())[0] == 100
        await client.send(chunked())
        assert (await client.heard()).status == 200
        client.close()
        peer.assert_idle()


async def test_a_refused_body_that_comes_all_the_same_ends_the_connection(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        peer.relay.gate.cause = "pressure"
        await client.send(head())
        await client.heard()
        await client.send(chunked())
        await client.ended()
        client.close()
        assert up.requests == []


async def test_a_router_that_leaves_before_its_body_gives_its_place_back(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port) as peer:
        client = await peer.dial()
        await client.send(head())
        assert (await client.head())[0] == 100
        client.reset()
        await until(lambda: peer.local.in_flight("e0") == 0)
        await until(lambda: len(peer.relay.roll) == 0)
        peer.assert_idle()


async def test_an_engine_that_cannot_be_reached_is_an_error_of_the_ingress_itself(tmp_path: Path) -> None:
    closed = HeldPort()
    async with ingress(tmp_path, closed.port) as peer:
        client = await peer.dial()
        await client.send(head())
        await client.head()
        await client.send(chunked())
        heard = await client.heard()
        assert (heard.status, heard.headers["x-pairmesh-error"]) == (502, "upstream_unreachable")
        client.close()
        peer.assert_idle()
