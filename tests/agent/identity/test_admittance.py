"""How many connections are let in, per member and per port."""

import asyncio
import resource

import pytest

from agent.identity.admittance import Admittance, HalfOpen, Refusal
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


class Crowd:
    """Connections that never finish their handshake, at a clock in hand."""

    def __init__(self) -> None:
        self.admittance = Admittance(most=10_000)
        self.now = 0.0
        self.gave_way: list[str] = []

    def begin(self, ip: str, port: Port = Port.INGRESS, known: bool = False) -> HalfOpen | Refusal:
        return self.admittance.begin(
            port, ip, self.now, give_way=lambda: self.gave_way.append(ip), is_known=lambda: known
        )

    def fill(self, port: Port = Port.INGRESS) -> None:
        """Four addresses with eight connections each."""
        for number in range(limits.UNAUTHENTICATED):
            assert isinstance(self.begin(f"10.0.0.{number % 4}", port), HalfOpen)


@pytest.mark.threat("T20")
def test_strangers_that_fill_one_port_keep_nobody_from_the_other() -> None:
    crowd = Crowd()
    crowd.fill(Port.INGRESS)
    assert crowd.begin("10.0.0.9") is Refusal.UNAUTHENTICATED
    assert isinstance(crowd.begin("10.0.0.9", Port.LINK), HalfOpen)
    assert isinstance(crowd.begin("10.0.0.0", Port.LINK), HalfOpen)


@pytest.mark.threat("T20")
def test_room_is_kept_for_the_known_addresses_of_members() -> None:
    crowd = Crowd()
    crowd.fill()
    for number in range(limits.UNAUTHENTICATED_MEMBERS):
        assert crowd.admittance.saturated(Port.INGRESS) is None
        assert isinstance(crowd.begin(f"10.1.0.{number}", known=True), HalfOpen)
    assert crowd.admittance.saturated(Port.INGRESS) is Refusal.UNAUTHENTICATED
    assert crowd.admittance.saturated(Port.LINK) is None


@pytest.mark.threat("T20")
def test_whoever_waits_longest_gives_way_once_any_handshake_would_be_over() -> None:
    crowd = Crowd()
    crowd.fill()
    crowd.now = limits.HALF_OPEN_LEAST / 1_000 - 0.001
    assert crowd.begin("10.0.0.9") is Refusal.UNAUTHENTICATED
    assert crowd.gave_way == []
    crowd.now += 0.001
    assert isinstance(crowd.begin("10.0.0.9"), HalfOpen)
    assert crowd.gave_way == ["10.0.0.0"]
    assert crowd.admittance.pending == limits.UNAUTHENTICATED


@pytest.mark.threat("T20")
def test_a_member_whose_address_others_hoard_connections_from_gets_in() -> None:
    """Another user of its host, or a neighbour behind one router."""
    crowd = Crowd()
    for _ in range(limits.UNAUTHENTICATED_PER_IP):
        crowd.begin("10.0.0.1")
    assert crowd.begin("10.0.0.1") is Refusal.PER_IP
    crowd.now += limits.HALF_OPEN_LEAST / 1_000
    assert isinstance(crowd.begin("10.0.0.1"), HalfOpen)
    assert crowd.admittance.pending == limits.UNAUTHENTICATED_PER_IP


def test_members_in_their_reserve_give_way_to_no_stranger() -> None:
    crowd = Crowd()
    crowd.fill()
    crowd.begin("10.1.0.1", known=True)
    crowd.now += limits.HALF_OPEN_LEAST / 1_000
    for _ in range(2 * limits.UNAUTHENTICATED):
        crowd.begin("10.0.0.9")
    assert "10.1.0.1" not in crowd.gave_way


def test_an_end_that_is_told_twice_counts_once() -> None:
    crowd = Crowd()
    begun = crowd.begin("10.0.0.1")
    assert isinstance(begun, HalfOpen)
    crowd.admittance.end(begun)
    crowd.admittance.end(begun)
    assert crowd.admittance.pending == 0


@pytest.mark.threat("T21")
@pytest.mark.parametrize("descriptors", [32, 60, 1_024])
def test_members_get_in_however_few_descriptors_a_host_allows(
    monkeypatch: pytest.MonkeyPatch, descriptors: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (descriptors, descriptors))
    admittance = Admittance()
    assert [admittance.saturated(port) for port in Port] == [None] * len(Port)
