"""Changes in, next snapshot out; the old snapshot stays as it was."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.ids import NodeName, id16_of
from router_core.record.membership import Liveness, ViewChange
from router_core.record.state import Flag, Role
from router_core.view.fold import empty, fold
from router_core.view.freshness import is_stale
from tests.support.cluster_views import a_change, a_member, a_static, a_view, a_volatile
from tests.support.fleets import ME, NOW

A, B = a_member("a"), a_member("b")
MEMBERS = {A.id16: A, B.id16: B}


def test_a_change_replaces_the_whole_picture_of_its_origin() -> None:
    view = a_view(a_change("a", rtt_ms=30))
    assert view.nodes[A.id16].rtt_ms == 30
    later = fold(view, [a_change("a", seq=2, mono_ms=NOW)], MEMBERS, NOW)
    assert later.nodes[A.id16].rtt_ms is None
    assert (later.gen, later.nodes[A.id16].seq) == (view.gen + 1, 2)
    assert view.nodes[A.id16].seq == 1
    assert later.nodes[A.id16].age_ms(NOW + 700) == 700


@pytest.mark.parametrize("state", [Liveness.GONE, Liveness.LEFT, Liveness.REMOVED])
def test_a_node_that_went_leaves_the_snapshot(state: Liveness) -> None:
    view = a_view(a_change("a"), a_change("b"))
    later = fold(view, [a_change("a", state=state)], MEMBERS, NOW)
    assert set(later.nodes) == {B.id16}


def test_a_removed_member_leaves_without_a_change_of_its_own() -> None:
    view = a_view(a_change("a"), a_change("b"))
    assert set(fold(view, [], {B.id16: B}, NOW).nodes) == {B.id16}


def test_a_stranger_never_enters() -> None:
    assert fold(empty(ME, NodeName("me")), [a_change("a")], {}, NOW).nodes == {}


def test_the_own_node_stays_whatever_roster_and_links_say() -> None:
    me = id16_of(ME)
    lonely = a_volatile(flags=int(Flag.LONELY | Flag.CONFLICT))
    view = fold(empty(ME, NodeName("me")), [a_change("a", origin=me, volatile=lonely)], {}, NOW)
    assert view.own is not None
    assert (view.own.name, view.own.is_self, view.own.routable, view.own.lonely) == ("me", True, True, True)
    gone = fold(view, [a_change("a", origin=me, state=Liveness.REMOVED)], {}, NOW)
    assert gone.own is not None


def test_a_new_role_is_judged_at_once() -> None:
    view = a_view(a_change("a"))
    assert view.nodes[A.id16].routable
    watcher = replace(A, roles=int(Role.OBSERVER))
    assert not fold(view, [], {A.id16: watcher}, NOW).nodes[A.id16].routable


@pytest.mark.parametrize(
    ("over", "routable"),
    [
        ({}, True),
        ({"state": Liveness.LATE}, True),
        ({"state": Liveness.SUSPECT}, False),
        ({"state": Liveness.UNCONFIRMED}, False),
        ({"static": None}, False),
        ({"volatile": None}, False),
        ({"quarantined": True}, False),
        ({"volatile": a_volatile(flags=int(Flag.DRAINING))}, False),
        ({"volatile": a_volatile(flags=int(Flag.LONELY))}, False),
        ({"volatile": a_volatile(flags=int(Flag.CONFLICT))}, False),
        ({"volatile": a_volatile(flags=int(Flag.NO_LOAD | Flag.DEGRADED))}, True),
    ],
)
def test_routable_needs_freshness_records_and_no_flag_against_it(
    over: dict[str, Any], routable: bool
) -> None:
    assert a_view(a_change("a", **over)).nodes[A.id16].routable is routable


def test_who_takes_no_requests_is_not_routable_until_it_does_again() -> None:
    view = a_view(a_change("a"), a_change("b"))
    cut = fold(view, [], MEMBERS, NOW, {A.id16})
    assert (cut.nodes[A.id16].unreachable, cut.nodes[A.id16].routable) == (True, False)
    assert cut.nodes[B.id16] is view.nodes[B.id16]
    heard = fold(cut, [a_change("a", seq=2)], MEMBERS, NOW, {A.id16})
    assert (heard.nodes[A.id16].unreachable, heard.nodes[A.id16].seq) == (True, 2)
    again = fold(heard, [], MEMBERS, NOW)
    assert (again.nodes[A.id16].unreachable, again.nodes[A.id16].routable) == (False, True)


def test_the_own_node_is_never_unreachable() -> None:
    me = id16_of(ME)
    view = fold(empty(ME, NodeName("me")), [a_change("a", origin=me)], {}, NOW, {me})
    assert view.own is not None
    assert view.own.routable


def test_age_is_computed_by_the_reader_and_never_negative() -> None:
    node = a_view(a_change("a", mono_ms=5_000, base_ms=-1_000)).nodes[A.id16]
    assert node.taken_ms == 4_000
    assert node.age_ms(4_500) == 500
    assert node.age_ms(3_000) == 0
    assert node.period_ms == 1_000


def test_five_periods_make_a_picture_stale() -> None:
    assert not is_stale(5_000, 1_000)
    assert is_stale(5_001, 1_000)


_changes = st.lists(
    st.builds(
        a_change,
        st.sampled_from("ab"),
        seq=st.integers(1, 9),
        state=st.sampled_from(list(Liveness)),
        static=st.sampled_from([None, a_static(), a_static(models=())]),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(_changes)
def test_folding_one_by_one_or_all_at_once_is_the_same(changes: list[ViewChange]) -> None:
    at_once = fold(empty(ME, NodeName("me")), changes, MEMBERS, NOW)
    stepped = empty(ME, NodeName("me"))
    for change in changes:
        stepped = fold(stepped, [change], MEMBERS, NOW)
    assert stepped.nodes == at_once.nodes


def test_nodes_that_share_a_name_are_told_apart_for_as_long_as_they_do() -> None:
    """gpustack/gpustack#2046: two hosts called ``ubuntu``."""
    twins = {m.id16: m for m in (replace(A, name=NodeName("ubuntu")), replace(B, name=NodeName("ubuntu")))}
    view = fold(empty(ME, NodeName("me")), [a_change("a"), a_change("b")], twins, NOW)
    labels = {node.label for node in view.nodes.values()}
    assert labels == {f"ubuntu~{m.node_id[:4]}" for m in (A, B)}
    assert set(view.labels.values()) == labels | {"me"}
    alone = fold(view, [], {A.id16: twins[A.id16]}, NOW)
    assert [node.label for node in alone.nodes.values()] == ["ubuntu"]


def test_a_member_that_is_called_as_this_node_is_told_apart_from_it_before_it_is_heard() -> None:
    view = fold(empty(ME, A.name), [], {A.id16: A}, NOW)
    assert view.labels[A.node_id] == f"{A.name}~{A.node_id[:4]}"
    assert view.labels[view.node_id] == f"{A.name}~{view.node_id[:4]}"
