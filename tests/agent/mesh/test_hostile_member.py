"""A member that replays, holds back and forges: real TLS, real sockets, and a link that says what the test wants."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from agent.identity.tls import context, server_name
from router_core.ids import mesh8_of
from router_core.mesh.machine import Mesh
from router_core.mesh.protocol import messages as msg
from router_core.record.envelope import Header, Sealed, read_header, seal
from router_core.record.membership import Liveness
from router_core.record.state import Kind, LeaveReason
from tests.support.meshnode import MESH, Person, person
from tests.support.meshpeer import ALIVE, Peer
from tests.support.until import until

OUT_MS = 6_000
"""A node that says nothing new any more is out of the candidates after this."""


class Liar:
    """A member's own link to a node. It answers pings and says nothing by itself."""

    def __init__(self, who: Person, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.who = who
        self._socket = socket
        self.byes: list[int] = []

    async def say(self, *messages: msg.Message) -> None:
        for message in messages:
            await self._socket.send_bytes(msg.encode(message))

    async def replay(self, *records: Sealed) -> None:
        await self.say(msg.Recs(tuple(msg.Heard(0, each.signed, each.sig) for each in records)))

    async def listen(self) -> None:
        async for frame in self._socket:
            message = msg.decode(frame.data) if frame.type is aiohttp.WSMsgType.BINARY else None
            if isinstance(message, msg.Ping):
                await self.say(msg.Pong(nonce=message.nonce, boot_ms=1, degree=1, degree_cap=40))
            elif isinstance(message, msg.Bye):
                self.byes.append(message.code)


@contextlib.asynccontextmanager
async def lying(who: Person, to: Peer) -> AsyncIterator[Liar]:
    """``who`` links to ``to`` as any member may."""
    tls = context(ssl.PROTOCOL_TLS_CLIENT, who.files, [to.who.member.der])
    url = f"https://{to.host}:{to.port}/mesh/v1/link"
    name = server_name(to.who.member.node_id)
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(
            url, ssl=tls, server_hostname=name, protocols=("pairmesh.v1",), compress=0
        ) as socket,
    ):
        liar = Liar(who, socket)
        hello = msg.Hello(mesh8=mesh8_of(MESH), id16=who.id16, epoch=1, inst=1, boot_ms=1)
        await liar.say(hello, msg.Have(chunk=0, chunks=1))
        listening = asyncio.create_task(liar.listen())
        try:
            yield liar
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


@pytest.fixture
def people(tmp_path: Path) -> tuple[Person, ...]:
    """The honest one that is spoken of, the one that hears it, and two liars."""
    return tuple(person(tmp_path, number) for number in range(1, 5))


@pytest.fixture
def node(tmp_path: Path, people: tuple[Person, ...]) -> Callable[..., Peer]:
    """Node ``number`` with its state of before; it dials nobody but those it is given."""
    roster = [who.member for who in people]

    def make(number: int, *found: Peer) -> Peer:
        hints = [peer.hint for peer in found]
        return Peer(people[number], number, tmp_path / f"state-{number}", roster, hints, allow=())

    return make


def newest(of: Peer, kind: Kind) -> Sealed:
    """What ``of`` says of itself now."""
    assert isinstance(of.machine, Mesh)
    held = of.machine.parts.publisher.held(kind)
    assert held is not None
    return held.sealed


def speaks(peer: Peer) -> bool:
    assert isinstance(peer.machine, Mesh)
    return peer.machine.parts.publisher.held(Kind.V) is not None


def count(of: Peer, reason: str) -> int:
    """How many records ``of`` gave this verdict."""
    counts = of.driver.picture().counts
    return sum(number for _, why, number in counts if why == reason)


def seq_of(sealed: Sealed) -> int:
    return read_header(sealed.signed, mesh8_of(MESH)).seq


@pytest.mark.threat("T9")
async def test_old_state_that_is_said_again_changes_nothing_also_after_a_restart(
    node: Callable[..., Peer], people: tuple[Person, ...]
) -> None:
    honest, _, liar, _ = people
    async with node(0) as a:
        a.say()
        await until(lambda: speaks(a))
        old = newest(a, Kind.S), newest(a, Kind.V)
        async with node(1, a) as b:
            b.say()
            await until(lambda: b.sees(honest) and b.seen[honest.id16].seq > seq_of(old[1]), 15)
            async with lying(liar, b) as link:
                before = count(b, "older") + count(b, "duplicate")
                held = b.seen[honest.id16].seq
                for _ in range(5):
                    await link.replay(*old)
                await until(lambda: count(b, "older") + count(b, "duplicate") >= before + 10)
                assert link.byes == []
            assert b.seen[honest.id16].seq >= held
            await a.driver.leave(LeaveReason.SHUTDOWN)
            await until(lambda: b.state_of(honest) is Liveness.LEFT)
            await b.driver.leave(LeaveReason.RESTART)
    async with node(1) as b:
        b.say()
        await until(lambda: speaks(b), 15)
        async with lying(liar, b) as link:
            await link.replay(*old)
            await until(lambda: count(b, "below_floor") == 2, 10, picture=b.driver.picture)
            assert b.state_of(honest) not in ALIVE


@pytest.mark.threat("T14")
async def test_a_dead_node_is_not_kept_alive_by_whoever_repeats_its_last_word(
    node: Callable[..., Peer], people: tuple[Person, ...]
) -> None:
    """Nobody but the liar tells ``b`` of ``a``, so that nothing else shows its death."""
    honest, _, liar, _ = people
    async with node(0) as a, node(1) as b:
        a.say()
        b.say()
        await until(lambda: speaks(a), 15)
        async with lying(liar, b) as link:

            async def relay() -> None:
                said = 0
                while True:
                    v = newest(a, Kind.V)
                    if seq_of(v) != said:
                        said = seq_of(v)
                        await link.replay(newest(a, Kind.S), v)
                    await asyncio.sleep(0.05)

            async def repeat(*last: Sealed) -> None:
                while True:
                    await link.replay(*last)
                    await asyncio.sleep(0.1)

            relaying = asyncio.create_task(relay())
            await until(lambda: b.state_of(honest) is Liveness.FRESH, 15, picture=b.driver.picture)
            relaying.cancel()
            last = newest(a, Kind.S), newest(a, Kind.V)
            repeating = asyncio.create_task(repeat(*last))
            await a.kill()
            await until(
                lambda: b.state_of(honest) is Liveness.SUSPECT, OUT_MS / 1_000, picture=b.driver.picture
            )
            before = count(b, "duplicate")
            await until(lambda: count(b, "duplicate") >= before + 10)
            repeating.cancel()
            await asyncio.gather(relaying, repeating, return_exceptions=True)
            assert b.state_of(honest) is Liveness.SUSPECT, "it goes on, and helps nothing"


@pytest.mark.threat("T11")
async def test_a_counter_is_moved_by_its_owners_signature_alone(
    node: Callable[..., Peer], people: tuple[Person, ...]
) -> None:
    honest, *_ = people

    def exhausted(sealed: Sealed, liar: Person) -> Sealed:
        """The record at the end of all numbers, as whoever holds another key would sign it."""
        header: Header = read_header(sealed.signed, mesh8_of(MESH))
        forged = replace(header, epoch=2**62 - 1, seq=2**62 - 1)
        return seal(forged, liar.key)

    async with node(0) as a, node(1, a) as b:
        a.say()
        b.say()
        await until(lambda: b.sees(honest), 15)
        epoch, own_epoch = b.seen[honest.id16].epoch, b.driver.picture().epoch
        for about, liar in zip((a, b), people[2:], strict=True):
            refused = count(b, "bad_signature")
            async with lying(liar, b) as link:
                await link.replay(exhausted(newest(about, Kind.V), liar))
                await until(lambda refused=refused: count(b, "bad_signature") == refused + 1)  # type: ignore[misc]
                await until(lambda link=link: link.byes == [msg.ByeCode.BAD_SIGNATURE])  # type: ignore[misc]
        assert b.driver.picture().epoch == own_epoch
        held = b.seen[honest.id16].seq
        await until(lambda: b.seen[honest.id16].seq > held, 15)
        assert b.seen[honest.id16].epoch == epoch
        told = [fields["peer"] for code, fields in b.alarms if code == "bad_signature"]
        assert told == [liar.id16.hex() for liar in people[2:]]
