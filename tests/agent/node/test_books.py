"""What placing keeps between requests: nothing that looking at engines changes, nothing that strangers can fill."""

import pytest

from agent.relay.ports import Turned
from router_core import limits
from router_core.placement.sessions import KEPT
from router_core.router.outcome import Result
from tests.agent.node.rig import World, a_line, a_report, an_endpoint, an_outcome

BURST = 5
STRANGERS = KEPT + 200


@pytest.mark.lesson("vllm-project/router#197: probes reset the load")
def test_looking_at_engines_in_mid_burst_changes_no_count() -> None:
    world = World()
    world.own(an_endpoint())
    world.peer("beta", an_endpoint())
    for number in range(BURST):
        world.route(world.ask(f"r{number}"))
    before = (len(world.router.ledger), world.work.in_flight("llama"), dict(world.router.ledger.owed))
    assert before[0] == BURST
    for _ in range(10):
        world.clock.now += 1
        world.own(an_endpoint())
    assert (len(world.router.ledger), world.work.in_flight("llama"), dict(world.router.ledger.owed)) == before


@pytest.mark.lesson("vllm-project/production-stack#687: tables that grow")
def test_names_that_only_ever_come_once_fill_no_table() -> None:
    world = World()
    world.own(an_endpoint())
    for number in range(STRANGERS):
        hints = (("x-session-id", f"s{number}"), ("x-pairmesh-prefer", f"@node{number}"))
        turned = world.ask(f"absent{number}", model=f"model-{number}", headers=hints).decide(
            attempt=1, tried=frozenset(), refused=frozenset(), now=world.clock.now
        )
        assert isinstance(turned, Turned)
        world.placing.answered(a_line(turned.decision_id, status=404, code="model_absent"))
        choosing = world.ask(f"r{number}", headers=hints)
        routed = world.route(choosing)
        choosing.end(routed.attempt)
        world.placing.attempted(a_report(routed, an_outcome(routed, Result.DONE)), 1)
        world.placing.answered(a_line(routed.decision_id))
    assert len(world.router.sessions) == KEPT
    assert len(world.router.ledger) == len(world.placing.open) == 0
    assert all(not record.req.model_asked for record in world.kept.records if record.chosen is None)
    shown = [series for family in world.placing.metrics.collect() for series in family.series]
    assert len(shown) < 2 * limits.LABEL_VALUES
