"""The router of the page about embedding, as it is printed there, over three nodes."""

import re
from pathlib import Path
from typing import Any

import pytest

import router_core
from router_core import PlacementRequest, ViewChange
from router_core.record.membership import Liveness
from router_core.record.state import Dialect
from tests.agent.node.rig import a_member, an_endpoint, id16, key_of, stated

PAGE = Path(__file__).parents[1] / "docs" / "embedding.md"
NOW = 1_000_000


def printed() -> dict[str, Any]:
    """What the page's one block of Python defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


class Engines:
    """Endpoints that answer with their own name, but for those that are ``broken``."""

    def __init__(self, *broken: str) -> None:
        self.broken = {key_of(name) for name in broken}
        self.asked: list[str] = []

    def __call__(self, endpoint: str, model: str) -> bytes:
        self.asked.append(endpoint)
        if endpoint in self.broken:
            raise ConnectionResetError
        return endpoint.encode()


def a_router(engines: Engines) -> Any:
    names = ("beta", "gamma")
    made = printed()["Embedded"](a_member("me"), [a_member(name) for name in names], lambda: NOW, engines)
    for seq, name in enumerate(names):
        static, volatile = stated(an_endpoint())
        made.heard(
            ViewChange(
                origin=id16(name),
                state=Liveness.FRESH,
                confirmed=True,
                epoch=1,
                inst=1,
                seq=seq,
                mono_ms=NOW,
                base_ms=0,
                due_ms=2_000,
                volatile=volatile,
                static=static,
            )
        )
    return made


def a_request(model: str = "tiny", request_id: str = "r1") -> PlacementRequest:
    return PlacementRequest(request_id, Dialect.CHAT, model, NOW, text_bytes=400)


def test_a_request_is_answered_and_nothing_stays_reserved() -> None:
    made = a_router(engines := Engines())
    assert made.ask(a_request()).decode() in {key_of("beta"), key_of("gamma")}
    assert len(engines.asked) == 1
    assert (len(made.router.ledger), len(made.router.lateness)) == (0, 0)


def test_a_request_that_failed_moves_to_the_next_endpoint_and_the_breaker_hears_of_it() -> None:
    made = a_router(engines := Engines("beta"))
    answers = {made.ask(a_request(request_id=f"r{number}")) for number in range(16)}
    assert answers == {key_of("gamma").encode()}
    assert key_of("beta") in engines.asked
    assert made.router.breakers.last_fault_ms(key_of("beta")) == NOW
    assert len(made.router.ledger) == 0


def test_where_every_endpoint_fails_the_reason_is_told_and_nothing_stays_reserved() -> None:
    made = a_router(engines := Engines("beta", "gamma"))
    with pytest.raises(LookupError, match="tried"):
        made.ask(a_request())
    assert len(engines.asked) == 2
    assert all(made.router.breakers.last_fault_ms(at) == NOW for at in engines.broken)
    assert len(made.router.ledger) == 0


def test_a_model_that_nobody_has_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match="model_absent"):
        a_router(Engines()).ask(a_request("absent"))


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(router_core, name) is not None for name in router_core.__all__)
    with pytest.raises(AttributeError, match="no public name 'Nothing'"):
        _ = router_core.Nothing
