"""The address book: which hints are kept, in which order they are tried, and how little a stranger can fill."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.mesh.addresses import FAILURES, STRANGERS, AddressBook, AddressRules, PeerAddress
from agent.settings.values import PeerHint
from router_core.ids import Id32, NodeName, node_id_of
from router_core.record.membership import Member
from router_core.record.state import Address

OWN = ip_address("10.0.0.1")
RULES = AddressRules(
    allow=tuple(
        ip_network(text) for text in ("10.0.0.0/8", "fc00::/7", "fe80::/10", "169.254.0.0/16", "::/0")
    ),
    own=frozenset({OWN}),
)


def member(number: int, name: str = "node") -> Member:
    return Member(id32=Id32(bytes([number]) * 32), der=b"", roles=1, admission=1, name=NodeName(name))


def at(text: str, port: int = 7433) -> PeerAddress:
    return PeerAddress(ip_address(text), port)


def said(*endpoints: PeerAddress) -> list[Address]:
    return [Address(ip=e.ip.packed, mesh_port=e.port, ingress_port=7434) for e in endpoints]


def book(*hints: PeerHint, rules: AddressRules = RULES) -> AddressBook:
    built = AddressBook(rules, hints)
    built.admit_members(member(number).id16 for number in (1, 2))
    return built


@pytest.mark.threat("T30")
@pytest.mark.parametrize(
    ("endpoint", "admitted"),
    [
        (at("10.1.2.3"), True),
        (at("10.1.2.3", 1_024), True),
        (at("10.1.2.3", 1_023), False),
        (at("10.1.2.3", 65_536), False),
        (at("10.0.0.1"), False),
        (at("127.0.0.1"), False),
        (at("8.8.8.8"), False),
        (at("0.0.0.0"), False),
        (at("169.254.169.254"), False),
        (at("fe80::1"), False),
        (at("fd00::1%eth0"), False),
        (at("fd00::1"), True),
        (at("::"), False),
        (at("ff02::fb"), False),
        (at("::ffff:10.1.2.3"), False),
    ],
    ids=str,
)
def test_hints_of_others_must_be_dialable_and_allowed(endpoint: PeerAddress, admitted: bool) -> None:
    assert RULES.admit(endpoint) is admitted


def test_loopback_is_dialled_only_where_it_is_listed() -> None:
    local = AddressRules(allow=(ip_network("127.0.0.0/8"),), own=frozenset())
    assert local.admit(at("127.0.0.2"))
    assert not local.admit(at("10.1.2.3"))


def test_own_words_of_a_member_come_first_then_the_operators_then_sightings() -> None:
    by_id = PeerHint(ref=member(1).node_id, named=False, ip=ip_address("192.0.2.1"), port=80)
    by_name = PeerHint(ref=NodeName("node"), named=True, ip=ip_address("192.0.2.2"), port=7433)
    other = PeerHint(ref=NodeName("other"), named=True, ip=ip_address("192.0.2.3"), port=7433)
    known = book(by_id, by_name, other)
    assert known.sight(member(1).node_id, [at("10.0.0.9"), at("8.8.8.8")])
    chosen = known.choose(member(1), said(at("10.0.0.5"), at("169.254.0.1"), at("10.0.0.9")))
    assert chosen == (at("10.0.0.5"), at("10.0.0.9"), at("192.0.2.1", 80), at("192.0.2.2"))


def test_of_members_that_share_a_name_a_marked_hint_means_one() -> None:
    mark = member(1).node_id[:4]
    assert not member(2).node_id.startswith(mark)
    hint = PeerHint(ref=member(1).name, named=True, mark=mark, ip=ip_address("192.0.2.1"), port=7433)
    assert member(2).name == member(1).name
    assert book(hint).choose(member(1), ()) == (at("192.0.2.1"),)
    assert book(hint).choose(member(2), ()) == ()


def test_an_address_that_failed_is_tried_last_until_it_works() -> None:
    known = book()
    addrs = said(at("10.0.0.5"), at("10.0.0.6"), at("10.0.0.7"))
    known.failed(member(1).id16, at("10.0.0.6"))
    known.failed(member(1).id16, at("10.0.0.5"))
    assert known.choose(member(1), addrs) == (at("10.0.0.7"), at("10.0.0.6"), at("10.0.0.5"))
    known.worked(member(1).id16, at("10.0.0.6"))
    assert known.choose(member(1), addrs) == (at("10.0.0.6"), at("10.0.0.7"), at("10.0.0.5"))
    assert known.choose(member(2), addrs)[0] == at("10.0.0.5")


def test_a_sighting_of_a_member_replaces_the_last_and_an_unusable_one_is_no_sighting() -> None:
    known = book()
    assert known.sight(member(1).node_id, [at("10.0.0.5")])
    assert known.sight(member(1).node_id, [at("10.0.0.6")])
    assert known.choose(member(1), []) == (at("10.0.0.6"),)
    assert not known.sight(member(1).node_id, [at("127.0.0.1")])
    assert known.choose(member(1), []) == ()


def test_a_stranger_becomes_dialable_only_with_membership() -> None:
    known = book()
    late = member(9)
    assert not known.sight(late.node_id, [at("10.0.0.9")])
    assert known.choose(late, []) == ()
    known.admit_members([late.id16])
    assert known.choose(late, []) == (at("10.0.0.9"),)
    assert known.strangers == 0


def test_who_leaves_the_roster_is_forgotten() -> None:
    known = book()
    known.sight(member(1).node_id, [at("10.0.0.9")])
    known.failed(member(1).id16, at("10.0.0.5"))
    known.admit_members([])
    known.failed(member(1).id16, at("10.0.0.5"))
    known.admit_members([member(1).id16])
    assert known.choose(member(1), said(at("10.0.0.5"), at("10.0.0.6"))) == (at("10.0.0.5"), at("10.0.0.6"))


@pytest.mark.threat("T2")
def test_strangers_are_bounded_and_the_latest_stay() -> None:
    known = book()
    ids = [node_id_of(Id32(number.to_bytes(32, "big"))) for number in range(1, 10 * STRANGERS)]
    for node_id in ids:
        known.sight(node_id, [at("10.0.0.9")])
    assert known.strangers == STRANGERS
    known.sight(ids[-1], [])
    assert known.strangers == STRANGERS - 1


hosts = st.integers(2, 60).map(lambda last: at(f"10.0.0.{last}"))


@given(
    named=st.lists(hosts, max_size=8),
    sighted=st.lists(hosts, max_size=20),
    failed=st.lists(hosts, max_size=3 * FAILURES),
)
@settings(max_examples=60)
def test_what_is_chosen_is_known_unique_and_at_most_eight(
    named: list[PeerAddress], sighted: list[PeerAddress], failed: list[PeerAddress]
) -> None:
    known = book()
    known.sight(member(1).node_id, sighted)
    for endpoint in failed:
        known.failed(member(1).id16, endpoint)
    chosen = known.choose(member(1), said(*named))
    assert len(chosen) == len(set(chosen)) <= 8
    assert set(chosen) <= {*named, *sighted}
    assert bool(chosen) == bool(named or sighted)
