"""The serving node's last word, one test per cause, on what is true at this moment."""

from typing import Any

import pytest

from router_core.ids import Id8, node_id_of
from router_core.placement.candidates.admission import Gate
from router_core.placement.candidates.candidate import Row
from router_core.placement.candidates.fleet import Live
from router_core.placement.decision.ingress import IngressAsk, admit, own_row, service_s
from router_core.placement.reasons import Cause
from router_core.placement.request.request import Pin, RequestClass
from router_core.placement.sessions import Sessions, session_key
from router_core.record.state import Dialect
from tests.support.fleets import ME, NOW, a_fleet, a_ledger, a_row


def asked(**over: Any) -> IngressAsk:
    fields: dict[str, Any] = {
        "endpoint": "llamacpp",
        "model": "tiny",
        "dialect": int(Dialect.CHAT),
        "resident": True,
        "ahead": 0.0,
        "patient": False,
    }
    return IngressAsk(**(fields | over))


PATIENT = {"ahead": None, "patient": True}


def mine(**over: Any) -> Row:
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
        ({"gate": Gate.SHUT}, PATIENT, Cause.PRESSURE),
        ({"gate": Gate.SOFT}, {}, Cause.PRESSURE),
        ({"gate": Gate.SOFT}, PATIENT, None),
        ({"resident": False, "loads": False}, {"resident": False}, Cause.PRESSURE),
        ({"resident": False}, {}, Cause.COLD),
        ({"resident": False}, {"resident": False}, None),
        ({"resident": False, "loading": True}, {}, Cause.COLD),
        ({"resident": False, "loading": True}, {"resident": False}, None),
        ({"foreign": 3}, {}, None),
        ({"foreign": 4}, {}, Cause.QUEUE_FULL),
        ({"foreign": 4}, {"ahead": 0.6}, None),
        ({"foreign": 5}, {"ahead": 0.6}, Cause.QUEUE_FULL),
        ({"foreign": 11}, {"ahead": 7.5}, None),
        ({"foreign": 11}, {"ahead": None}, None),
        ({"foreign": 11}, PATIENT, None),
        ({"resident": False}, PATIENT, None),
    ],
)
def test_admission_names_its_cause(row: dict[str, Any], ask: dict[str, Any], cause: Cause | None) -> None:
    assert admit(asked(**ask), a_fleet(mine(**row))) is cause


def test_a_row_of_another_node_is_never_admitted() -> None:
    assert admit(asked(), a_fleet(a_row("a"))) is Cause.MODEL_ABSENT


def test_a_model_that_is_being_unloaded_takes_nothing_new_however_patient() -> None:
    live = Live(ledger=a_ledger(), leaving={("llamacpp", "tiny")})
    for ask in (asked(), asked(resident=False), asked(**PATIENT)):
        assert admit(ask, a_fleet(mine(), live=live)) is Cause.COLD
    assert admit(asked(model="other"), a_fleet(mine(model="other"), live=live)) is None


def test_a_cold_request_waits_for_no_other_load_unless_it_has_the_time() -> None:
    """Loads are serialised: until the one under way ends, the router may know a better place."""
    cold, other = mine(resident=False), mine(model="other", resident=False, loading=True, load_s=8.0)
    fleet = a_fleet(cold, other)
    ask = asked(resident=False)
    assert admit(ask, fleet) is Cause.COLD
    assert admit(asked(resident=False, **PATIENT), fleet) is None, "it is sent again, and stays"
    assert admit(asked(model="other", resident=False), fleet) is None, "its own load is the one"
    assert admit(ask, a_fleet(mine(), other)) is None, "what is in memory is served beside a load"
    elsewhere = a_row(
        "me", is_self=True, key=f"{node_id_of(ME)}/ollama", model="other", loading=True, load_s=8.0
    )
    assert admit(ask, a_fleet(cold, elsewhere)) is None
    assert admit(ask, a_fleet(cold, a_row("a", model="other", loading=True, load_s=8.0))) is None


def test_live_work_decides_over_what_was_published() -> None:
    ledger = a_ledger()
    fleet = a_fleet(mine(slots=1), live=Live(ledger=ledger))
    assert admit(asked(), fleet) is None
    first = ledger.local.start("llamacpp", 4.0, NOW)
    assert admit(asked(), fleet) is Cause.QUEUE_FULL
    assert admit(asked(ahead=1.0), fleet) is None
    for _ in range(2):
        ledger.local.start("llamacpp", 4.0, NOW)
    assert admit(asked(**PATIENT), fleet) is Cause.QUEUE_FULL
    ledger.local.finish(first)
    assert admit(asked(**PATIENT), fleet) is None


def test_however_long_the_work_of_those_in_front_is_a_free_place_is_one() -> None:
    ledger = a_ledger()
    fleet = a_fleet(mine(slots=4), live=Live(ledger=ledger))
    for _ in range(3):
        ledger.local.start("llamacpp", 3_600.0, NOW)
        assert admit(asked(), fleet) is None
    ledger.local.start("llamacpp", 0.001, NOW)
    assert admit(asked(), fleet) is Cause.QUEUE_FULL, "and one that will be free soon is none yet"


def test_a_router_that_does_not_say_what_it_expects_is_refused_by_the_ceiling_alone() -> None:
    ledger = a_ledger()
    fleet = a_fleet(mine(), live=Live(ledger=ledger))
    for busy in range(13):
        told = admit(asked(ahead=None), fleet)
        assert told is (Cause.QUEUE_FULL if busy >= 12 else None)
        ledger.local.start("llamacpp", 60.0, NOW)


def test_a_lower_class_leaves_the_room_of_those_before_it() -> None:
    ledger = a_ledger()
    fleet = a_fleet(mine(), live=Live(ledger=ledger))
    full = {RequestClass.INTERACTIVE: 12, RequestClass.BATCH: 11, RequestClass.BACKGROUND: 9}
    for busy in range(12):
        for kind, most in full.items():
            cause = admit(asked(**PATIENT, request_class=kind), fleet)
            assert cause is (Cause.QUEUE_FULL if busy >= most else None), (kind, busy)
        ledger.local.start("llamacpp", 0.1, NOW)


def test_what_came_in_is_booked_at_the_speed_of_its_row() -> None:
    fleet = a_fleet(mine(pp=1000, tg=50))
    row = own_row(fleet, "llamacpp", "tiny")
    assert row is not None
    assert service_s(row, 500, 100) == pytest.approx(2.5)
    fleet.live.ledger.local.accepted(Id8(b"\x05" * 8), 3, 9, NOW)
    assert fleet.live.ledger.local.seen(NOW)[0].seq == 9


def pin(endpoint: str, at_ms: int = NOW) -> Pin:
    return Pin(endpoint=endpoint, model="tiny", tokens=10, at_ms=at_ms)


def test_sessions_are_found_until_they_age_out() -> None:
    sessions = Sessions()
    key = session_key("chat-1", b"secret")
    sessions.pin(key, pin("a"))
    assert sessions.find(key, NOW + 600_000) == pin("a")
    assert sessions.find(key, NOW + 600_001) is None
    assert len(sessions) == 0


def test_the_table_of_sessions_is_bounded() -> None:
    sessions = Sessions(kept=10)
    for number in range(1000):
        sessions.pin(session_key(str(number), b"s"), pin(str(number)))
    assert len(sessions) == 10
    assert sessions.find(session_key("999", b"s"), NOW) is not None
    assert sessions.find(session_key("1", b"s"), NOW) is None


def test_a_session_key_depends_on_the_secret_and_hides_the_session() -> None:
    assert session_key("abc", b"one") != session_key("abc", b"two")
    assert len(session_key("a" * 128, b"x" * 64)) == 8
