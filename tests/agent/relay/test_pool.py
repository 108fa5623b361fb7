"""The pool of connections, against sockets that count."""

import asyncio
import contextlib
import errno
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.relay.upstream.connection import Options, Target
from agent.relay.upstream.pool import ConnectFailed, Pool
from router_core import limits
from router_core.router.failure import OWN, Cause
from tests.support.until import until
from tests.support.vouched import Vouched

BURST = 24


async def test_a_burst_runs_few_handshakes_with_one_peer_at_a_time() -> None:
    pending: set[asyncio.StreamWriter] = set()
    seen: list[int] = []

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending.add(writer)
        seen.append(len(pending))

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(asyncio.get_running_loop())
    options = Options(
        idle_ms=0,
        idle_most=0,
        most=2 * BURST,
        off_host=True,
        context=ssl.create_default_context(),
        server_name="x",
    )

    async def one() -> None:
        with contextlib.suppress(ConnectFailed):
            await pool.connect(Target("peer", "127.0.0.1", port), options)

    async with server:
        burst = [asyncio.create_task(one()) for _ in range(BURST)]
        await until(lambda: len(seen) >= limits.HANDSHAKES_TO_PEER)
        while not all(task.done() for task in burst):
            for writer in tuple(pending):
                pending.discard(writer)
                writer.transport.abort()
            await until(lambda: pending or all(task.done() for task in burst))
        await asyncio.gather(*burst)
    assert len(seen) == BURST
    assert max(seen) <= limits.HANDSHAKES_TO_PEER
    assert pool.open_connections == 0


def outside(context: ssl.SSLContext | None, *, admits: bool = True) -> Options:
    """How an endpoint outside the mesh, called ``localhost``, is connected."""
    return Options(
        idle_ms=0,
        idle_most=0,
        most=8,
        off_host=True,
        context=context,
        server_name="localhost",
        admits=lambda _: admits,
    )


@contextlib.asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[int]]]:
    """A server on loopback: its port, and an entry per connection that got through the handshake."""
    got: list[int] = []

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(1)
        writer.transport.abort()

    server = await asyncio.start_server(accepted, "localhost", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield port, got


async def test_a_name_outside_the_mesh_is_looked_up_and_verified(tmp_path: Path) -> None:
    vouched = Vouched(tmp_path, "localhost")
    pool = Pool(asyncio.get_running_loop())
    async with listening(vouched.server()) as (port, _):
        connection = await pool.connect(Target("out", "localhost", port), outside(vouched.client()))
        tls = connection.transport.get_extra_info("ssl_object")
        assert tls.context.check_hostname
        connection.abort()
        await until(lambda: pool.open_connections == 0)


@pytest.mark.parametrize("names", [("other.example",), ("127.0.0.1",)])
async def test_a_certificate_for_another_name_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    vouched = Vouched(tmp_path, *names)
    pool = Pool(asyncio.get_running_loop())
    async with listening(vouched.server()) as (port, _):
        with pytest.raises(ConnectFailed) as caught:
            await pool.connect(Target("out", "localhost", port), outside(vouched.client()))
    assert caught.value.cause is Cause.IDENTITY
    assert pool.open_connections == 0


async def test_an_authority_that_the_system_does_not_trust_is_refused(tmp_path: Path) -> None:
    pool = Pool(asyncio.get_running_loop())
    async with listening(Vouched(tmp_path, "localhost").server()) as (port, _):
        with pytest.raises(ConnectFailed) as caught:
            await pool.connect(Target("out", "localhost", port), outside(ssl.create_default_context()))
    assert caught.value.cause is Cause.IDENTITY


async def test_a_name_that_leads_where_it_may_not_is_never_connected() -> None:
    pool = Pool(asyncio.get_running_loop())
    async with listening() as (port, got):
        with pytest.raises(ConnectFailed) as caught:
            await pool.connect(Target("out", "localhost", port), outside(None, admits=False))
    assert caught.value.cause is Cause.CONNECT_FAILED
    assert got == []
    assert pool.open_connections == 0


class Ways:
    """Servers for one name on several loopback addresses, and what the pool was told of each."""

    def __init__(self, vouched: Vouched, name: str = "peer.mesh") -> None:
        self.vouched, self.name = vouched, name
        self.told: list[tuple[str, Cause | None]] = []
        self.port = 0
        self.got: dict[str, list[asyncio.StreamWriter]] = {}

    def options(self, *ips: str) -> Options:
        return Options(
            idle_ms=60_000,
            idle_most=8,
            most=8,
            off_host=True,
            context=self.vouched.client(),
            server_name=self.name,
            addresses=tuple((ip, self.port) for ip in ips),
            reached=lambda ip, _port, cause: self.told.append((ip, cause)),
        )

    @contextlib.asynccontextmanager
    async def at(self, ip: str, tls: bool = True) -> AsyncIterator[None]:
        """Something that accepts there; without ``tls`` it never says anything."""
        got = self.got.setdefault(ip, [])

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(writer)
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
            writer.close()

        context = self.vouched.server() if tls else None
        server = await asyncio.start_server(accepted, ip, self.port, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in got:
                writer.transport.abort()


PEER = Target("peer")


@pytest.fixture
def ways(tmp_path: Path) -> Ways:
    return Ways(Vouched(tmp_path, "peer.mesh"))


async def test_the_first_address_is_used_alone_while_it_works(ways: Ways) -> None:
    pool = Pool(asyncio.get_running_loop())
    async with ways.at("127.0.0.2"), ways.at("127.0.0.3"):
        connection = await pool.connect(PEER, ways.options("127.0.0.2", "127.0.0.3"))
        assert connection.transport.get_extra_info("peername")[0] == "127.0.0.2"
        assert ways.told == [("127.0.0.2", None)]
        assert pool.open_connections == 1
        connection.abort()
        await until(lambda: pool.open_connections == 0)
    assert ways.got["127.0.0.3"] == []


async def test_an_address_that_refuses_costs_no_time(ways: Ways) -> None:
    pool, loop = Pool(asyncio.get_running_loop()), asyncio.get_running_loop()
    async with ways.at("127.0.0.3"):
        began = loop.time()
        connection = await pool.connect(PEER, ways.options("127.0.0.2", "127.0.0.3"))
        assert loop.time() - began < limits.NEXT_ADDRESS / 1_000
        assert ways.told == [("127.0.0.2", Cause.CONNECT_REFUSED), ("127.0.0.3", None)]
        connection.abort()
        await until(lambda: pool.open_connections == 0)


async def test_an_address_that_is_silent_is_overtaken_by_the_next_and_let_go(ways: Ways) -> None:
    pool, loop = Pool(asyncio.get_running_loop()), asyncio.get_running_loop()
    async with ways.at("127.0.0.2", tls=False), ways.at("127.0.0.3"):
        began = loop.time()
        connection = await pool.connect(PEER, ways.options("127.0.0.2", "127.0.0.3"))
        assert loop.time() - began >= limits.NEXT_ADDRESS / 1_000 * 0.9
        assert connection.transport.get_extra_info("peername")[0] == "127.0.0.3"
        assert ways.told == [("127.0.0.3", None)]
        [silent] = ways.got["127.0.0.2"]
        await until(silent.transport.is_closing)
        pool.keep(connection, 60_000)
        assert pool.take(PEER) is connection, "all addresses lead to one place"
        connection.abort()
        await until(lambda: pool.open_connections == 0)


async def test_if_no_address_works_the_cause_is_that_of_the_best(ways: Ways) -> None:
    pool = Pool(asyncio.get_running_loop())
    async with ways.at("127.0.0.4"):
        pass
    with pytest.raises(ConnectFailed) as failed:
        await pool.connect(PEER, ways.options("127.0.0.2", "127.0.0.3"))
    assert failed.value.cause is Cause.CONNECT_REFUSED
    assert [ip for ip, _ in ways.told] == ["127.0.0.2", "127.0.0.3"]
    assert pool.open_connections == 0


async def test_a_caller_that_gives_up_leaves_nothing_open(ways: Ways) -> None:
    pool = Pool(asyncio.get_running_loop())
    async with ways.at("127.0.0.2", tls=False), ways.at("127.0.0.3", tls=False):
        connecting = asyncio.create_task(pool.connect(PEER, ways.options("127.0.0.2", "127.0.0.3")))
        await until(lambda: all(map(ways.got.get, ("127.0.0.2", "127.0.0.3"))))
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        assert pool.open_connections == 0
        await until(lambda: all(got[0].transport.is_closing() for got in ways.got.values()))
        assert ways.told == []


@pytest.mark.threat("T21")
async def test_a_lack_of_descriptors_is_no_fault_of_whom_it_kept_from_being_reached() -> None:
    class Full:
        """An event loop of a process that may open nothing more."""

        async def create_connection(self, *_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    pool = Pool(Full())  # type: ignore[arg-type]
    with pytest.raises(ConnectFailed) as failed:
        await pool.connect(
            Target("engine", "127.0.0.1", 9), Options(idle_ms=0, idle_most=0, most=1, off_host=False)
        )
    assert failed.value.cause in OWN
    assert pool.open_connections == 0
