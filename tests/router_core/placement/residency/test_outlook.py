"""What this node sees of its models: what the mesh asks for, who serves it and how long that takes."""

from random import Random
from typing import Any

import pytest

from router_core.ids import node_id_of
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.decide import decide
from router_core.placement.reasons import Reason
from router_core.placement.residency.events import EngineResidency, HostLook, Model
from router_core.placement.residency.outlook import Headroom, HostModel, outlook
from router_core.policy.profile import ProfilePolicy
from router_core.profile.outcome import Outcome, Result
from router_core.profile.profiles import Profiles
from router_core.record.state import Level
from tests.support.fleets import GIB, ME, NOW, POLICY, a_fleet, a_ledger, a_request, a_row, decided

KEY = ("llamacpp", "tiny")
ROOM = Headroom(free_bytes=8 * GIB, reserve_bytes=GIB, places={}, level=Level.NONE)

TURN_S = pytest.approx((1.0 + 200 * 0.02 * 1.3) / 4)
"""How often one of the four usual requests on a row of these tests ends."""


def mine(**over: Any) -> Row:
    return a_row("me", is_self=True, key=f"{node_id_of(ME)}/llamacpp", **over)


def cold(**over: Any) -> Row:
    return mine(**({"resident": False} | over))


def seen(*rows: Row, told: HostModel | None = None, **over: Any) -> HostLook:
    return outlook(a_fleet(*rows, **over), (told or HostModel(key=KEY),), ROOM, NOW)


def only(*rows: Row, told: HostModel | None = None, **over: Any) -> Model:
    (model,) = seen(*rows, told=told, **over).models
    return model


def test_a_model_that_is_warm_nowhere_has_no_wait_and_one_that_is_has_the_least() -> None:
    assert only(cold()).wait_s is None
    assert only(cold(), a_row("a", in_flight=9), a_row("b", in_flight=4, taken_ms=NOW)).wait_s == TURN_S


def test_what_cannot_be_used_serves_nobody() -> None:
    for over in (
        {"down": "gone"},
        {"draining": True},
        {"untrusted": True},
        {"gate": Gate.SHUT},
        {"cloud": True},
    ):
        assert only(cold(), a_row("a", **over)).wait_s is None


def test_another_model_or_digest_is_no_replica() -> None:
    assert only(cold(), a_row("a", model="other")).wait_s is None
    assert only(cold(digest=bytes(32)), a_row("a", digest=bytes([1]) * 32)).wait_s is None
    assert only(cold(digest=bytes(32)), a_row("a", digest=bytes(32), model="twin")).wait_s == 0.0


def test_own_work_and_what_was_sent_but_is_not_told_yet_wait_too() -> None:
    ledger = a_ledger()
    for _ in range(4):
        ledger.local.start("llamacpp", 8.0, NOW, "tiny")
    assert (
        only(mine(), told=HostModel(key=KEY, held=EngineResidency.RESIDENT), live=Live(ledger=ledger)).wait_s
        == TURN_S
    )
    ledger = a_ledger()
    warm = a_row("a", slots=2)
    sent = decided(a_request(), a_fleet(warm, live=Live(ledger=ledger))).chosen
    assert sent is not None
    assert only(cold(), warm, live=Live(ledger=ledger)).wait_s == 0.0
    for _ in range(2):
        ledger.reserve(sent, NOW)
    wait_s = only(cold(), warm, live=Live(ledger=ledger)).wait_s
    assert wait_s == pytest.approx((1.0 + 200 * 0.02 * 1.1) / 2, rel=0.1)


def test_who_could_serve_a_model_is_whoever_has_it_or_could_load_it() -> None:
    assert only(cold(loadable=False)).able == 1, "this node can, as it is told to"
    others = (a_row("a"), a_row("b", resident=False), a_row("c", resident=False, loadable=False))
    assert only(cold(), *others, a_row("d", down="gone")).able == 3


def test_a_model_that_anybody_loads_is_told_to_be() -> None:
    assert not only(cold(), a_row("a", resident=False)).is_loading
    assert only(cold(), a_row("a", resident=False, loading=True)).is_loading


def test_requests_in_a_model_are_those_we_know_of_or_those_its_engine_tells() -> None:
    ledger = a_ledger()
    ticket = ledger.local.start("llamacpp", 8.0, NOW, "tiny")
    ledger.local.start("llamacpp", 8.0, NOW, "other")
    live = Live(ledger=ledger)
    assert (only(mine(), live=live).busy, only(mine(), live=live).started) == (1, 1)
    assert only(mine(), told=HostModel(key=KEY, busy=3), live=live).busy == 3
    ledger.local.finish(ticket)
    assert (only(mine(), live=live).busy, only(mine(), live=live).started) == (0, 1)
    assert not seen(mine(), live=live).is_idle, "another model's request keeps the node busy"


def test_those_go_first_that_load_sooner_and_can_begin() -> None:
    other = {"resident": False, "load_s": 4.0}
    assert only(cold(load_s=5.0), a_row("a", **other)).ahead == 1
    for over in (
        {"load_s": 6.0},
        {"loadable": False},
        {"loads": False},
        {"room_bytes": 1.0 * GIB},
        {"in_flight": 1},
        {"resident": True},
        {"gate": Gate.SOFT},
    ):
        assert only(cold(load_s=5.0), a_row("a", **(other | over))).ahead == 0, over


def test_of_two_that_load_alike_exactly_one_goes_first() -> None:
    first = only(cold(load_s=5.0), a_row("a", resident=False, load_s=5.0)).ahead
    assert first == int(node_id_of(ME) > a_row("a").node_id)


def test_a_load_time_is_what_loads_took_and_else_a_guess() -> None:
    profiles = Profiles(ProfilePolicy())
    row = cold(load_s=5.0)
    assert (only(row, profiles=profiles).load_s, only(row, profiles=profiles).load_known) == (5.0, False)
    for load_ms in (1_000, 2_000, 3_000, 4_000):
        profiles.learn(Outcome(key=row.profile_key, at_ms=NOW, result=Result.OK, load_ms=load_ms))
    assert (only(row, profiles=profiles).load_s, only(row, profiles=profiles).load_known) == (3.0, True)
    warm = only(mine(), profiles=profiles)
    assert (warm.load_s, warm.load_known) == (3.0, True), "what a warm model would take again is known, too"


def test_a_size_that_nobody_tells_stays_unknown() -> None:
    assert only(cold(need_bytes=0)).need_bytes is None
    assert only(cold()).held_bytes == 4 * GIB, "it gives back what it would take"
    assert only(cold(), told=HostModel(key=KEY, held_bytes=3 * GIB)).held_bytes == 3 * GIB


def test_pressure_and_an_engine_that_is_down_forbid_a_load() -> None:
    assert only(cold()).may_load
    for over in ({"loads": False}, {"gate": Gate.SOFT}, {"down": "engine"}, {"draining": True}):
        assert not only(cold(**over)).may_load


def test_a_model_that_the_fleet_does_not_offer_here_is_left_out() -> None:
    assert seen(a_row("a")).models == ()


def test_a_model_that_is_being_unloaded_is_not_chosen_and_asking_again_helps() -> None:
    live = Live(ledger=a_ledger(), leaving={KEY})
    decision = decide(a_request(), a_fleet(mine(), live=live), POLICY, NOW, Random(1))
    assert (decision.chosen, decision.reason) == (None, Reason.DRAINING)
    assert decision.retry_after_s is not None
    decision = decide(a_request(), a_fleet(mine(), a_row("a"), live=live), POLICY, NOW, Random(1))
    assert decision.chosen is not None
    assert decision.chosen.node_name == "a"
