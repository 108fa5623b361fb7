"""Own work is counted until the target's record shows it, and never after it ended."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.ids import Id8, NodeName
from router_core.placement.ledger import Ledger
from router_core.placement.local import LocalWork
from router_core.record.membership import Liveness, ViewChange
from router_core.record.state import (
    EngineFacts,
    EngineLoad,
    ModelFacts,
    ModelState,
    ResidentModel,
    SeenRouter,
    Static,
    Volatile,
)
from router_core.view.cluster import ClusterView
from router_core.view.fold import empty, fold
from tests.support.cluster_views import a_member
from tests.support.fleets import ME, NOW, a_choice, a_ledger, a_row

ROW = a_row("a")
MY_ID8 = Id8(ME[:8])


def view_with(*, taken_ms: int, seen: tuple[SeenRouter, ...] = (), resident: bool = True) -> ClusterView:
    """A view in which node ``a`` says this of itself."""
    member = a_member("a")
    volatile = Volatile(
        engines=(EngineLoad(),),
        seen=seen,
        residents=(ResidentModel(model=0, engine=0, state=ModelState.LOADING),) if resident else (),
    )
    static = Static(
        engines=(EngineFacts(name="llamacpp", kind="llamacpp"),), models=(ModelFacts(name="tiny", engine=0),)
    )
    change = ViewChange(
        origin=member.id16,
        state=Liveness.FRESH,
        confirmed=True,
        epoch=1,
        inst=1,
        seq=1,
        mono_ms=taken_ms,
        base_ms=0,
        due_ms=2000,
        volatile=volatile,
        static=static,
    )
    return fold(empty(ME, NodeName("me")), [change], {member.id16: member}, NOW)


def work(ledger: Ledger) -> float:
    owed = ledger.owed.get(ROW.key)
    return 0.0 if owed is None else owed.work_s


def test_prefill_ends_with_the_first_token_and_decode_with_the_request() -> None:
    ledger = a_ledger()
    seq = ledger.reserve(a_choice(ROW, prefill_s=2.0, decode_s=3.0), NOW).seq
    assert work(ledger) == 5.0
    ledger.first_token(seq)
    ledger.first_token(seq)
    assert work(ledger) == 3.0
    ledger.end(seq)
    ledger.end(seq)
    assert work(ledger) == 0.0
    assert not ledger.owed


def test_a_seen_row_of_this_process_life_covers_by_number() -> None:
    ledger = a_ledger()
    first = ledger.reserve(a_choice(ROW), NOW)
    second = ledger.reserve(a_choice(ROW), NOW)
    assert (first.route_seq, second.route_seq) == (1, 2)
    seen = SeenRouter(router=MY_ID8, inst=ledger.inst, seq=1, accepted=1)
    ledger.cover(view_with(taken_ms=NOW + 10_000, seen=(seen,)))
    assert ledger.owed[ROW.key].requests == 1
    ledger.end(first.seq)
    assert ledger.owed[ROW.key].requests == 1
    ledger.end(second.seq)
    assert not ledger.owed


def test_a_seen_row_of_another_life_or_router_says_nothing_of_ours() -> None:
    ledger = a_ledger()
    ledger.reserve(a_choice(ROW), NOW)
    for other in (
        SeenRouter(router=MY_ID8, inst=ledger.inst + 1, seq=99, accepted=99),
        SeenRouter(router=Id8(b"\x09" * 8), inst=ledger.inst, seq=99, accepted=99),
    ):
        ledger.cover(view_with(taken_ms=NOW, seen=(other,)))
        assert ledger.owed[ROW.key].requests == 1


def test_without_a_seen_row_a_picture_taken_after_arrival_covers() -> None:
    ledger = a_ledger()
    ledger.reserve(a_choice(ROW), NOW, rtt_ms=20)
    ledger.cover(view_with(taken_ms=NOW + 19))
    assert ledger.owed
    ledger.cover(view_with(taken_ms=NOW + 20))
    assert not ledger.owed


def test_a_reserved_load_counts_until_it_is_seen_loading() -> None:
    ledger = a_ledger()
    seq = ledger.reserve(a_choice(ROW, need_bytes=1000), NOW).seq
    ledger.cover(view_with(taken_ms=NOW + 5000, resident=False))
    assert ledger.loading == {ROW.node: 1000}
    ledger.cover(view_with(taken_ms=NOW + 5000))
    assert ledger.loading == {}
    ledger.end(seq)


def test_work_on_the_own_host_goes_to_the_live_count() -> None:
    local = LocalWork()
    ledger = Ledger(MY_ID8, 7, local)
    seq = ledger.reserve(replace(a_choice(ROW), is_self=True), NOW).seq
    assert local.in_flight("llamacpp") == 1
    assert not ledger.owed
    ledger.end(seq)
    assert local.in_flight("llamacpp") == 0


def test_numbers_are_counted_per_target_node() -> None:
    ledger = a_ledger()
    other = a_row("b")
    numbers = [ledger.reserve(a_choice(row), NOW).route_seq for row in (ROW, other, ROW)]
    assert numbers == [1, 1, 2]


_steps = st.lists(st.sampled_from(["reserve", "own", "token", "end", "cover", "seen"]), max_size=60)


@pytest.mark.promise("the ledger returns to zero")
@settings(max_examples=80, deadline=None)
@given(_steps, st.integers(0, 2**32))
def test_the_ledger_is_empty_after_any_interleaving(steps: list[str], seed: int) -> None:
    ledger, rng = a_ledger(), Random(seed)
    choice = a_choice(ROW, need_bytes=10)
    own = replace(choice, is_self=True, endpoint="me/llamacpp")
    open_seqs: list[int] = []
    now = NOW
    for step in steps:
        now += rng.randrange(50)
        if step in ("reserve", "own"):
            open_seqs.append(ledger.reserve(choice if step == "reserve" else own, now).seq)
        elif step == "cover":
            ledger.cover(view_with(taken_ms=now))
        elif step == "seen":
            row = SeenRouter(router=MY_ID8, inst=ledger.inst, seq=rng.randrange(20), accepted=1)
            ledger.cover(view_with(taken_ms=now, seen=(row,), resident=False))
        elif open_seqs:
            seq = rng.choice(open_seqs)
            {"token": ledger.first_token, "end": ledger.end}[step](seq)
            if step != "token" and rng.random() < 0.7:
                open_seqs.remove(seq)
        assert all(owed.requests > 0 and owed.work_s >= -1e-9 for owed in ledger.owed.values())
    for seq in open_seqs:
        ledger.end(seq)
    assert len(ledger) == 0
    assert not ledger.owed
    assert not ledger.loading
    assert ledger.local.in_flight("llamacpp") == 0


def test_local_work_counts_what_is_left_and_what_waits() -> None:
    local = LocalWork()
    first = local.start("e", 10.0, NOW)
    local.start("e", 10.0, NOW)
    local.start("e", 4.0, NOW)
    assert local.work_s("e", 2, NOW + 3000) == 7.0 + 7.0 + 4.0
    assert local.work_s("e", 2, NOW + 60_000) == 1.0 + 1.0 + 4.0
    local.finish(first)
    local.finish(first)
    assert local.in_flight("e") == 2
    assert local.work_s("e", 2, NOW) == 14.0


def test_foreign_requests_count_at_the_mean_of_ours() -> None:
    local = LocalWork()
    local.start("e", 6.0, NOW)
    assert local.work_s("e", 1, NOW, foreign=2) == 18.0
    assert LocalWork().work_s("e", 1, NOW, foreign=2) == 0.0


def test_seen_lists_the_newest_routers_first_and_forgets_idle_ones() -> None:
    local = LocalWork()
    for number in range(20):
        local.accepted(Id8(bytes([number]) * 8), 1, 5, NOW + number)
    local.accepted(Id8(bytes(8)), 1, 3, NOW + 50)
    rows = local.seen(NOW + 60)
    assert len(rows) == 16
    assert (rows[0].router, rows[0].seq, rows[0].accepted) == (bytes(8), 5, 2)
    assert local.seen(NOW + 31_000) == ()


def test_a_router_that_restarted_starts_a_new_count() -> None:
    local = LocalWork()
    local.accepted(MY_ID8, 1, 900, NOW)
    local.accepted(MY_ID8, 2, 1, NOW)
    (row,) = local.seen(NOW)
    assert (row.inst, row.seq, row.accepted) == (2, 1, 1)
