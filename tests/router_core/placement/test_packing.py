"""The preset ``pack``: one host after the other is filled, as long as nobody waits for it."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from router_core.placement.candidates.candidate import Row
from router_core.placement.decision.replay import replay
from router_core.placement.reasons import Reason
from router_core.policy.placement import PRESETS
from tests.support.fleets import POLICY, a_fleet, a_request, a_row, chosen_node, decided, parsed_hints

PACK = PRESETS["pack"]


def quick(name: str, **over: Any) -> Row:
    """A row that answers well within every target."""
    return a_row(name, **({"pp": 8_000, "tg": 100} | over))


def test_the_fullest_host_that_keeps_its_promise_is_filled_first() -> None:
    fleet = a_fleet(quick("idle"), quick("used", in_flight=2))
    assert chosen_node(decided(a_request(), fleet, policy=PACK)) == "used"
    assert chosen_node(decided(a_request(), fleet, policy=POLICY)) == "idle"


def test_fullness_is_a_share_of_what_a_host_can_do_at_a_time() -> None:
    small, big = quick("small", in_flight=1, slots=2), quick("big", in_flight=1, slots=8)
    assert chosen_node(decided(a_request(), a_fleet(small, big), policy=PACK)) == "small"


def test_a_host_where_one_would_wait_too_long_is_not_filled_further() -> None:
    deep = quick("deep", in_flight=4, queued=7)
    assert chosen_node(decided(a_request(), a_fleet(quick("idle"), deep), policy=PACK)) == "idle"


def test_a_model_is_not_loaded_to_fill_a_host() -> None:
    cold = quick("cold", resident=False, load_s=0.1, in_flight=3)
    assert chosen_node(decided(a_request(), a_fleet(quick("warm"), cold), policy=PACK)) == "warm"


def test_a_host_on_which_the_veto_falls_is_not_filled_further() -> None:
    pressed = quick("pressed", in_flight=3, pressure=0.99)
    assert chosen_node(decided(a_request(), a_fleet(quick("calm"), pressed), policy=PACK)) == "calm"


def test_equally_full_hosts_go_by_score() -> None:
    fleet = a_fleet(quick("pressed", in_flight=1, pressure=0.5), quick("calm", in_flight=1))
    assert chosen_node(decided(a_request(), fleet, policy=PACK)) == "calm"


def test_a_hint_for_the_fullest_host_is_the_reason_only_if_it_is_not_fuller_than_the_others() -> None:
    request = a_request(hints=parsed_hints(prefer="@a"))
    full = quick("a", in_flight=2, pressure=0.2)
    for beside, reason in ((1, Reason.NATIVE), (2, Reason.HINT)):
        decision = decided(request, a_fleet(full, quick("b", in_flight=beside)), policy=PACK)
        assert (chosen_node(decision), decision.reason) == ("a", reason)


def test_where_nobody_keeps_the_promise_it_is_chosen_as_ever() -> None:
    rows = [quick(name, pp=500, tg=15, in_flight=4, queued=queued) for name, queued in (("a", 4), ("b", 7))]
    for number in range(20):
        request = a_request(request_id=f"r{number}")
        packed = decided(request, a_fleet(*rows), policy=PACK)
        assert chosen_node(packed) == chosen_node(decided(request, a_fleet(*rows)))


@st.composite
def fleets(draw: st.DrawFn) -> list[Row]:
    return [
        quick(
            name,
            in_flight=draw(st.integers(0, 4)),
            queued=draw(st.integers(0, 7)),
            pressure=draw(st.floats(0, 1)),
            resident=draw(st.booleans()),
            load_s=draw(st.floats(0.1, 20)),
        )
        for name in draw(st.lists(st.sampled_from("abcdef"), min_size=1, unique=True))
    ]


@given(fleets())
def test_packing_takes_a_warm_row_that_keeps_its_promise_if_there_is_one(rows: list[Row]) -> None:
    decision = decided(a_request(), a_fleet(*rows), policy=PACK)
    if decision.chosen is None:
        return
    by_row = {candidate.row: candidate for candidate in decision.record.candidates}
    chosen = by_row.pop(decision.chosen.endpoint)
    assert chosen.out is None
    rivals = [row for row in by_row.values() if row.out is None and row.f.slo < PACK.pack_below]
    if chosen.f.slo >= PACK.pack_below:
        assert rivals == []
    assert chosen.resident or not any(row.resident for row in rivals)


def test_a_record_names_the_policy_that_made_it() -> None:
    record = decided(a_request(), a_fleet(quick("a")), policy=PACK).record
    assert (record.policy, record.policy_hash) == ("pack", PACK.hash)
    refused = decided(a_request(model="absent"), a_fleet(quick("a")), policy=PACK).record
    assert refused.policy_hash == PACK.hash


@given(fleets())
def test_a_packed_choice_replays_from_its_record(rows: list[Row]) -> None:
    record = decided(a_request(), a_fleet(*rows), policy=PACK).record
    if record.full:
        assert replay(record, PACK) == record
