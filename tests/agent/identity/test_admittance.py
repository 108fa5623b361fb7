"""How many connections are let in, per member and per port."""

import asyncio

from agent.identity.admittance import Admittance, Refusal
from agent.identity.routes import Port
from router_core import limits
from router_core.ids import Id16


def ids() -> list[Id16]:
    """As many members as it takes to fill the ingress, and one more."""
    members = limits.INGRESS_CONNECTIONS // limits.INGRESS_PER_ID
    return [Id16(bytes([number]) * 16) for number in range(members + 1)]


def filled() -> tuple[Admittance, list[tuple[Id16, asyncio.Transport]]]:
    """An ingress at its limit, every member but the last at its own."""
    admittance = Admittance(most=10_000)
    taken = []
    for member in ids()[:-1]:
        for _ in range(limits.INGRESS_PER_ID):
            transport = asyncio.Transport()
            assert admittance.register(Port.INGRESS, member, transport) is None
            taken.append((member, transport))
    return admittance, taken


def test_members_together_cannot_fill_the_ingress_beyond_its_limit() -> None:
    admittance, taken = filled()
    late = ids()[-1]
    assert admittance.live(Port.INGRESS) == limits.INGRESS_CONNECTIONS
    assert admittance.register(Port.INGRESS, late, asyncio.Transport()) is Refusal.PER_PORT
    admittance.release(Port.INGRESS, *taken[0])
    assert admittance.register(Port.INGRESS, late, asyncio.Transport()) is None


def test_a_full_ingress_keeps_no_link_out() -> None:
    admittance, _ = filled()
    assert admittance.register(Port.LINK, ids()[-1], asyncio.Transport()) is None


def test_releasing_twice_counts_once() -> None:
    admittance, taken = filled()
    admittance.release(Port.INGRESS, *taken[0])
    admittance.release(Port.INGRESS, *taken[0])
    assert admittance.live(Port.INGRESS) == limits.INGRESS_CONNECTIONS - 1
