"""Whole nodes in one process: the real machine, real TLS, real sockets on loopback."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from agent.mesh.addresses import PeerAddress
from agent.settings.values import PeerHint
from router_core.ids import mesh8_of
from router_core.record.envelope import read_header
from router_core.record.membership import Liveness
from router_core.record.state import LeaveReason
from tests.support.faultproxy import FaultProxy
from tests.support.meshnode import MESH, Person, person
from tests.support.meshpeer import Peer
from tests.support.until import until


@dataclass
class Town:
    """People who are members of one mesh, and where their nodes keep their state."""

    folder: Path
    people: list[Person]
    stack: AsyncExitStack

    async def start(
        self, number: int, *found: Peer | PeerHint, members: Sequence[int] | None = None, **more: Any
    ) -> Peer:
        """Node ``number``, which can dial ``found``."""
        who = self.people[number]
        roster = [self.people[n].member for n in (range(len(self.people)) if members is None else members)]
        hints = [peer.hint if isinstance(peer, Peer) else peer for peer in found]
        peer = Peer(who, number, self.folder / f"state-{number}", roster, hints, **more)
        await self.stack.enter_async_context(peer)
        peer.say()
        return peer


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    async with AsyncExitStack() as stack:
        yield Town(tmp_path, [person(tmp_path, number) for number in range(1, 4)], stack)


def through(proxy: FaultProxy, to: Peer) -> PeerHint:
    host, port = proxy.address
    return PeerHint(ref=to.who.member.node_id, named=False, ip=ip_address(host), port=port)


async def trio(town: Town) -> tuple[Peer, Peer, Peer]:
    """Three nodes in full mesh that see each other."""
    a = await town.start(0)
    b = await town.start(1, a)
    c = await town.start(2, a, b)
    everybody = (a, b, c)
    await until(
        lambda: all(peer.links_up == 2 for peer in everybody),
        15,
        picture=lambda: [p.driver.picture() for p in everybody],
    )
    for peer in everybody:
        others = [other.who for other in everybody if other is not peer]
        await until(
            partial(peer.sees, *others),
            15,
            picture=lambda: [p.driver.picture() for p in everybody],
        )
    return everybody


async def test_two_nodes_see_each_others_state(town: Town) -> None:
    a = await town.start(0)
    b = await town.start(1, a)
    await until(
        lambda: a.sees(b.who) and b.sees(a.who), 15, picture=lambda: (a.driver.picture(), b.driver.picture())
    )
    static = a.seen[b.who.id16].static
    assert static is not None
    assert static.models_total == b.number


def suspects(peer: Peer, other: Peer) -> bool:
    return peer.state_of(other.who) is Liveness.SUSPECT


async def test_three_nodes_form_a_full_mesh(town: Town) -> None:
    a, b, c = await trio(town)
    seen = [
        peer.seen[other.who.id16].static for peer in (a, b, c) for other in (a, b, c) if other is not peer
    ]
    totals = {None if static is None else static.models_total for static in seen}
    assert totals == {0, 1, 2}


async def test_a_killed_node_is_suspected_at_once_by_both_others(town: Town) -> None:
    a, b, c = await trio(town)
    await c.kill()
    for peer in (a, b):
        await until(partial(suspects, peer, c), 3, picture=peer.driver.picture)
    assert a.sees(b.who)
    assert b.sees(a.who)


async def test_a_node_that_leaves_is_known_to_have_left(town: Town) -> None:
    a, b, c = await trio(town)
    await c.driver.leave(LeaveReason.SHUTDOWN)
    for peer in (a, b):
        await until(lambda peer=peer: peer.state_of(c.who) is Liveness.LEFT, 2, picture=peer.driver.picture)  # type: ignore[misc]
    assert c.links_up == 0


async def test_a_node_restarted_with_its_state_has_a_higher_epoch_and_is_routed_again(town: Town) -> None:
    a, b, _ = await trio(town)
    before = a.seen[b.who.id16].epoch
    await b.kill()
    await until(lambda: a.state_of(b.who) is Liveness.SUSPECT, 3)
    again = await town.start(1, a)
    await until(lambda: a.sees(b.who) and a.seen[b.who.id16].epoch > before, 15, picture=a.driver.picture)
    assert again.driver.picture().epoch == before + 1


async def test_good_addresses_survive_a_restart_and_no_hint_is_needed(town: Town) -> None:
    a = await town.start(0)
    b = await town.start(1, a)
    await until(lambda: b.sees(a.who), 15)
    await b.driver.leave(LeaveReason.RESTART)
    await b.kill()
    again = await town.start(1)
    await until(lambda: again.sees(a.who), 15, picture=again.driver.picture)
    assert [link.dialled for link in again.driver.picture().links] == [True]


async def test_a_removed_member_loses_its_links_within_a_second(town: Town) -> None:
    a, b, c = await trio(town)
    await a.set_roster([a.who.member, b.who.member])
    await until(lambda: a.links_up == 1 and a.driver.open_links == 1, 1, picture=a.driver.picture)
    assert a.sees(b.who)
    await until(lambda: c.links_up == 1)


async def test_how_the_last_dial_of_a_member_ended_is_told_until_a_link_is_open(town: Town) -> None:
    a = await town.start(0)
    b = await town.start(1, a, members=[1])
    await b.set_roster([who.member for who in town.people[:2]])
    await a.set_roster([a.who.member])

    def at() -> str | None:
        return b.driver.dial_faults.get(a.who.id16)

    await until(lambda: at() == "lost", 15, picture=lambda: b.driver.dial_faults)
    await a.set_roster([who.member for who in town.people[:2]])
    await until(lambda: b.sees(a.who), 15, picture=b.driver.picture)
    assert at() is None
    await a.kill()
    await until(lambda: at() == "refused", 15, picture=lambda: b.driver.dial_faults)
    await b.set_roster([b.who.member])
    assert b.driver.dial_faults == {}


async def test_a_sighting_alone_is_enough_to_link(town: Town) -> None:
    """The smaller id dials at once; the larger would give it five seconds first."""
    a, b = await town.start(0), await town.start(1)
    near, far = sorted((a, b), key=lambda peer: peer.who.id16)
    await until(lambda: near.driver.picture().epoch)
    near.driver.sighted(far.who.member.node_id, [PeerAddress(ip_address(far.host), far.port)])
    await until(lambda: a.sees(b.who) and b.sees(a.who), 15, picture=a.driver.picture)


async def test_a_new_member_is_dialled_where_its_file_said(town: Town) -> None:
    near, far = sorted(town.people[:2], key=lambda who: who.id16)
    a = await town.start(town.people.index(near), members=[town.people.index(near)])
    b = await town.start(town.people.index(far))
    a.driver.sighted(far.member.node_id, [PeerAddress(ip_address(b.host), b.port)])
    await a.set_roster([near.member, far.member])
    await until(lambda: a.sees(far) and b.sees(near), 15, picture=a.driver.picture)


@pytest.mark.threat("T23")
async def test_a_half_open_link_is_noticed_within_six_seconds(town: Town) -> None:
    a = await town.start(0, members=(0, 1), allow=())
    async with FaultProxy((a.host, a.port)) as proxy:
        b = await town.start(1, through(proxy, a), members=(0, 1), allow=())
        await until(lambda: a.sees(b.who) and b.sees(a.who), 15)
        proxy.half_open()
        await until(lambda: b.state_of(a.who) is Liveness.SUSPECT, 6.5, picture=b.driver.picture)
        await until(lambda: a.state_of(b.who) is Liveness.SUSPECT, 2, picture=a.driver.picture)
        proxy.heal()
        proxy.reset()
        await until(lambda: a.sees(b.who) and b.sees(a.who), 15, picture=b.driver.picture)


async def test_a_trickling_peer_delays_nobody_else(town: Town) -> None:
    a = await town.start(0, allow=())
    async with FaultProxy((a.host, a.port)) as proxy:
        b = await town.start(1, a)
        await until(lambda: b.sees(a.who) and a.sees(b.who), 15)
        proxy.trickle(40, 100)
        c = await town.start(2, through(proxy, a), b, allow=())
        await until(lambda: c.sees(b.who) and b.sees(c.who), 15, picture=c.driver.picture)
        first = a.seen[b.who.id16].seq
        await until(lambda: a.seen[b.who.id16].seq >= first + 3, 15)
        assert a.sees(b.who)
        assert b.sees(a.who)


async def test_fresh_state_is_the_own_sealed_volatile_record(town: Town) -> None:
    a = await town.start(0)
    b = await town.start(1, a)
    await until(lambda: b.sees(a.who), 15)
    sealed = a.driver.fresh_state()
    assert sealed is not None
    header = read_header(sealed.signed, mesh8_of(MESH))
    assert header.id16 == a.who.id16
    b.driver.record_heard(sealed.signed, sealed.sig)
    await until(lambda: b.seen[a.who.id16].seq >= header.seq)
