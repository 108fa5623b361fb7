"""The serving node's last word, one test per cause, on what is true at this moment."""

import pytest

from router_core.ids import Id8, node_id_of
from router_core.placement.admission import Gate
from router_core.placement.fleet import Live
from router_core.placement.ingress import IngressAsk, admit, own_row, service_s
from router_core.placement.reasons import Cause
from router_core.placement.request import Pin, RequestClass
from router_core.placement.sessions import Sessions, session_key
from router_core.record.state import Dialect
from tests.support.fleets import ME, NOW, a_fleet, a_ledger, a_row


def asked(**over) -> IngressAsk:
    fields = {
        "endpoint": "llamacpp",
        "model": "tiny",
        "dialect": int(Dialect.CHAT),
        "resident": True,
        "wait_ms": 500,
        "left_ms": 60_000,
    }
    return IngressAsk(**(fields | over))


def mine(**over):
    return a_row("me", is_self=True, key=f"{node_id_of(ME)}/llamacpp", **over)


@pytest.mark.parametrize(
    ("row", "ask", "cause"),
    [
        ({}, {}, None),
        ({"draining": True}, {}, Cause.DRAINING),
        ({}, {"model": "other"}, Cause.MODEL_ABSENT),
        ({}, {"endpoint": "other"}, Cause.MODEL_ABSENT),
        ({}, {"model": "no name"}, Cause.MODEL_ABSENT),
        ({}, {"dialect": int(Dialect.RERANK)}, Cause.MODEL_ABSENT),
        ({"down": "engine"}, {}, Cause.MODEL_ABSENT),
        ({"resident": False, "loadable": False}, {}, Cause.MODEL_ABSENT),
        ({"foreign": 12}, {}, Cause.QUEUE_FULL),
        ({"gate": Gate.SHUT}, {}, Cause.PRESSURE),
        ({"gate": Gate.SHUT}, {"wait_ms": 60_000}, Cause.PRESSURE),
        ({"gate": Gate.SOFT}, {}, Cause.PRESSURE),
        ({"gate": Gate.SOFT}, {"wait_ms": 60_000}, None),
        ({"resident": False, "loads": False}, {"resident": False}, Cause.PRESSURE),
        ({"resident": False}, {}, Cause.COLD),
        ({"resident": False}, {"resident": False}, None),
        ({"resident": False}, {"wait_ms": 5_000}, None),
        ({"resident": False}, {"wait_ms": 60_000}, None),
    ],
)
def test_admission_names_its_cause(row, ask, cause):
    assert admit(asked(**ask), a_fleet(mine(**row)), NOW) is cause


def test_a_row_of_another_node_is_never_admitted():
    assert admit(asked(), a_fleet(a_row("a")), NOW) is Cause.MODEL_ABSENT


def test_a_model_that_is_being_unloaded_takes_nothing_new_however_patient():
    live = Live(ledger=a_ledger(), leaving={("llamacpp", "tiny")})
    for ask in (asked(), asked(resident=False), asked(wait_ms=60_000)):
        assert admit(ask, a_fleet(mine(), live=live), NOW) is Cause.COLD
    assert admit(asked(model="other"), a_fleet(mine(model="other"), live=live), NOW) is None


def test_a_cold_request_waits_for_no_other_load_unless_it_has_the_time():
    """Loads are serialised: until the one under way ends, the router may know a better place."""
    cold, other = mine(resident=False), mine(model="other", resident=False, loading=True, load_s=8.0)
    fleet = a_fleet(cold, other)
    ask = asked(resident=False)
    assert admit(ask, fleet, NOW) is Cause.COLD
    assert admit(asked(resident=False, wait_ms=9_000), fleet, NOW) is None
    assert admit(asked(resident=False, wait_ms=60_000), fleet, NOW) is None, "it is sent again, and stays"
    assert admit(asked(model="other", resident=False), fleet, NOW) is None, "its own load is the one"
    assert admit(ask, a_fleet(mine(), other), NOW) is None, "what is in memory is served beside a load"
    elsewhere = a_row(
        "me", is_self=True, key=f"{node_id_of(ME)}/ollama", model="other", loading=True, load_s=8.0
    )
    assert admit(ask, a_fleet(cold, elsewhere), NOW) is None
    assert admit(ask, a_fleet(cold, a_row("a", model="other", loading=True, load_s=8.0)), NOW) is None


def test_live_work_decides_over_what_was_published():
    ledger = a_ledger()
    fleet = a_fleet(mine(slots=1), live=Live(ledger=ledger))
    assert admit(asked(), fleet, NOW) is None
    first = ledger.local.start("llamacpp", 4.0, NOW)
    assert admit(asked(), fleet, NOW) is Cause.WAIT_EXCEEDED
    assert admit(asked(wait_ms=4_000), fleet, NOW) is None
    assert admit(asked(), fleet, NOW + 3_600) is None
    for _ in range(2):
        ledger.local.start("llamacpp", 4.0, NOW)
    assert admit(asked(wait_ms=60_000), fleet, NOW) is Cause.QUEUE_FULL
    ledger.local.finish(first)
    assert admit(asked(wait_ms=60_000), fleet, NOW) is None


def test_a_lower_class_leaves_the_room_of_those_before_it():
    ledger = a_ledger()
    fleet = a_fleet(mine(), live=Live(ledger=ledger))
    full = {RequestClass.INTERACTIVE: 12, RequestClass.BATCH: 11, RequestClass.BACKGROUND: 9}
    for busy in range(12):
        for kind, most in full.items():
            cause = admit(asked(wait_ms=60_000, request_class=kind), fleet, NOW)
            assert cause is (Cause.QUEUE_FULL if busy >= most else None), (kind, busy)
        ledger.local.start("llamacpp", 0.1, NOW)


def test_work_is_waited_for_by_as_many_as_are_served_at_a_time():
    ledger = a_ledger()
    fleet = a_fleet(mine(slots=4), live=Live(ledger=ledger))
    ledger.local.start("llamacpp", 1.9, NOW)
    assert admit(asked(), fleet, NOW) is None
    ledger.local.start("llamacpp", 0.2, NOW)
    assert admit(asked(), fleet, NOW) is Cause.WAIT_EXCEEDED


def test_what_came_in_is_booked_at_the_speed_of_its_row():
    fleet = a_fleet(mine(pp=1000, tg=50))
    row = own_row(fleet, "llamacpp", "tiny")
    assert row is not None
    assert service_s(row, 500, 100) == pytest.approx(2.5)
    fleet.live.ledger.local.accepted(Id8(b"\x05" * 8), 3, 9, NOW)
    assert fleet.live.ledger.local.seen(NOW)[0].seq == 9


def pin(endpoint: str, at_ms: int = NOW) -> Pin:
    return Pin(endpoint=endpoint, model="tiny", tokens=10, at_ms=at_ms)


def test_sessions_are_found_until_they_age_out():
    sessions = Sessions()
    key = session_key("chat-1", b"secret")
    sessions.pin(key, pin("a"))
    assert sessions.find(key, NOW + 600_000) == pin("a")
    assert sessions.find(key, NOW + 600_001) is None
    assert len(sessions) == 0


def test_the_table_of_sessions_is_bounded():
    sessions = Sessions(kept=10)
    for number in range(1000):
        sessions.pin(session_key(str(number), b"s"), pin(str(number)))
    assert len(sessions) == 10
    assert sessions.find(session_key("999", b"s"), NOW) is not None
    assert sessions.find(session_key("1", b"s"), NOW) is None


def test_a_session_key_depends_on_the_secret_and_hides_the_session():
    assert session_key("abc", b"one") != session_key("abc", b"two")
    assert len(session_key("a" * 128, b"x" * 64)) == 8
