"""Claims about the named metrics: what one record adds, and what a view says at scrape time."""

import json

from msgspec.structs import replace

from agent.effects.clock import SystemClock
from agent.observe.instruments import Alarms, DecisionMetrics, RelayMetrics
from agent.observe.log import Log
from agent.observe.metrics import Registry
from agent.observe.view_metrics import ViewMetrics
from router_core.placement.candidates.admission import Gate
from router_core.placement.reasons import AuthorityOutcome
from router_core.placement.record import Attempt, Ending
from router_core.placement.request.request import Counsel
from router_core.policy.authority import AuthorityMode
from router_core.record.membership import Liveness
from router_core.record.state import GpuFacts, GpuLoad, ResourceCode, ResourceLevel, Static, Volatile
from tests.agent.admin.test_documents import node, view
from tests.agent.observe.records import record
from tests.support.fleets import a_fleet, a_request, a_row, decided, parsed_hints


def text_of(*collectors: object) -> str:
    registry = Registry(lambda exc: (_ for _ in ()).throw(exc))
    registry.add(*collectors)  # type: ignore[arg-type]
    return registry.render()


def test_a_decision_counts_its_action_exclusions_hints_and_time() -> None:
    metrics = DecisionMetrics()
    fleet = a_fleet(a_row("a"), a_row("b", tg=2, pp=50), a_row("pressed", gate=Gate.SHUT))
    metrics.decided(decided(a_request(hints=parsed_hints(prefer="@b")), fleet), 0.00005)
    text = text_of(metrics)
    assert 'pairmesh_decisions_total{action="route",reason="native"} 1\n' in text
    assert 'pairmesh_excluded_total{code="pressure"} 1\n' in text
    assert 'pairmesh_hints_total{hint="prefer",outcome="outscored"} 1\n' in text
    assert "pairmesh_decision_seconds_count 1\n" in text
    assert "pairmesh_degraded_total{" not in text
    assert 'pairmesh_shed_total{class="background"} 0\n' in text


def test_what_came_of_asking_an_authority_is_counted_only_where_there_is_one() -> None:
    metrics = DecisionMetrics()
    fleet = a_fleet(a_row("a"), a_row("b"))
    counsel = Counsel(mode=AuthorityMode.ADVISORY, outcome=AuthorityOutcome.TIMEOUT, decision_id="d1", ms=50)
    metrics.decided(decided(a_request(), fleet), 0.00005)
    assert "pairmesh_authority_total{" not in text_of(metrics)
    metrics.decided(decided(a_request(advice=counsel), fleet), 0.00005)
    assert 'pairmesh_authority_total{outcome="timeout"} 1\n' in text_of(metrics)


def test_an_ended_request_counts_attempts_refusals_cancels_and_errors() -> None:
    metrics = DecisionMetrics()
    ended = replace(
        record(),
        attempts=(
            Attempt(row="@a/x", start_ms=1, result="refused", refused="queue_full"),
            Attempt(row="@b/x", start_ms=2, result="done"),
        ),
        outcome=Ending(status=200, total_ms=9, err_ttft=0.3, cancelled_by="client"),
    )
    metrics.ended(ended)
    metrics.ended(replace(ended, attempts=(), outcome=None))
    text = text_of(metrics)
    assert 'pairmesh_attempts_total{result="done"} 1\n' in text
    assert 'pairmesh_refusals_total{cause="queue_full"} 1\n' in text
    assert 'pairmesh_cancelled_total{by="client"} 1\n' in text
    assert 'pairmesh_prediction_error_ln_count{kind="ttft"} 1\n' in text
    assert 'kind="ect"' not in text


def test_the_relays_instruments_are_exposed_once_they_know_something() -> None:
    metrics = RelayMetrics()
    metrics.bytes.inc("in", by=3)
    text = text_of(metrics)
    assert 'pairmesh_relay_bytes_total{dir="in"} 3\n' in text
    assert "pairmesh_relay_rejected_total{" not in text


def test_an_alarm_is_one_line_and_one_count() -> None:
    lines: list[str] = []
    alarms = Alarms(Log(lines.append, SystemClock()), "mesh")
    alarms.notify("bad_signature", {"peer": "atlas"})
    line = json.loads(lines[0])
    assert (line["event"], line["level"], line["peer"]) == ("mesh.bad_signature", "warning", "atlas")
    assert 'pairmesh_mesh_alarms_total{code="bad_signature"} 1\n' in text_of(alarms)


def test_an_alarm_names_the_node_as_people_do() -> None:
    lines: list[str] = []
    known = {"00ff": ("ubuntu~abcd", "abcd-efgh")}
    alarms = Alarms(Log(lines.append, SystemClock()), "mesh", known.get)
    alarms.notify("equivocation", {"origin": "00ff", "seq": 3})
    alarms.notify("equivocation", {"origin": "ffff", "seq": 3})
    first, second = map(json.loads, lines)
    assert (first["origin"], first["origin_id"], first["seq"]) == ("ubuntu~abcd", "abcd-efgh", 3)
    assert second["origin"] == "ffff"


def test_nodes_of_one_name_have_series_of_their_own() -> None:
    """gpustack/gpustack#2046: one series hid the other."""
    own = node(1, "me", volatile=Volatile(), is_self=True)
    twins = [node(number, "ubuntu", volatile=Volatile()) for number in (2, 3)]
    text = text_of(ViewMetrics(lambda: view(own, *twins), lambda: 1_950))
    for twin in twins:
        assert f'record_age_seconds{{node="{twin.node_id}",name="ubuntu"}} 1\n' in text


def test_the_view_tells_members_ages_and_own_pressure_and_no_unknown() -> None:
    volatile = Volatile(
        resources=(
            ResourceLevel(code=ResourceCode.CPU, level=1, score_c=40),
            ResourceLevel(code=ResourceCode.VRAM, level=None, score_c=None),
        ),
        gpus=(GpuLoad(level=2, score_c=None),),
    )
    static = Static(gpus=(GpuFacts(uuid8=b"\x01" * 8, name="x"),))
    own = node(1, "atlas", volatile=volatile, static=static, is_self=True)
    others = [node(2, "borg", volatile=Volatile()), node(3, "cyan", liveness=Liveness.GONE)]
    text = text_of(ViewMetrics(lambda: view(own, *others), lambda: 1_950))
    assert 'pairmesh_mesh_members{state="fresh"} 1\n' in text
    assert 'pairmesh_mesh_members{state="gone"} 1\n' in text
    assert 'pairmesh_mesh_members{state="late"} 0\n' in text
    assert f'pairmesh_mesh_record_age_seconds{{node="{others[0].node_id}",name="borg"}} 1\n' in text
    assert "cyan" not in text
    assert 'pairmesh_pressure_level{resource="cpu",gpu=""} 1\n' in text
    assert 'pairmesh_pressure_score{resource="cpu",gpu=""} 0.4\n' in text
    assert f'pairmesh_pressure_level{{resource="gpu",gpu="{"01" * 8}"}} 2\n' in text
    assert "vram" not in text
    assert 'pairmesh_pressure_score{resource="gpu"' not in text


def test_a_view_without_an_own_record_has_no_pressure() -> None:
    assert "pressure_level{" not in text_of(ViewMetrics(lambda: view(node(2, "borg")), lambda: 0))
