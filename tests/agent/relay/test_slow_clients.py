"""Clients that trickle, stop reading, or vanish: each is let go in its time, and the others notice nothing.

Time is moved by hand; nothing here waits for it to pass.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.identity.admittance import Refusal
from agent.identity.routes import Port
from agent.relay.http.connection import ServerConnection
from router_core import limits
from router_core.record.state import Dialect
from tests.agent.relay.client import BODY, Client, get, post
from tests.agent.relay.ingress_rig import head, ingress
from tests.agent.relay.rig import Relay, running
from tests.support.recorder import Exchange, Recorder, Script, say_ok
from tests.support.until import until

SECOND = 1_000
ONE_READ = 256 * limits.KIB
DOORS = pytest.mark.parametrize("door", ["api", "ingress"])


class ShiftedClock:
    """The loop's clock, moved forward at will."""

    def __init__(self) -> None:
        self.ahead_ms = 0
        self._loop = asyncio.get_running_loop()

    def boot_ms(self) -> int:
        return int(self._loop.time() * 1000) + self.ahead_ms

    def boot_us(self) -> int:
        return int(self._loop.time() * 1_000_000) + self.ahead_ms * 1000

    def wall_ms(self) -> int:
        return 0


@dataclass(slots=True)
class Door:
    """One listener, its clock, and how to come to it. ``rest`` is what a request's head says beyond its framing."""

    relay: Relay
    up: Recorder
    clock: ShiftedClock
    dial: Callable[[], Awaitable[Client]]
    start: bytes
    in_flight: Callable[[], int]
    tls: bool
    """TLS transports hold a second buffer."""

    def pass_ms(self, ms: int) -> None:
        """Let time go on, and every connection look at it."""
        self.clock.ahead_ms += ms
        for connection in self.relay.roll:
            connection.tick(self.clock.boot_ms())

    @property
    def connections(self) -> list[ServerConnection]:
        return [each for each in self.relay.roll if isinstance(each, ServerConnection)]

    def buffered(self) -> int:
        """Reply bytes that wait in this process."""
        return sum(each._transport.get_write_buffer_size() for each in self.connections)

    def received(self) -> int:
        """Body bytes of requests that are not whole yet."""
        return sum(each.received for each in self.connections)

    def phases(self) -> list[str]:
        return [each.phase.value for each in self.connections]

    def stalls(self) -> list[object]:
        """Since when each connection has waited for its client, and with how many bytes."""
        return [each._stalled_at for each in self.connections]

    def stalled(self) -> bool:
        return any(each.is_stalled for each in self.connections)

    async def gone(self) -> None:
        await until(lambda: len(self.relay.roll) == 0, picture=self.phases)
        self.relay.assert_idle()
        assert self.in_flight() == 0


@asynccontextmanager
async def opened(door: str, folder: Path, script: Script = say_ok) -> AsyncIterator[Door]:
    clock = ShiftedClock()
    async with Recorder(script) as up:
        if door == "api":
            async with running(up.port, clock=clock) as relay:
                start = post(relay.port).partition(b"Content-Length")[0]
                yield Door(relay, up, clock, lambda: Client.to(relay.port), start, lambda: 0, False)
            return
        async with ingress(folder, up.port, clock=clock) as peer:
            start = head(transfer_encoding=None, expect=None)[:-2]
            count = lambda: peer.local.in_flight("e0")  # noqa: E731
            yield Door(peer.relay, up, clock, peer.dial, start, count, True)


TRICKLES = {
    "in the head": (b"X-Fill: ", 10, b"x"),
    "in the body": (b"Content-Length: 1000000\r\n\r\n", 5, b"x"),
    "in a chunk": (b"Transfer-Encoding: chunked\r\n\r\nffff\r\n", 5, b"x"),
    "in a chunk's size": (b"Transfer-Encoding: chunked\r\n\r\n", 5, b"0"),
    "in a chunk's extension": (b"Transfer-Encoding: chunked\r\n\r\n5;", 5, b"x"),
    "in the trailers": (b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-T: ", 5, b"x"),
}


@DOORS
@pytest.mark.parametrize("where", TRICKLES)
@pytest.mark.threat("T20")
async def test_a_client_that_trickles_is_closed_in_its_time(tmp_path: Path, where: str, door: str) -> None:
    start, seconds, drop = TRICKLES[where]
    async with opened(door, tmp_path) as at:
        client = await at.dial()
        await client.send(at.start + start)
        await until(lambda: at.phases() == ["head" if where == "in the head" else "body"])
        for _ in range(seconds - 1):
            await client.send(drop)
            at.pass_ms(SECOND)
        assert at.relay.watch.lines == []
        await client.send(drop)
        at.pass_ms(2 * SECOND)
        assert (await client.head())[0] == 408
        at.pass_ms(2 * SECOND)
        await at.gone()
        assert at.up.requests == []
        client.close()


@DOORS
async def test_a_body_fast_enough_is_left_alone(tmp_path: Path, door: str) -> None:
    async with opened(door, tmp_path) as at:
        client = await at.dial()
        await client.send(at.start + b"Content-Length: 1000000\r\n\r\n" + b"x" * 100_000)
        await until(lambda: at.received() == 100_000)
        at.pass_ms(10 * SECOND)
        assert at.relay.watch.lines == []
        client.close()
        await at.gone()


@pytest.mark.threat("T20")
async def test_a_handshake_that_trickles_is_cut(tmp_path: Path) -> None:
    async with Recorder() as up, ingress(tmp_path, up.port, handshake_s=0.2) as peer:
        outgoing = ssl.MemoryBIO()
        half = peer.calling.contexts.client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x")
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
        hello = outgoing.read()
        client = await Client.to(peer.port)
        await client.send(hello[: len(hello) // 2])
        await until(lambda: peer.serving.admittance.pending == 1)
        await client.ended()
        client.close()
        await until(lambda: peer.serving.admittance.pending == 0)
        assert peer.serving.refusals == [(Port.INGRESS, Refusal.HANDSHAKE)]
        assert len(peer.relay.roll) == 0


@pytest.mark.threat("T20")
async def test_a_router_that_never_sends_the_body_it_was_asked_for_gives_its_place_back(
    tmp_path: Path,
) -> None:
    async with opened("ingress", tmp_path) as at:
        client = await at.dial()
        await client.send(head())
        assert (await client.head())[0] == 100
        assert at.in_flight() == 1
        at.pass_ms(6 * SECOND)
        assert at.in_flight() == 0
        assert (await client.head())[0] == 408
        client.close()
        await at.gone()


@pytest.mark.threat("T20")
async def test_a_router_that_never_ends_a_refused_body_is_dropped(tmp_path: Path) -> None:
    async with opened("ingress", tmp_path) as at:
        at.relay.gate.cause = "queue_full"
        client = await at.dial()
        await client.send(head())
        assert (await client.heard()).status == 429
        await client.send(b"0\r\n")
        at.pass_ms(1 * SECOND)
        assert at.phases() == ["empty"]
        at.pass_ms(2 * SECOND)
        await client.ended()
        client.close()
        await at.gone()


@DOORS
async def test_an_idle_connection_is_closed_after_ninety_seconds(tmp_path: Path, door: str) -> None:
    async with opened(door, tmp_path) as at:
        client = await at.dial()
        await client.send(at.start + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await client.heard()
        at.pass_ms(limits.KEEP_ALIVE_IDLE - SECOND)
        await client.send(at.start + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        assert (await client.heard()).status == 200
        at.pass_ms(limits.KEEP_ALIVE_IDLE + SECOND)
        await client.ended()
        client.close()
        await at.gone()


@dataclass(slots=True)
class Flood:
    """An engine that streams as much as it gets rid of, up to 256 MiB."""

    sent: int = 0
    cut: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, exchange: Exchange) -> None:
        try:
            await exchange.begin_stream()
            for _ in range(256 * 16):
                await exchange.chunk(b"x" * 65_536)
                self.sent += 65_536
        except ConnectionError:
            self.cut.set()


@DOORS
@pytest.mark.threat("T22")
async def test_a_client_that_stops_reading_pauses_the_engine_and_is_dropped_after_thirty_seconds(
    tmp_path: Path, door: str
) -> None:
    flood = Flood()
    async with opened(door, tmp_path, flood) as at:
        client = await at.dial()
        await client.send(at.start + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        await until(at.stalled)
        at.pass_ms(0)
        assert at.buffered() <= (limits.WRITE_HIGH + ONE_READ) * (2 if at.tls else 1)
        at.pass_ms(limits.WRITE_STALL - SECOND)
        assert len(at.relay.roll) == 1
        at.pass_ms(2 * SECOND)
        await asyncio.wait_for(flood.cut.wait(), 5)
        assert flood.sent < 64 * limits.MIB
        await at.gone()
        line = at.relay.watch.lines[0]
        assert (line.status, line.code) == (499, "slow_client")
        assert at.relay.watch.results() == ["cancelled"]
        client.reset()


@DOORS
async def test_a_client_that_reads_slowly_is_kept(tmp_path: Path, door: str) -> None:
    flood = Flood()
    async with opened(door, tmp_path, flood) as at:
        client = await at.dial()
        await client.send(at.start + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        for _ in range(3):
            await until(at.stalled)
            at.pass_ms(limits.WRITE_STALL - 5 * SECOND)
            before = at.stalls()
            while at.stalls() == before:
                await client.reader.readexactly(65_536)
        await until(at.stalled)
        assert at.relay.watch.lines == []
        client.reset()
        await asyncio.wait_for(flood.cut.wait(), 5)
        await at.gone()


def long_list(relay: Relay, names: int) -> None:
    relay.listed.names = [(f"{number:0100}", Dialect.CHAT) for number in range(names)]


@pytest.mark.threat("T22")
async def test_replies_nobody_takes_hold_up_the_requests_behind_them(tmp_path: Path) -> None:
    async with opened("api", tmp_path) as at:
        long_list(at.relay, 1_000)
        client = await at.dial()
        await client.send(get(at.relay.port, b"/v1/models") * 500)
        await until(lambda: at.phases() == ["untaken"])
        answered = len(at.relay.watch.lines)
        assert answered < 250
        assert at.buffered() <= limits.WRITE_HIGH + ONE_READ
        for _ in range(500):
            assert len((await client.heard()).body) > 100_000
        client.close()
        await at.gone()


@pytest.mark.threat("T22")
@pytest.mark.parametrize("headers", [b"", b"Connection: close\r\n"])
async def test_a_reply_nobody_takes_is_dropped_after_thirty_seconds(tmp_path: Path, headers: bytes) -> None:
    async with opened("api", tmp_path) as at:
        long_list(at.relay, 100_000)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            silent.connect(("127.0.0.1", at.relay.port))
            silent.send(get(at.relay.port, b"/v1/models", headers=headers))
            await until(at.stalled)
            at.pass_ms(0)
            assert at.phases() == ["closed" if headers else "untaken"]
            at.pass_ms(limits.WRITE_STALL - SECOND)
            assert len(at.relay.roll) == 1
            at.pass_ms(2 * SECOND)
            await at.gone()


@pytest.mark.threat("T20")
async def test_two_hundred_slow_clients_leave_a_normal_one_answered(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await (exchange.gone() if b"wait" in exchange.request.body else say_ok(exchange))

    async with opened("api", tmp_path, script) as at:
        waiting = BODY.replace(b"hello", b"wait!")
        starts = [start for start, _, _ in TRICKLES.values()]
        starts.append(b"Content-Length: %d\r\n\r\n%s" % (len(waiting), waiting))
        slow = []
        for number in range(200):
            slow.append(await at.dial())
            await slow[-1].send(at.start + starts[number % len(starts)])
        await until(lambda: len(at.relay.roll) == 200 and "idle" not in at.phases())
        normal = await at.dial()
        for _ in range(50):
            await normal.send(post(at.relay.port))
            assert (await normal.heard()).status == 200
        at.pass_ms(11 * SECOND)
        at.pass_ms(2 * SECOND)
        kept = sum(1 for number in range(200) if number % len(starts) == len(starts) - 1)
        await until(lambda: len(at.relay.roll) == kept + 1, picture=at.phases)
        await normal.send(post(at.relay.port))
        assert (await normal.heard()).status == 200
        for client in (*slow, normal):
            client.reset()
        await at.gone()


@DOORS
@pytest.mark.parametrize("where", [*TRICKLES, "before anything"])
async def test_a_client_that_closes_its_end_is_gone(tmp_path: Path, where: str, door: str) -> None:
    async with opened(door, tmp_path) as at:
        client = await at.dial()
        if where in TRICKLES:
            await client.send(at.start + TRICKLES[where][0])
        await until(
            lambda: at.phases() in (["head"], ["body"]) if where in TRICKLES else at.phases() == ["idle"]
        )
        if client.writer.can_write_eof():
            client.writer.write_eof()
            await client.ended()
        else:
            client.close()
        await at.gone()
        assert at.up.requests == []
        client.close()


async def test_an_engine_that_answers_without_reading_its_request_is_let_go(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await left.wait()
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running(server.sockets[0].getsockname()[1]) as relay:
        body = BODY.replace(b"hello", b"x" * 16 * limits.MIB)
        client = await Client.to(relay.port)
        await client.send(post(relay.port, body))
        assert (await client.heard()).status == 200
        await until(lambda: relay.wiring.pool.open_connections == 0)
        client.close()
    left.set()
    server.close()
    await server.wait_closed()


@pytest.mark.threat("T23")
async def test_the_kernel_watches_for_routers_that_fell_silent(tmp_path: Path) -> None:
    async with opened("ingress", tmp_path) as at:
        client = await at.dial()
        await until(lambda: len(at.relay.roll) == 1)
        (connection,) = at.connections
        sock = connection._transport.get_extra_info("socket")
        tcp = socket.IPPROTO_TCP
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, between, probes = (
            sock.getsockopt(tcp, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + between * probes <= 10
        assert sock.getsockopt(tcp, socket.TCP_USER_TIMEOUT) <= 10_000
        client.close()
        await at.gone()
