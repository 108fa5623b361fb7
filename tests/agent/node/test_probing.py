"""When members' ingresses are tried before a request needs them, and what is made of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent.effects.tasks import Tasks
from agent.node.routing.probes import AGAIN_MS, Probing
from agent.relay.upstream.connection import Options, Target
from agent.relay.upstream.pool import ConnectFailed
from router_core.record.membership import Liveness
from router_core.record.state import Role
from router_core.router.failure import Cause
from tests.agent.node.rig import a_member, an_endpoint, id16
from tests.agent.node.test_targets import BETA, TWO, Hand


class FakePool:
    """Connections that come to what a test says: an exception, or something to keep. ``None``: never."""

    def __init__(self) -> None:
        self.outcome: ConnectFailed | str | None = "connection"
        self.asked: list[tuple[Target, Options]] = []
        self.kept: list[object] = []
        self.dropped: list[bool] = []

    async def connect(self, target: Target, options: Options) -> Any:
        self.asked.append((target, options))
        if self.outcome is None:
            await asyncio.Event().wait()
        if isinstance(self.outcome, ConnectFailed):
            raise self.outcome
        assert options.reached is not None
        options.reached(*options.addresses[0], None)
        return self.outcome

    def keep(self, connection: object, idle_ms: int) -> None:
        self.kept.append(connection)

    def open_to(self, owner: str) -> int:
        return len(self.kept)

    def drop(self, is_gone: Callable[[str], bool]) -> None:
        self.dropped.append(is_gone(BETA) and not is_gone("somebody else"))


class Rig:
    def __init__(self, hand: Hand, failures: list[BaseException]) -> None:
        self.hand, self.pool = hand, FakePool()
        self.is_linked = True
        self.tasks = Tasks(lambda _name, exc: failures.append(exc))
        self.probing = Probing(
            reach=hand.reach,
            targets=hand.targets,
            pool=self.pool,  # type: ignore[arg-type]
            members=lambda: hand.members,
            is_linked=lambda _: self.is_linked,
            connect_ms=20,
            clock=hand.clock,
            tasks=self.tasks,
        )

    async def look(self, after_ms: int = 0) -> int:
        """One look; how many connections were tried so far."""
        self.hand.clock.now += after_ms
        self.probing._look()
        while len(self.tasks):
            await asyncio.sleep(0)
        return len(self.pool.asked)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    failures: list[BaseException] = []
    hand = Hand(tmp_path)
    hand.admit(a_member("beta"))
    hand.world.peer("beta", an_endpoint(), addrs=TWO)
    made = Rig(hand, failures)
    yield made
    await made.tasks.aclose()
    assert failures == []


async def test_a_link_has_its_peer_tried_once_and_the_connection_kept(rig: Rig) -> None:
    assert await rig.look() == 1
    assert rig.pool.kept == ["connection"]
    assert rig.hand.reach.reached_ms(BETA) == rig.hand.clock.now
    assert await rig.look(AGAIN_MS) == 1
    rig.pool.kept.clear()
    assert await rig.look() == 2, "it was idle for too long, or died"


async def test_who_has_no_link_of_ours_is_left_to_requests(rig: Rig) -> None:
    rig.is_linked = False
    assert await rig.look() == 0


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (None, "timed_out"),
        (ConnectFailed(Cause.CONNECT_REFUSED), "refused"),
        (ConnectFailed(Cause.IDENTITY), "identity_mismatch"),
    ],
)
async def test_what_cannot_be_reached_is_tried_again_until_it_can(
    rig: Rig, outcome: ConnectFailed | None, why: str
) -> None:
    rig.pool.outcome = outcome
    await rig.look()
    found = rig.hand.reach.of(BETA)
    assert found is not None
    assert found.why == why
    rig.is_linked = False
    assert await rig.look(AGAIN_MS - 1) == 1
    assert await rig.look(1) == 2
    rig.pool.outcome = "connection"
    await rig.look(AGAIN_MS)
    assert rig.hand.reach.of(BETA) is None


@pytest.mark.parametrize("cause", [Cause.POOL_FULL, Cause.EOF])
async def test_a_full_pool_or_a_peer_that_hangs_up_is_no_closed_port(rig: Rig, cause: Cause) -> None:
    rig.pool.outcome = ConnectFailed(cause)
    await rig.look()
    assert rig.hand.reach.of(BETA) is None


async def test_who_is_gone_is_not_tried(rig: Rig) -> None:
    rig.pool.outcome = ConnectFailed(Cause.CONNECT_REFUSED)
    await rig.look()
    rig.hand.world.peer("beta", an_endpoint(), addrs=TWO, state=Liveness.GONE)
    assert await rig.look(AGAIN_MS) == 1


async def test_a_member_without_an_address_that_may_be_dialled_is_told(rig: Rig) -> None:
    rig.hand.world.peer("beta", an_endpoint(), addrs=())
    assert await rig.look() == 0
    found = rig.hand.reach.of(BETA)
    assert found is not None
    assert (found.why, found.at) == ("no_address", None)


async def test_of_a_member_that_said_nothing_yet_nothing_is_concluded(rig: Rig) -> None:
    rig.hand.world.hear("beta", None, None)
    assert await rig.look() == 0
    assert rig.hand.reach.of(BETA) is None
    rig.hand.world.peer("beta", an_endpoint(), addrs=TWO)
    assert await rig.look() == 1


async def test_who_serves_nobody_is_not_tried(rig: Rig) -> None:
    rig.hand.admit(a_member("beta", roles=int(Role.ROUTER)))
    assert await rig.look() == 0


async def test_a_new_link_starts_over_at_once(rig: Rig) -> None:
    rig.pool.outcome = ConnectFailed(Cause.CONNECT_REFUSED)
    await rig.look()
    rig.pool.outcome = "connection"
    rig.probing.linked(id16("beta"), True)
    assert rig.hand.reach.of(BETA) is None
    assert await rig.look() == 2
    assert rig.pool.dropped == []
    rig.probing.linked(id16("stranger"), True)


async def test_with_the_last_link_and_with_own_addresses_go_the_connections(rig: Rig) -> None:
    rig.probing.linked(id16("beta"), False)
    assert rig.pool.dropped == [], "another link is up"
    rig.is_linked = False
    rig.probing.linked(id16("beta"), False)
    assert rig.pool.dropped == [True]
    rig.is_linked = True
    rig.probing.moved()
    assert rig.pool.dropped == [True, True]
    assert await rig.look() == 1


async def test_who_left_the_roster_is_forgotten(rig: Rig) -> None:
    rig.pool.outcome = ConnectFailed(Cause.CONNECT_REFUSED)
    await rig.look()
    rig.hand.admit()
    await rig.look(AGAIN_MS)
    assert rig.hand.reach.unreachable == frozenset()
