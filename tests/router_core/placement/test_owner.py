"""Whom a question about a model goes to: an order without scores, and the filters of any request."""

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router_core.ids import Id16
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.decision.owner import choose_owner
from router_core.placement.reasons import Reason
from router_core.placement.request.request import Locality
from router_core.record.state import Dialect
from tests.support.fleets import ME, NOW, POLICY, a_fleet, a_request, a_row, id32, parsed_hints

NATIVE = Dialect.OLLAMA_CHAT | Dialect.OLLAMA_GENERATE | Dialect.OLLAMA_EMBED


def an_ollama(name: str = "a", **over: Any) -> Row:
    fields = {"engine": "ollama", "endpoint": "ollama", "model": "tiny:latest", "dialects": int(NATIVE)}
    return a_row(name, **(fields | over))


def rtts(**ms: int) -> dict[Id16, int]:
    return {Id16(id32(name)[:16]): value for name, value in ms.items()}


def owner(*rows: Row, near: dict[Id16, int] | None = None, **over: Any) -> str | Reason:
    request = a_request(**({"model": "tiny", "dialect": NATIVE} | over))
    found = choose_owner(request, a_fleet(*rows), POLICY, near or {}, NOW)
    return found.node_name if isinstance(found, Row) else found


def test_the_own_node_comes_first_then_a_resident_one_then_the_nearest() -> None:
    rows = [
        an_ollama("own", is_self=True, resident=False),
        an_ollama("warm"),
        an_ollama("warmfar"),
        an_ollama("cold", resident=False),
    ]
    near = rtts(warm=9, warmfar=20, cold=1)
    for order in permutations(rows):
        left = list(order)
        asked = []
        while left:
            found = owner(*left, near=near)
            asked.append(found)
            left = [row for row in left if row.node_name != found]
        assert asked == ["own", "warm", "warmfar", "cold"]


def test_nobody_outside_the_mesh_is_asked_what_a_node_of_it_can_tell() -> None:
    rows = an_ollama("out", is_self=True, cloud=True), an_ollama("far")
    request = a_request(model="tiny", dialect=NATIVE, hints=parsed_hints(locality="any"))
    free = replace(POLICY, spill_cap=Locality.ANY)
    found = choose_owner(request, a_fleet(*rows), free, {}, NOW)
    assert isinstance(found, Row)
    assert found.node_name == "far"
    assert owner(rows[0]) is Reason.LOCALITY


def test_a_node_whose_distance_is_unknown_is_the_farthest() -> None:
    assert owner(an_ollama("a"), an_ollama("b"), near=rtts(b=900)) == "b"


def test_how_busy_an_owner_is_does_not_count() -> None:
    busy = an_ollama(
        "a", gate=Gate.SHUT, in_flight=99, queued=99, loadable=False, resident=False, room_bytes=0.0
    )
    assert owner(busy) == "a"


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"untrusted": True}, Reason.UNTRUSTED),
        ({"cloud": True}, Reason.LOCALITY),
        ({"down": "gone"}, Reason.UNREACHABLE),
        ({"draining": True}, Reason.DRAINING),
        ({"dialects": int(Dialect.CHAT)}, Reason.MODEL_ABSENT),
        ({"model": "other:latest"}, Reason.MODEL_ABSENT),
    ],
)
def test_an_owner_must_be_one_that_work_could_go_to(over: dict[str, Any], reason: Reason) -> None:
    assert owner(an_ollama("a", **over)) is reason
    assert owner(an_ollama("a", **over), an_ollama("b")) == "b"


def test_who_was_asked_is_not_asked_again() -> None:
    one, two = an_ollama("a"), an_ollama("b")
    assert owner(one, two, tried=frozenset({one.key})) == "b"
    assert owner(one, two, tried=frozenset({one.key}), refused=frozenset({two.key})) is Reason.REFUSED
    assert owner(one, tried=frozenset({one.key})) is Reason.TRIED


def test_narrowing_hints_hold() -> None:
    own, other = an_ollama("a", is_self=True), an_ollama("b")
    assert owner(own, other, hints=parsed_hints(require="node=@b")) == "b"
    assert owner(other, hints=parsed_hints(locality="host")) is Reason.LOCALITY


def test_what_is_no_name_is_told_apart_from_an_unknown_model() -> None:
    assert owner(an_ollama("a"), model="../x") is Reason.MODEL_NAME_INVALID
    assert owner(an_ollama("a"), model="x") is Reason.MODEL_ABSENT


def test_a_pinned_digest_is_asked_of_those_that_have_it() -> None:
    one, two = an_ollama("a", digest=b"\1" * 32), an_ollama("b", digest=b"\2" * 32)
    assert owner(one, two, model=f"tiny@sha256:{'02' * 32}") == "b"


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sampled_from([None, "gone"]), st.integers(0, 50)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=100, deadline=None)
def test_whoever_is_asked_is_open_and_nobody_better_is(
    rows: list[tuple[bool, bool, str | None, int]],
) -> None:
    made = [
        an_ollama(f"n{i}", resident=resident, down=down, is_self=first and i == 0)
        for i, (first, resident, down, _) in enumerate(rows)
    ]
    near = rtts(**{f"n{i}": rtt for i, (_, _, _, rtt) in enumerate(rows)})
    found = choose_owner(a_request(model="tiny", dialect=NATIVE), a_fleet(*made), POLICY, near, NOW)
    usable = [row for row in made if row.down is None]
    if not usable:
        assert found is Reason.UNREACHABLE
        return
    assert isinstance(found, Row)
    ranks = {row.key: (not row.is_self, not row.resident, near[row.node]) for row in usable}
    assert ranks[found.key] == min(ranks.values())
    assert found.node != Id16(ME[:16])
