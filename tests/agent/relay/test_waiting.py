"""How long an attempt is waited for, and when a second one is made beside it. Real sockets on both sides."""

import asyncio
from pathlib import Path

import pytest

from agent.relay.forwarding.context import sweep_lateness
from agent.relay.forwarding.signs_of_life import Vital, Watch
from router_core.policy.exchange import ExchangePolicy, Hedge
from router_core.record.membership import Liveness
from router_core.record.state import EngineFacts, EngineLoad, EngineState
from router_core.router.failure import Cause
from router_core.view.cluster import NodeView
from tests.agent.relay.client import ask, post
from tests.agent.relay.ingress_rig import pair
from tests.agent.relay.rig import at, running
from tests.support.cluster_views import a_change, a_member, a_static, a_view, a_volatile
from tests.support.recorder import Exchange, Recorder, say_ok
from tests.support.until import until

QUICK = ExchangePolicy(overdue_floor_ms=50, hung_ms=120, spare_retry_ms=40, overdue_kept_ms=60_000)


async def silent(exchange: Exchange) -> None:
    await exchange.gone()


def seen(state: EngineState, *, seq: int = 1, taken_ms: int = 0, ours: int = 1, age_ds: int = 0) -> NodeView:
    """A node whose one engine ``e0`` is in this state, as of its record ``seq``."""
    engine = EngineFacts(name="e0", kind="openai", dialects=1, slots=1, max_queue=1)
    load = EngineLoad(state=state, ours=ours, age_ds=age_ds)
    change = a_change(
        "beta",
        seq=seq,
        mono_ms=taken_ms,
        static=a_static(engines=(engine,)),
        volatile=a_volatile(engines=(load,)),
    )
    return a_view(change).nodes[a_member("beta").id16]


async def test_an_attempt_that_is_overdue_goes_on_and_its_endpoint_ranks_worse_until_its_first_byte() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await say_ok(exchange)

    async with Recorder(slow) as up, Recorder() as other, running(up.port, other.port, policy=QUICK) as relay:
        lateness = relay.wiring.router.lateness
        asked = [asyncio.create_task(ask(relay.port, post(relay.port))) for _ in range(2)]
        await until(lambda: lateness.suspects == {at("e0")})
        assert at("e0") in lateness.costs
        assert other.requests == []
        go.set()
        assert [(await each).headers["x-pairmesh-node"] for each in asked] == ["@here/e0"] * 2
        assert lateness.is_calm
        relay.assert_idle()


@pytest.mark.parametrize("hangs", ["e0", "both_first"])
async def test_a_hung_attempt_gets_a_second_one_and_the_client_sees_nothing_of_it(hangs: str) -> None:
    first_may_answer = asyncio.Event()

    async def hung(exchange: Exchange) -> None:
        if hangs == "e0":
            await exchange.gone()
            return
        await first_may_answer.wait()
        await say_ok(exchange)

    async def second(exchange: Exchange) -> None:
        if hangs == "both_first":
            first_may_answer.set()
            await exchange.gone()
            return
        await say_ok(exchange)

    async with (
        Recorder(hung) as one,
        Recorder(second) as two,
        running(one.port, two.port, policy=QUICK) as relay,
    ):
        relay.fleet.hedge = Hedge.HUNG
        heard = await ask(relay.port, post(relay.port))
        served, other = ("@here/e1", "e0") if hangs == "e0" else ("@here/e0", "e1")
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, served)
        assert heard.headers["x-pairmesh-attempts"] == "2"
        await until(lambda: len(relay.watch.attempts) == 2)
        results = {each.routed.choice.endpoint_name: each.outcome for each in relay.watch.attempts}
        assert (results[other].result.value, results[other].fault) == ("cancelled", False)
        await until(lambda: one.open_sockets + two.open_sockets <= 1)
        relay.assert_idle()


async def test_a_second_attempt_that_fails_leaves_the_first_one_alone() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await say_ok(exchange)

    async def refuse(exchange: Exchange) -> None:
        await exchange.answer(b'{"error":"context"}', status=400)
        go.set()

    async with (
        Recorder(slow) as one,
        Recorder(refuse) as two,
        running(one.port, two.port, policy=QUICK) as relay,
    ):
        relay.fleet.hedge = Hedge.HUNG
        heard = await ask(relay.port, post(relay.port))
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/e0")
        relay.assert_idle()


async def test_a_client_that_leaves_ends_both_attempts() -> None:
    async with (
        Recorder(silent) as one,
        Recorder(silent) as two,
        running(one.port, two.port, policy=QUICK) as relay,
    ):
        relay.fleet.hedge = Hedge.HUNG
        asking = asyncio.create_task(ask(relay.port, post(relay.port)))
        await two.arrived()
        asking.cancel()
        await until(lambda: not relay.wiring.in_hand)
        await until(lambda: one.open_sockets + two.open_sockets == 0)
        relay.assert_idle()


async def test_a_silent_engine_is_left_where_another_can_serve_and_else_waited_for() -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await say_ok(exchange)

    async with Recorder(slow) as one, Recorder() as two, running(one.port, two.port) as relay:
        relay.fleet.pictures[at("e0")] = seen(EngineState.FAILING, age_ds=60)
        for others, served in ((["e0"], "@here/e0"), (["e0", "e1"], "@here/e1")):
            relay.fleet.order = [("", name) for name in others]
            asking = asyncio.create_task(ask(relay.port, post(relay.port)))
            await one.arrived(2 if "e1" in others else 1)
            for request in tuple(relay.wiring.in_hand):
                request.review()
            if "e1" not in others:
                go.set()
            heard = await asking
            assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, served)
            go.clear()
        moved = relay.watch.attempts[-2].outcome
        assert (moved.cause, moved.fault) == (Cause.SILENT, True)
        relay.assert_idle()


async def test_an_engine_that_is_doubted_gets_a_second_attempt_at_once() -> None:
    async with Recorder(silent) as one, Recorder() as two, running(one.port, two.port) as relay:
        relay.fleet.hedge = Hedge.HUNG
        relay.fleet.pictures[at("e0")] = seen(EngineState.FAILING, age_ds=5)
        asking = asyncio.create_task(ask(relay.port, post(relay.port)))
        await one.arrived()
        for request in tuple(relay.wiring.in_hand):
            request.review()
        heard = await asking
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/e1")
        assert relay.watch.attempts[0].outcome.result.value == "cancelled"


def test_a_peer_that_knows_of_no_request_in_two_records_younger_than_it_has_none() -> None:
    watch = Watch()
    told = [
        watch.look(seen(EngineState.READY, seq=seq, taken_ms=taken_ms, ours=ours), "e0", 1_000.0)
        for seq, taken_ms, ours in ((1, 500, 0), (2, 900, 0), (3, 1_500, 0), (3, 1_500, 0), (4, 2_500, 0))
    ]
    assert told == [Vital.ALIVE] * 4 + [Vital.SILENT]
    counted = Watch()
    for seq, ours in ((1, 0), (2, 1), (3, 0)):
        assert (
            counted.look(seen(EngineState.READY, seq=seq, taken_ms=2_000 + seq, ours=ours), "e0", 1_000.0)
            is Vital.ALIVE
        )
    assert Watch().look(seen(EngineState.READY, taken_ms=9_000, ours=0), "e0", None) is Vital.ALIVE
    assert Watch().look(None, "e0", 0.0) is Vital.ALIVE


async def test_an_endpoint_that_says_it_is_full_ranks_worse_for_a_while() -> None:
    async def full(exchange: Exchange) -> None:
        await exchange.answer(b"{}", status=503, headers=b"retry-after: 20\r\n")

    async with Recorder(full) as one, Recorder() as two, running(one.port, two.port) as relay:
        assert (await ask(relay.port, post(relay.port))).status == 200
        lateness, now = relay.wiring.router.lateness, relay.clock.boot_ms()
        assert set(lateness.costs) == {at("e0")}
        sweep_lateness((), relay.wiring.router, now + 19_000)
        assert set(lateness.costs) == {at("e0")}
        sweep_lateness((), relay.wiring.router, now + 21_000)
        assert lateness.is_calm
        assert relay.wiring.router.breakers.last_fault_ms(at("e0")) is None


async def test_a_peer_that_asks_for_bodies_and_stalls_is_left_after_the_second(tmp_path: Path) -> None:
    async with (
        Recorder(silent) as stalls,
        Recorder() as good,
        pair(tmp_path, stalls.port, good.port) as (router, peer),
    ):
        there, lateness = at("e0", peer.id), router.wiring.router.lateness
        for number in range(2):
            assert lateness.suspects == set()
            asking = asyncio.create_task(ask(router.port, post(router.port)))
            await stalls.arrived(number + 1)
            for later in (1, 2):
                now = router.clock.boot_ms()
                router.fleet.pictures[there] = seen(
                    EngineState.READY, seq=10 * number + later, taken_ms=now + later, ours=0
                )
                for request in tuple(router.wiring.in_hand):
                    request.review()
            heard = await asking
            assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/local0")
        assert lateness.suspects == {there}
        assert router.watch.attempts[0].outcome.cause is Cause.SILENT
        router.assert_idle()


async def test_a_suspected_peer_is_left_where_another_can_serve_and_a_gone_one_in_any_case(
    tmp_path: Path,
) -> None:
    async with (
        Recorder(silent) as stalls,
        Recorder() as good,
        pair(tmp_path, stalls.port, good.port) as (router, peer),
    ):
        for liveness, others, status in (
            (Liveness.SUSPECT, True, 200),
            (Liveness.GONE, True, 200),
            (Liveness.GONE, False, 502),
        ):
            router.fleet.alive[peer.id] = Liveness.FRESH
            router.fleet.order = [(peer.id, "e0")] + ([("", "local0")] if others else [])
            arrived = len(stalls.requests)
            asking = asyncio.create_task(ask(router.port, post(router.port)))
            await stalls.arrived(arrived + 1)
            router.fleet.alive[peer.id] = liveness
            for request in tuple(router.wiring.in_hand):
                request.review()
            assert (await asking).status == status


async def test_a_suspected_peer_is_waited_for_where_nobody_else_can_serve(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await go.wait()
        await say_ok(exchange)

    async with Recorder(slow) as up, pair(tmp_path, up.port) as (router, peer):
        asking = asyncio.create_task(ask(router.port, post(router.port)))
        await up.arrived()
        router.fleet.alive[peer.id] = Liveness.SUSPECT
        for request in tuple(router.wiring.in_hand):
            request.review()
        go.set()
        assert (await asking).status == 200


async def test_the_owners_first_byte_limit_holds_for_a_peers_request_and_is_a_fault_of_its_engine(
    tmp_path: Path,
) -> None:
    async with (
        Recorder(silent) as hangs,
        Recorder() as good,
        pair(tmp_path, hangs.port, good.port) as (router, peer),
    ):
        peer.relay.fleet.locals["e0"].first_byte_ms = 150
        heard = await ask(router.port, post(router.port))
        assert (heard.status, heard.headers["x-pairmesh-node"]) == (200, "@here/local0")
        outcome = router.watch.attempts[0].outcome
        assert (outcome.cause, outcome.fault) == (Cause.FIRST_BYTE, True)
        router.fleet.order = [(peer.id, "e0")]
        assert (await ask(router.port, post(router.port))).status == 504
