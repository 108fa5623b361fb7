"""When an endpoint counts as silent, and who then gives up waiting there."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router_core.exchange.silence import Silence
from router_core.ids import NodeName
from router_core.placement.request import Endpoint
from router_core.record.state import (
    EngineFacts,
    EngineLoad,
    GpuFacts,
    GpuLoad,
    Level,
    ModelState,
    ResidentModel,
    Static,
    Volatile,
)
from router_core.view.cluster import NodeView
from router_core.view.fold import empty, fold
from tests.support.cluster_views import a_change, a_member
from tests.support.fleets import ME

HERE: Endpoint = "node/engine"
ELSEWHERE: Endpoint = "node/other"


class Request:
    """A request somewhere; ``given_up`` collects those that gave up."""

    def __init__(self, name: str, given_up: list[str], last_byte_ms: float | None = None) -> None:
        self.name = name
        self.last_byte_ms = last_byte_ms
        self._given_up = given_up

    def give_up(self) -> None:
        self._given_up.append(self.name)


class Scene:
    """Requests sent to one endpoint, by name."""

    def __init__(self, **last_bytes_ms: float | None) -> None:
        self.silence = Silence()
        self.given_up: list[str] = []
        self.requests = {
            name: Request(name, self.given_up, last_byte_ms) for name, last_byte_ms in last_bytes_ms.items()
        }
        for request in self.requests.values():
            self.silence.sent(HERE, request)

    def missed(self, since_ms: int = 1_000, node: NodeView | None = None) -> list[str]:
        self.silence.missed(HERE, since_ms, node)
        return self.given_up


def a_node(taken_ms: int, util: int | None, external: int | None = None, **over: Any) -> NodeView:
    """A node with one engine on the second of its two GPUs."""
    other = GpuLoad(util_pct=100, external_util_pct=0)
    static = Static(
        gpus=tuple(GpuFacts(uuid8=bytes(8), name="gpu", vram_total_mib=1) for _ in range(2)),
        engines=(EngineFacts(name="engine", kind="llamacpp", gpus=over.get("gpus", (1,))),),
    )
    volatile = Volatile(
        level=Level.NONE,
        gpus=(other, GpuLoad(util_pct=util, external_util_pct=external)),
        engines=(EngineLoad(),),
        residents=over.get("residents", ()),
    )
    member = a_member("node")
    change = a_change("node", mono_ms=taken_ms, volatile=volatile, static=static)
    view = fold(empty(ME, NodeName("me")), [change], {member.id16: member}, taken_ms)
    return view.nodes[member.id16]


def a_model(state: ModelState, engine: int = 0) -> ResidentModel:
    return ResidentModel(model=0, engine=engine, state=state)


def test_who_waits_at_a_silent_endpoint_gives_up_in_the_order_of_sending() -> None:
    assert Scene(a=None, b=None, c=None).missed() == ["a", "b", "c"]


def test_a_byte_to_anybody_since_then_says_that_it_lives() -> None:
    assert Scene(a=None, b=1_000.0).missed() == []
    assert Scene(a=None, b=999.9).missed() == ["a"]


def test_an_answer_that_ended_since_then_says_so_too() -> None:
    scene = Scene(a=None, b=1_500.0)
    scene.silence.ended(HERE, scene.requests["b"])
    assert scene.missed(2_000) == ["a"]
    scene.given_up.clear()
    assert scene.missed(1_500) == []


def test_other_endpoints_say_nothing_of_this_one_and_lose_nobody() -> None:
    scene = Scene(a=None)
    scene.silence.sent(ELSEWHERE, Request("busy", scene.given_up, 9_000.0))
    scene.silence.sent(ELSEWHERE, Request("waits", scene.given_up))
    assert scene.missed() == ["a"]


def test_an_answer_under_way_is_never_given_up() -> None:
    assert Scene(flowing=500.0, a=None).missed() == ["a"]


@pytest.mark.parametrize(
    ("node", "lives"),
    [
        (a_node(2_000, 90), True),
        (a_node(2_000, 90, external=20), True),
        (a_node(2_000, 90, external=88), False),
        (a_node(2_000, 3), False),
        (a_node(2_000, None), False),
        (a_node(1_000, 90), False),
        (a_node(2_000, 90, gpus=()), False),
        (a_node(2_000, None, residents=(a_model(ModelState.LOADING),)), True),
        (a_node(1_000, None, residents=(a_model(ModelState.LOADING),)), False),
        (a_node(2_000, None, residents=(a_model(ModelState.RESIDENT),)), False),
        (a_node(2_000, None, residents=(a_model(ModelState.LOADING, engine=1),)), False),
        (replace(a_node(2_000, 90), volatile=None), False),
        (None, False),
    ],
)
def test_a_newer_picture_of_its_own_work_or_of_a_load_speaks_for_it(
    node: NodeView | None, lives: bool
) -> None:
    assert Scene(a=None).missed(node=node) == ([] if lives else ["a"])


STEPS = st.lists(
    st.tuples(st.sampled_from(("sent", "ended", "byte", "missed")), st.integers(0, 5)), max_size=40
)


@given(STEPS)
def test_nobody_is_forgotten_and_nothing_is_kept_of_who_ended(steps: list[tuple[str, int]]) -> None:
    scene = Scene()
    requests = [Request(str(number), scene.given_up) for number in range(6)]
    there: set[int] = set()
    for now, (step, number) in enumerate(steps):
        request = requests[number]
        if step == "sent":
            scene.silence.sent(HERE, request)
            there.add(number)
        elif step == "ended":
            scene.silence.ended(HERE, request)
            there.discard(number)
        elif step == "byte" and number in there:
            request.last_byte_ms = now
        elif step == "missed":
            scene.given_up.clear()
            waiting = {str(each) for each in there if requests[each].last_byte_ms is None}
            assert set(scene.missed(now)) in (set(), waiting)
        assert len(scene.silence) == len(there)
    for number in there:
        scene.silence.ended(HERE, requests[number])
    assert not scene.silence
    assert not scene.silence._there
    assert not scene.silence._heard_ms
