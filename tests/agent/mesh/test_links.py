"""Links over real sockets and real TLS, driven by a machine that only remembers."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import cast

import pytest
from aiohttp.web import WebSocketResponse

from agent.identity.admittance import Refusal
from agent.identity.tls import context, server_name
from agent.mesh.link import LinkConnection
from agent.mesh.meter import EXCESS_MOST
from agent.mesh.traffic import Traffic
from agent.settings.values import PeerHint
from router_core.mesh.protocol.actions import CloseLink, Dial, PauseReading, ResumeReading, SendFrame
from router_core.mesh.protocol.events import (
    DialFailed,
    DialFailure,
    FrameReceived,
    LinkBusy,
    LinkClosed,
    LinkFlooded,
    LinkId,
    LinkOpened,
    LinkReady,
)
from router_core.record.state import Role
from tests.support.faultproxy import FaultProxy
from tests.support.meshnode import Node, Person, person
from tests.support.rawlink import RawLink, frame
from tests.support.scripted_machine import ScriptedMachine
from tests.support.until import until

TEXT, BINARY, PING = 1, 2, 9


@pytest.fixture
def people(tmp_path: Path) -> list[Person]:
    return [person(tmp_path, number) for number in range(1, 5)]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def start(stack: AsyncExitStack, who: Person, host: str, people: list[Person], **more: object) -> Node:
    roster = [somebody.member for somebody in people]
    return await stack.enter_async_context(Node(who, ScriptedMachine(), host=host, roster=roster, **more))  # type: ignore[arg-type]


async def pair(stack: AsyncExitStack, people: list[Person]) -> tuple[Node, Node]:
    """Two listening nodes that know each other; the first can dial the second."""
    b = await start(stack, people[1], "127.0.0.3", people[:2])
    return await start(stack, people[0], "127.0.0.2", people[:2], peers=[b.hint]), b


async def linked(stack: AsyncExitStack, people: list[Person]) -> tuple[Node, Node, LinkOpened, LinkOpened]:
    """A pair with one link, and what each end was told of it."""
    a, b = await pair(stack, people)
    a.act(Dial(people[1].id16, ()))
    there = (await until(lambda: a.told(LinkOpened)))[0]
    here = (await until(lambda: b.told(LinkOpened)))[0]
    return a, b, there, here


def raw(node: Node, who: Person) -> RawLink:
    tls = context(ssl.PROTOCOL_TLS_CLIENT, who.files, [node.who.member.der])
    return RawLink((node.host, node.port), tls, server_name(node.who.member.node_id))


def silent_server(stack: AsyncExitStack) -> socket.socket:
    """The kernel completes connections to it, and nobody ever says a word."""
    return stack.enter_context(socket.create_server(("127.0.0.1", 0)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_dialled_link_carries_messages_both_ways(stack: AsyncExitStack, people: list[Person]) -> None:
    a, b, there, here = await linked(stack, people)
    assert (there.peer, there.dialled) == (people[1].id16, True)
    assert (here.peer, here.dialled) == (people[0].id16, False)
    assert there.addr is not None
    assert there.addr.mesh_port == b.port
    a.act(SendFrame(there.link, b"\x01up"))
    assert (await until(lambda: b.told(FrameReceived)))[0].data == b"\x01up"
    b.act(SendFrame(here.link, b"\x01down"))
    assert (await until(lambda: a.told(FrameReceived)))[0].data == b"\x01down"
    counted = a.driver.counted()
    assert (counted.messages_in, counted.messages_out, counted.bytes_out) == (1, 1, 3)


async def test_what_was_sent_before_a_close_still_arrives(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    a, b, there, _ = await linked(stack, people)
    a.act(*[SendFrame(there.link, bytes([7]) * 16_000) for _ in range(8)], CloseLink(there.link, None))
    await until(lambda: b.told(LinkClosed) and a.told(LinkClosed))
    assert len(b.told(FrameReceived)) == 8


@pytest.mark.parametrize(
    ("bytes_sent", "code", "counted"),
    [
        (frame(TEXT, b"hello"), 1003, "not_binary"),
        (frame(PING, b""), 1003, "not_binary"),
        (frame(BINARY, b""), 1003, "not_binary"),
        (frame(BINARY, b"x", length=65_536), 1009, "too_big"),
        (frame(BINARY, b"x", length=2**40), 1009, "too_big"),
        (frame(BINARY, b"\xca\x00\x00", rsv=0x40), 1002, "bad_frame"),
    ],
    ids=["text", "ping", "empty", "one byte too many", "a lie about its length", "compressed"],
)
@pytest.mark.threat("T16")
async def test_a_frame_that_is_no_link_message_closes_the_link(
    stack: AsyncExitStack, people: list[Person], bytes_sent: bytes, code: int, counted: str
) -> None:
    node = await start(stack, people[0], "127.0.0.2", people[:2])
    async with raw(node, people[1]) as link:
        assert await link.ask() == 101
        assert b"Sec-WebSocket-Extensions" not in link.answer
        link.write(bytes_sent)
        assert await asyncio.wait_for(link.close_code(), 5) == code
    await until(lambda: node.told(LinkClosed))
    assert node.told(FrameReceived) == []
    assert node.driver.counted().refused[counted] == 1


async def test_the_largest_message_comes_through(stack: AsyncExitStack, people: list[Person]) -> None:
    node = await start(stack, people[0], "127.0.0.2", people[:2])
    async with raw(node, people[1]) as link:
        assert await link.ask() == 101
        link.write(frame(BINARY, b"m" * 65_535))
        assert len((await until(lambda: node.told(FrameReceived)))[0].data) == 65_535


@pytest.mark.threat("T29")
async def test_routes_are_denied_by_default_and_by_role(
    stack: AsyncExitStack, people: list[Person], tmp_path: Path
) -> None:
    watcher = person(tmp_path, 9, Role.OBSERVER)
    node = await start(stack, people[0], "127.0.0.2", [*people[:2], watcher])
    asked = [
        (people[1], "GET", "/mesh/v1/link", "other", 400),
        (people[1], "POST", "/mesh/v1/link", "pairmesh.v1", 404),
        (people[1], "GET", "/mesh/v1/link?x=1", "pairmesh.v1", 404),
        (people[1], "GET", "/", "pairmesh.v1", 404),
        (watcher, "GET", "/mesh/v1/link", "pairmesh.v1", 403),
    ]
    for who, method, path, protocol, status in asked:
        async with raw(node, who) as link:
            assert await link.ask(path, protocol, method) == status
    assert node.told(LinkOpened) == []


async def test_a_stranger_never_gets_a_link(stack: AsyncExitStack, people: list[Person]) -> None:
    node = await start(stack, people[0], "127.0.0.2", people[:2])
    with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
        async with raw(node, people[2]) as link:
            await link.ask()
    await until(lambda: node.refused == [Refusal.HANDSHAKE])
    assert node.told(LinkOpened) == []


async def test_a_member_removed_while_connected_gets_no_link(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    node = await start(stack, people[0], "127.0.0.2", people[:2])
    async with raw(node, people[1]) as link:
        await node.set_roster([people[0].member])
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await link.ask()
    assert node.told(LinkOpened) == []


@pytest.mark.threat("T1")
async def test_another_member_at_the_dialled_address_is_not_linked(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:3])
    wrong = PeerHint(ref=people[2].member.node_id, named=False, ip=ip_address(b.host), port=b.port)
    a = await start(stack, people[0], "127.0.0.2", people[:3], peers=[wrong])
    a.act(Dial(people[2].id16, ()))
    assert (await until(lambda: a.told(DialFailed)))[0].why is DialFailure.UNTRUSTED
    assert [code for code, _ in a.alarms] == ["dial_identity_mismatch"]
    assert a.told(LinkOpened) == []
    assert b.told(LinkOpened) == []


async def test_a_refused_dial_says_so_and_a_member_without_address_too(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    a, b = await pair(stack, people)
    await b.listener.aclose()
    a.act(Dial(people[1].id16, ()), Dial(people[2].id16, ()))
    await until(lambda: len(a.told(DialFailed)) == 2)
    assert {(event.peer, event.why) for event in a.told(DialFailed)} == {
        (people[1].id16, DialFailure.REFUSED),
        (people[2].id16, DialFailure.NO_ADDRESS),
    }


async def test_a_server_that_does_not_know_us_reads_as_unreachable_not_refused(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[1:2])
    a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[b.hint])
    a.act(Dial(people[1].id16, ()))
    assert (await until(lambda: a.told(DialFailed)))[0].why is DialFailure.UNREACHABLE


async def test_a_silent_address_costs_only_its_own_dial(stack: AsyncExitStack, people: list[Person]) -> None:
    port = silent_server(stack).getsockname()[1]
    b = await start(stack, people[1], "127.0.0.3", people[:3])
    hole = PeerHint(ref=people[2].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=port)
    a = await start(stack, people[0], "127.0.0.2", people[:3], peers=[hole, b.hint], dial_s=1.0)
    a.act(Dial(people[2].id16, ()), Dial(people[1].id16, ()))
    await until(lambda: a.told(LinkOpened))
    assert a.told(DialFailed) == []
    assert (await until(lambda: a.told(DialFailed)))[0].why is DialFailure.TIMEOUT


async def test_the_second_address_is_tried_when_the_first_fails(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:2])
    async with FaultProxy((b.host, b.port)) as dead:
        dead.refuse()
        first = PeerHint(ref=b.who.member.name, named=True, ip=ip_address("127.0.0.1"), port=dead.address[1])
        a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[first, b.hint])
        a.act(Dial(people[1].id16, ()))
        opened = (await until(lambda: a.told(LinkOpened)))[0]
        assert opened.addr is not None
        assert opened.addr.mesh_port == b.port
        a.act(CloseLink(opened.link, None))
        await until(lambda: a.told(LinkClosed))
        knocked = dead.accepted
        a.act(Dial(people[1].id16, ()))
        await until(lambda: len(a.told(LinkOpened)) == 2)
        assert dead.accepted == knocked


async def test_a_redirect_is_not_followed(stack: AsyncExitStack, people: list[Person]) -> None:
    asked: list[bytes] = []

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 307 Away\r\nLocation: /mesh/v1/other\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    tls = context(ssl.PROTOCOL_TLS_SERVER, people[1].files, [people[0].member.der])
    server = await asyncio.start_server(redirect, "127.0.0.1", 0, ssl=tls)
    stack.push_async_callback(server.wait_closed)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    hint = PeerHint(ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=port)
    a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[hint])
    a.act(Dial(people[1].id16, ()))
    assert (await until(lambda: a.told(DialFailed)))[0].why is DialFailure.UNTRUSTED
    assert len(asked) == 1


async def test_dials_come_from_the_literal_listening_address(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    silent = silent_server(stack)
    port = silent.getsockname()[1]
    hint = PeerHint(ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=port)
    a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[hint], dial_s=0.3)
    a.act(Dial(people[1].id16, ()))
    await until(lambda: a.told(DialFailed))
    sock, (ip, _) = silent.accept()
    sock.close()
    assert ip == "127.0.0.2"


async def test_a_paused_link_is_read_again_only_after_resume(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    a, b, there, here = await linked(stack, people)
    b.script.reply = lambda event: (
        [PauseReading(here.link)] if isinstance(event, FrameReceived) and event.data == b"\x01" else []
    )
    a.act(*[SendFrame(there.link, bytes([n])) for n in (1, 2, 3)])
    await until(lambda: b.told(FrameReceived))
    b.act()
    await until(lambda: b.steps_done)
    assert [event.data for event in b.told(FrameReceived)] == [b"\x01"]
    b.act(ResumeReading(here.link))
    await until(lambda: [event.data for event in b.told(FrameReceived)] == [b"\x01", b"\x02", b"\x03"])


async def test_a_peer_that_does_not_read_fills_its_own_link_only(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:3])
    c = await start(stack, people[2], "127.0.0.4", people[:3])
    async with FaultProxy((b.host, b.port)) as proxy:
        slow = PeerHint(
            ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=proxy.address[1]
        )
        a = await start(stack, people[0], "127.0.0.2", people[:3], peers=[slow, c.hint])
        a.act(Dial(people[1].id16, ()), Dial(people[2].id16, ()))
        await until(lambda: len(a.told(LinkOpened)) == 2)
        links = {event.peer: event.link for event in a.told(LinkOpened)}
        proxy.trickle(1, 200, "up")
        sent = 0
        while not a.told(LinkBusy):
            a.act(SendFrame(links[people[1].id16], b"r" * 16_384))
            sent += 1
            assert sent < 2_000
            await until(lambda: a.steps_done)
        assert a.told(LinkBusy)[0].link == links[people[1].id16]
        a.act(SendFrame(links[people[2].id16], b"\x05still fine"))
        await until(lambda: c.told(FrameReceived))
        assert a.told(LinkReady) == []
        proxy.heal()
        await until(lambda: a.told(LinkReady), 20)
        assert a.told(LinkReady)[0].link == links[people[1].id16]


async def test_closing_towards_a_peer_that_vanished_ends_within_a_second(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:2])
    async with FaultProxy((b.host, b.port)) as proxy:
        hint = PeerHint(
            ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=proxy.address[1]
        )
        a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[hint])
        a.act(Dial(people[1].id16, ()))
        opened = (await until(lambda: a.told(LinkOpened)))[0]
        proxy.half_open()
        a.act(SendFrame(opened.link, b"\x07"), CloseLink(opened.link, None))
        await until(lambda: a.told(LinkClosed), 1.5)


async def test_a_reset_ends_the_link_at_both_ends(stack: AsyncExitStack, people: list[Person]) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:2])
    async with FaultProxy((b.host, b.port)) as proxy:
        hint = PeerHint(
            ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=proxy.address[1]
        )
        a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[hint])
        a.act(Dial(people[1].id16, ()))
        await until(lambda: a.told(LinkOpened) and b.told(LinkOpened))
        proxy.reset()
        await until(lambda: a.told(LinkClosed) and b.told(LinkClosed))


async def test_a_flipped_bit_on_the_wire_ends_the_link(stack: AsyncExitStack, people: list[Person]) -> None:
    b = await start(stack, people[1], "127.0.0.3", people[:2])
    async with FaultProxy((b.host, b.port)) as proxy:
        hint = PeerHint(
            ref=people[1].member.node_id, named=False, ip=ip_address("127.0.0.1"), port=proxy.address[1]
        )
        a = await start(stack, people[0], "127.0.0.2", people[:2], peers=[hint])
        a.act(Dial(people[1].id16, ()))
        opened = (await until(lambda: a.told(LinkOpened)))[0]
        await until(lambda: b.told(LinkOpened))
        proxy.corrupt(proxy.passed["up"] + 20, "up")
        a.act(SendFrame(opened.link, b"\x03" * 100))
        await until(lambda: a.told(LinkClosed) and b.told(LinkClosed))
        assert b.told(FrameReceived) == []


async def test_sending_on_a_transport_that_is_gone_harms_nobody(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    """asyncio's TLS transports forget their buffers once closed twice; the machine may still be sending then."""
    node = await start(stack, people[0], "127.0.0.2", people[:2])
    async with raw(node, people[1]) as client:
        assert await client.ask() == 101
        transport = cast(asyncio.Transport, client.writer.transport)
        link = LinkConnection(
            LinkId(1), people[0].id16, WebSocketResponse(), transport, dialled=None, traffic=Traffic()
        )
        transport.close()
        transport.close()
        assert link.send(b"too late")
        assert link.waiting_bytes == len(b"too late")


async def test_a_hundred_links_and_refusals_leave_no_descriptor_behind(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    a, b, opened, _ = await linked(stack, people)
    a.act(CloseLink(opened.link, None))
    await until(lambda: a.told(LinkClosed) and b.told(LinkClosed))
    before = descriptors()
    for turn in range(50):
        a.script.told.clear()
        a.act(Dial(people[1].id16, ()))
        opened = (await until(lambda: a.told(LinkOpened)))[0]
        a.act(CloseLink(opened.link, None))
        await until(lambda: a.told(LinkClosed), picture=lambda turn=turn: turn)  # type: ignore[misc]
    await b.set_roster([people[1].member])
    for _ in range(50):
        a.script.told.clear()
        a.act(Dial(people[1].id16, ()))
        await until(lambda: a.told(DialFailed))
    await until(lambda: descriptors() <= before, picture=descriptors)
    assert len(a.tasks) == 1


@pytest.mark.threat("T16")
async def test_a_member_that_sends_empty_fragments_without_end_is_cut(
    stack: AsyncExitStack, people: list[Person]
) -> None:
    """Bytes that never become a message count, too."""
    a, b = people[0], await start(stack, people[1], "127.0.0.3", people[:2])
    empty = bytes([0, 0x80]) + bytes(4)
    async with raw(b, a) as link:
        assert await link.ask() == 101
        link.write(frame(BINARY, b"\x01whole"))
        await until(lambda: b.told(FrameReceived))
        link.write(bytes([BINARY, 0x80]) + bytes(4))
        sent = 0
        while not b.told(LinkFlooded) and sent < 4_000_000:
            link.write(empty * 10_000)
            sent += len(empty) * 10_000
            with contextlib.suppress(ConnectionError, AttributeError):
                await link.writer.drain()
            await asyncio.sleep(0)
        await until(lambda: bool(b.told(LinkFlooded)) and bool(b.told(LinkClosed)))
        assert sent <= EXCESS_MOST + 1_000_000
    assert b.driver.counted().refused == {"flood": 1}
    assert [event.data for event in b.told(FrameReceived)] == [b"\x01whole"]
