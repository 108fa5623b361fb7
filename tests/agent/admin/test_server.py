"""Claims about the admin API over real sockets: who is answered, what, and with which headers."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.admin.guard import HEADERS
from agent.admin.peercred import Peer, SocketAdmission, peer_of
from agent.admin.server import AdminServer
from agent.store.folders import RefuseToStart
from router_core import limits
from tests.agent.admin.daemon import CANARY, Daemon
from tests.agent.observe.records import record
from tests.support.until import until

ME = os.geteuid()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    async with Daemon(tmp_path) as running:
        yield running


async def test_the_documents_are_read_over_both_listeners(daemon: Daemon) -> None:
    daemon.journal.put(record("A" * 26))
    for ask in (daemon.tcp, daemon.sock):
        code, headers, body = await ask("/v1/status")
        assert code == 200
        assert headers["Content-Type"] == "application/json"
        assert json.loads(body)["own"]["name"] == "atlas"
        assert json.loads((await ask("/v1/view"))[2]) == {"gen": 1, "nodes": []}
        assert json.loads((await ask(f"/v1/decisions/{'A' * 26}"))[2])["chosen"] == "@atlas/ollama"
        code, headers, body = await ask("/metrics")
        assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert b"pairmesh_x_total 0\n" in body


async def test_decisions_are_filtered_and_bad_queries_refused(daemon: Daemon) -> None:
    for number in range(3):
        daemon.journal.put(record(f"{number:026d}"))

    async def ids(query: str) -> list[str]:
        code, _, body = await daemon.tcp(f"/v1/decisions{query}")
        assert code == 200
        return [decision["id"][-1] for decision in json.loads(body)["decisions"]]

    assert await ids("") == ["2", "1", "0"]
    assert await ids("?limit=1") == ["2"]
    assert await ids("?action=route&reason=native&since=0") == ["2", "1", "0"]
    assert await ids("?action=reject") == []
    for bad in (
        "limit=1001",
        "limit=-1",
        "limit=x",
        "action=fly",
        "limit=1&limit=2",
        "since=",
        "since=-1",
        f"since={2**63}",
        "what=1",
        "%zz",
    ):
        status, _, body = await daemon.tcp(f"/v1/decisions?{bad}")
        assert status == 400, bad
        (said,) = json.loads(body)["faults"]
        assert "limit, 0 to 1,000" in said
        assert " native " in said
    assert (await daemon.tcp("/v1/decisions/none"))[0] == 404


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/do/trust-list", "/v1/explain/", "/v1/replay/x", "/nothing", "/metrics/", "/v1/status/x"],
)
async def test_what_does_not_exist_on_tcp_is_404(daemon: Daemon, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "PUT"):
        assert (await daemon.tcp(path, method))[0] == 404


@pytest.mark.threat("T45")
async def test_nothing_is_written_over_tcp(daemon: Daemon) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        code, headers, _ = await daemon.tcp("/v1/status", method)
        assert (code, headers["Allow"]) == (405, "GET, HEAD")
    assert (await daemon.tcp("/v1/do/trust-list", "POST"))[0] == 404
    assert daemon.told == []


async def test_head_is_a_get_without_its_body(daemon: Daemon) -> None:
    code, _, body = await daemon.tcp("/metrics", "HEAD")
    assert (code, body) == (200, b"")


@pytest.mark.threat("T35")
@pytest.mark.threat("T36")
async def test_pages_of_other_sites_are_refused_and_nothing_is_echoed(daemon: Daemon) -> None:
    refusals = [
        await daemon.tcp("/v1/status", Host=f"{CANARY}.example"),
        await daemon.tcp("/v1/status", Origin=f"https://{CANARY}.example"),
        await daemon.tcp("/v1/status", "OPTIONS", Origin="null"),
        await daemon.tcp("/v1/status", Sec_Fetch_Site="cross-site"),
    ]
    assert [code for code, *_ in refusals] == [403] * 4
    assert json.loads(refusals[0][2]) == {"error": "host_refused"}
    assert json.loads(refusals[1][2]) == {"error": "origin_refused"}
    for _, headers, body in refusals:
        assert CANARY.encode() not in body
        assert not [name for name in headers if name.startswith("Access-Control")]


async def test_an_allowed_origin_gets_exactly_itself_back(tmp_path: Path) -> None:
    async with Daemon(tmp_path, origins=["https://panel.lan"]) as daemon:
        code, headers, _ = await daemon.tcp(
            "/v1/status", Origin="https://panel.lan", Sec_Fetch_Site="cross-site"
        )
        assert (code, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (
            200,
            "https://panel.lan",
            "Origin",
        )
        code, headers, _ = await daemon.tcp("/v1/status", "OPTIONS", Origin="https://panel.lan")
        assert (code, headers["Access-Control-Allow-Methods"], headers["Access-Control-Max-Age"]) == (
            204,
            "GET",
            "600",
        )
        assert "Access-Control-Allow-Credentials" not in headers


async def test_every_answer_carries_the_headers(daemon: Daemon) -> None:
    answers = [
        await daemon.tcp("/metrics"),
        await daemon.tcp("/nothing"),
        await daemon.tcp("/v1/status", "POST"),
        await daemon.tcp("/v1/status", Host="evil.example"),
        await daemon.sock("/v1/status"),
        await daemon.sock("/v1/do/none", "POST"),
    ]
    for _, headers, _ in answers:
        assert HEADERS.items() <= headers.items()
        assert headers["Server"] == "pairmesh"


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + CANARY.encode() + b"\r\n\r\n",
        b"\x16\x03\x01" + CANARY.encode() + b"\r\n\r\n",
        b"GET http://127.0.0.1/metrics HTTP/1.1\r\nHost: "
        + CANARY.encode()
        + b"\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n",
    ],
)
async def test_what_the_parser_refuses_is_not_echoed_either(daemon: Daemon, request_: bytes) -> None:
    answer = await daemon.raw(request_)
    assert answer.split()[1] in (b"400", b"403")
    assert CANARY.encode() not in answer
    assert b"Content-Security-Policy: default-src 'none'" in answer


async def test_more_connections_than_the_limit_are_closed_and_the_rest_served(daemon: Daemon) -> None:
    writers = []
    for _ in range(limits.ADMIN_CONNECTIONS):
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        writers.append(writer)
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: localhost:{daemon.port}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert await daemon.raw(b"") == b""
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await until(lambda: not daemon.server.connections)
    assert (await daemon.tcp("/metrics"))[0] == 200


# --- the socket ------------------------------------------------------------------------------------------


@pytest.mark.threat("T45")
async def test_a_verb_runs_for_the_daemons_own_user(daemon: Daemon) -> None:
    code, _, body = await daemon.sock("/v1/do/trust-list", "POST", b'{"all": true}')
    assert (code, json.loads(body)) == (200, {"members": []})
    assert (await daemon.sock("/v1/do/trust-list", "POST"))[0] == 200
    assert daemon.told == [{"all": True}, {}]
    (line, *_) = [json.loads(line) for line in daemon.lines]
    assert (line["event"], line["verb"], line["uid"]) == ("admin.verb_done", "trust-list", ME)


@pytest.mark.threat("T45")
@pytest.mark.parametrize("peer", [Peer(pid=1, uid=ME + 4_000, gids=frozenset({77})), None])
async def test_another_user_is_refused_everything(tmp_path: Path, peer: Peer | None) -> None:
    admission = SocketAdmission(uid=ME, group=None)
    async with Daemon(tmp_path, admission=admission, read_peer=lambda _: peer) as daemon:
        for path, method in (("/v1/do/trust-list", "POST"), ("/v1/status", "GET"), ("/metrics", "GET")):
            code, _, body = await daemon.sock(path, method, b"{}")
            assert (code, json.loads(body)) == (403, {"error": "peer_refused"})
        assert daemon.told == []


@pytest.mark.threat("T45")
@pytest.mark.parametrize(
    ("uid", "gids", "admitted"),
    [(0, [], True), (1_000, [], True), (1_001, [500], True), (1_001, [501], False), (1_001, [], False)],
)
def test_admitted_are_root_the_daemons_user_and_its_group(uid: int, gids: list[int], admitted: bool) -> None:
    peer = Peer(pid=1, uid=uid, gids=frozenset(gids))
    assert SocketAdmission(uid=1_000, group=500).admits(peer) is admitted
    assert SocketAdmission(uid=1_000, group=None).admits(peer) is (uid in (0, 1_000))


def test_the_kernel_tells_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        peer = peer_of(ours)
    assert peer is not None
    assert (peer.pid, peer.uid) == (os.getpid(), ME)
    assert {os.getegid(), *os.getgroups()} <= peer.gids


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a process other groups")
@pytest.mark.parametrize("more", [[], list(range(70_000, 70_255))])
def test_the_kernel_tells_the_supplementary_groups_of_who_is_at_the_other_end(more: list[int]) -> None:
    asks = "import socket; from agent.admin.peercred import peer_of; print(*peer_of(socket.socketpair()[0]).gids)"
    done = subprocess.run(
        [sys.executable, "-c", asks], capture_output=True, text=True, check=True, extra_groups=[64_999, *more]
    )
    told = {int(gid) for gid in done.stdout.split()}
    assert told >= {64_999, *more}


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"3", b"\xff\xfe", b'{"a":' * 5_000, b'{"a":1}{}', b'{"a":"\xff"}', b"null"]
)
async def test_malformed_json_is_400_and_runs_nothing(daemon: Daemon, body: bytes) -> None:
    code, _, answer = await daemon.sock("/v1/do/trust-list", "POST", body)
    assert (code, json.loads(answer)) == (400, {"error": "body_malformed"})
    assert daemon.told == []


async def test_other_media_and_too_much_of_it_are_refused(daemon: Daemon) -> None:
    verb = "/v1/do/trust-list"
    assert (await daemon.sock(verb, "POST", b"{}", Content_Type="text/plain"))[0] == 415
    assert (await daemon.sock(verb, "POST", b"{}", Content_Encoding="gzip"))[0] in (400, 415)
    big = b'{"a":"' + b"x" * limits.ADMIN_BODY + b'"}'
    assert (await daemon.sock(verb, "POST", big))[0] == 413
    assert daemon.told == []


async def test_a_refused_verb_says_why(daemon: Daemon) -> None:
    code, _, body = await daemon.sock("/v1/do/trust-add", "POST", b"{}")
    assert (code, json.loads(body)) == (409, {"error": "mesh_mismatch", "detail": "two paired meshes"})


async def test_a_crashed_verb_says_nothing_of_its_exception(daemon: Daemon) -> None:
    code, _, body = await daemon.sock("/v1/do/trust-remove", "POST", b"{}")
    assert (code, json.loads(body)) == (500, {"error": "internal"})
    assert CANARY not in "\n".join(daemon.lines)
    assert json.loads(daemon.lines[-1])["error"] == "RuntimeError"


async def test_a_verb_is_posted_and_an_unknown_one_is_404(daemon: Daemon) -> None:
    assert (await daemon.sock("/v1/do/trust-list"))[0] == 405
    assert (await daemon.sock("/v1/do/drain", "POST", b"{}"))[0] == 404
    assert (await daemon.sock("/v1/do/", "POST", b"{}"))[0] == 404
    assert (await daemon.sock("/v1/status", "POST", b"{}"))[0] == 405


async def test_the_socket_is_private_and_goes_with_the_daemon(tmp_path: Path) -> None:
    async with Daemon(tmp_path, admission=SocketAdmission(uid=ME, group=None)) as daemon:
        assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600
    assert not daemon.path.exists()


async def test_the_socket_belongs_to_the_group_if_the_daemon_is_in_it(tmp_path: Path) -> None:
    async with Daemon(tmp_path, admission=SocketAdmission(uid=ME, group=os.getegid())) as daemon:
        assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o660
        assert daemon.path.stat().st_gid == os.getegid()


async def test_what_a_dead_daemon_left_is_replaced_and_a_living_one_respected(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "admin.sock"))
    stale.close()
    async with Daemon(tmp_path) as daemon:
        second = AdminServer(daemon.routes)
        with pytest.raises(RefuseToStart) as refused:
            await second.listen_socket(daemon.path)
        assert refused.value.reason == "socket_in_use"
        assert (await daemon.sock("/v1/status"))[0] == 200


async def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked.sock"
    blocked.write_text("precious")
    with pytest.raises(RefuseToStart) as refused:
        await AdminServer(Daemon(tmp_path).routes).listen_socket(blocked)
    assert refused.value.reason == "socket_blocked"
    assert blocked.read_text() == "precious"


async def test_a_socket_whose_daemon_is_too_busy_to_answer_is_not_taken_from_it(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with contextlib.ExitStack() as open_now:
        busy = open_now.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(str(path))
        busy.listen(0)
        waiting = open_now.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))
        with pytest.raises(RefuseToStart) as refused:
            await AdminServer(Daemon(tmp_path).routes).listen_socket(path)
        assert refused.value.reason == "socket_in_use"
        assert path.is_socket()


async def test_a_folder_that_takes_no_socket_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RefuseToStart, match="RUNTIME_DIRECTORY") as refused:
        await AdminServer(Daemon(tmp_path).routes).listen_socket(tmp_path / "absent" / "admin.sock")
    assert refused.value.reason == "socket_not_made"


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefuseToStart) as refused:
        await AdminServer(Daemon(tmp_path).routes).listen_socket(tmp_path / ("x" * 107))
    assert refused.value.reason == "socket_path_too_long"


async def test_a_closing_daemon_frees_its_port_at_once(tmp_path: Path) -> None:
    async with Daemon(tmp_path) as daemon:
        port = daemon.port
        assert (await daemon.tcp("/metrics"))[0] == 200
    server = AdminServer(daemon.routes)
    assert await server.listen_tcp("127.0.0.1", port) == port
    await server.aclose()
