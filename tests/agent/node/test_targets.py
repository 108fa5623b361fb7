"""Where chosen endpoints are: look-ups that follow the roster, the view and what could not be reached."""

import ssl
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from agent.engines.contract import Credential, EndpointHealth, EndpointStatus
from agent.identity.own import load_identity
from agent.identity.tls import OwnFiles, TlsContexts
from agent.mesh.addresses import AddressBook, AddressRules, Unfit
from agent.mesh.interfaces import IpAddress
from agent.node.routing.reachability import FAILED_MS, Reach
from agent.node.routing.targets import CONNECTIONS_MOST, NodeTargets
from agent.settings.manifest import EngineKind, EngineUrl, Manifest
from agent.settings.values import PeerHint
from router_core.ids import Id16, NodeName, node_id_of
from router_core.record.membership import Liveness, Member
from router_core.record.state import Address
from router_core.router.failure import Cause, FailureClass
from tests.agent.node.rig import MESH, HandClock, World, a_member, an_endpoint, an_owned, id32

BETA = node_id_of(id32("beta"))
TWO = tuple(
    Address(ip=ip_address(ip).packed, mesh_port=7_433, ingress_port=7_434) for ip in ("10.0.0.1", "10.0.0.2")
)

PEERS = [
    PeerHint(ref=NodeName("gamma"), named=True, ip=ip_address(ip), port=7_433)
    for ip in ("203.0.113.7", "203.0.113.8")
]


class Hand:
    """Targets over a world, with the endpoints, the roster and the draining in a test's hand."""

    def __init__(self, folder: Path) -> None:
        own = load_identity(folder, b"machine")
        self.world = World()
        self.endpoints: dict[str, EndpointStatus] = {}
        self.members: Mapping[Id16, Member] = {}
        self.draining = False
        self.contexts = TlsContexts(OwnFiles(own.cert_path, own.key_path))
        self.ways: list[tuple[IpAddress, bool]] = []
        self.clock = HandClock()
        self.reach = Reach(self.clock)
        self.targets = NodeTargets(
            board=self.world.board,
            endpoints=lambda: self.endpoints,
            members=lambda: self.members,
            contexts=self.contexts,
            book=AddressBook(AddressRules(allow=(ip_network("10.0.0.0/8"),)), PEERS),
            ways=lambda peer: self.ways,
            reach=self.reach,
            is_draining=lambda: self.draining,
        )

    def admit(self, *members: Member) -> None:
        self.members = {member.id16: member for member in members}
        self.targets.members_changed(self.members, MESH)

    def beta(self) -> tuple[str, int] | None:
        """The address that is tried first."""
        route = self.targets.peer(BETA)
        return None if route is None else route.addresses[0]

    def all_of_beta(self) -> list[str]:
        route = self.targets.peer(BETA)
        return [] if route is None else [f"{ip}:{port}" for ip, port in route.addresses]

    def linked(self, *ways: tuple[str, bool]) -> None:
        self.ways = [(ip_address(ip), dialled) for ip, dialled in ways]
        self.targets.moved(BETA)


@pytest.fixture
def hand(tmp_path: Path) -> Hand:
    hand = Hand(tmp_path)
    hand.admit(a_member("beta"))
    hand.world.peer("beta", an_endpoint(), addrs=TWO)
    return hand


def test_a_peer_is_where_it_says_its_ingress_is(hand: Hand) -> None:
    route = hand.targets.peer(BETA)
    assert route is not None
    assert route.addresses == (("10.0.0.1", 7_434), ("10.0.0.2", 7_434))
    assert route.pin == b"beta"


def test_an_address_that_could_not_be_connected_comes_last_next_time(
    hand: Hand,
) -> None:
    route = hand.targets.peer(BETA)
    assert route is not None
    assert route.reached is not None
    route.reached("10.0.0.1", 7_434, Cause.CONNECT_REFUSED)
    assert hand.all_of_beta() == ["10.0.0.2:7434", "10.0.0.1:7434"]
    route.reached("10.0.0.1", 7_434, None)
    assert hand.all_of_beta() == ["10.0.0.1:7434", "10.0.0.2:7434"]
    route.reached("10.0.0.1", 7_434, Cause.CONNECT_TIMEOUT)
    assert hand.beta() == ("10.0.0.2", 7_434)
    hand.clock.now += FAILED_MS
    hand.reach.keep({BETA})
    assert hand.beta() == ("10.0.0.1", 7_434)


def test_where_the_link_was_dialled_comes_first_and_where_one_came_from_last(hand: Hand) -> None:
    hand.linked(("10.0.0.2", True))
    assert hand.all_of_beta() == ["10.0.0.2:7434", "10.0.0.1:7434"]
    hand.linked(("10.0.0.2", False))
    assert hand.all_of_beta() == ["10.0.0.2:7434", "10.0.0.1:7434"]
    hand.linked(("10.9.9.9", False))
    assert hand.all_of_beta() == ["10.0.0.1:7434", "10.0.0.2:7434", "10.9.9.9:7434"]


def test_what_a_link_proved_needs_no_network_to_be_allowed_and_keeps_the_port_that_is_told(
    hand: Hand,
) -> None:
    told = Address(ip=ip_address("203.0.113.7").packed, mesh_port=7_433, ingress_port=8_434)
    hand.world.peer("beta", an_endpoint(), addrs=(told,))
    assert hand.all_of_beta() == []
    assert [(str(at), why) for at, why in hand.targets.left_out(BETA)] == [
        ("203.0.113.7:8434", Unfit.NOT_ALLOWED)
    ]
    hand.linked(("203.0.113.7", True))
    assert hand.all_of_beta() == ["203.0.113.7:8434"]
    assert hand.targets.left_out(BETA) == ()
    hand.linked(("169.254.1.1", True), ("127.0.0.1", True))
    assert hand.all_of_beta() == []


def test_what_the_operator_says_is_dialled_for_requests_as_it_is_for_links(hand: Hand) -> None:
    gamma = node_id_of(id32("gamma"))
    hand.admit(a_member("gamma"))
    told = Address(ip=ip_address("203.0.113.7").packed, mesh_port=7_433, ingress_port=8_434)
    hand.world.peer("gamma", an_endpoint(), addrs=(told,))
    route = hand.targets.peer(gamma)
    assert route is not None
    assert route.addresses == (("203.0.113.7", 8_434), ("203.0.113.8", 8_434))


def test_a_member_is_unreachable_once_no_address_worked_and_until_one_does(hand: Hand) -> None:
    changed: list[str] = []
    hand.reach.subscribe(changed.append)
    hand.targets.unreached(BETA, Cause.EOF)
    assert hand.reach.of(BETA) is None
    hand.targets.unreached(BETA, Cause.CONNECT_TIMEOUT)
    found = hand.reach.of(BETA)
    assert found is not None
    assert (found.why, str(found.at)) == ("timed_out", "10.0.0.1:7434")
    assert hand.reach.unreachable == {a_member("beta").id16}
    hand.clock.now += 1_000
    hand.targets.unreached(BETA, Cause.CONNECT_REFUSED)
    again = hand.reach.of(BETA)
    assert again is not None
    assert again.since_ms == found.since_ms
    assert len(changed) == 1, "told once"
    hand.reach.heard(BETA, "10.0.0.2", 7_434, None)
    assert hand.reach.of(BETA) is None
    assert hand.reach.reached_ms(BETA) == hand.clock.now


def test_a_look_up_costs_nothing_new_until_something_changed(hand: Hand) -> None:
    first = hand.targets.peer(BETA)
    assert hand.targets.peer(BETA) is first
    hand.world.peer("beta", an_endpoint(), addrs=TWO[1:])
    assert hand.beta() == ("10.0.0.2", 7_434)


def test_a_new_certificate_of_a_peer_is_pinned_at_once(hand: Hand) -> None:
    hand.targets.peer(BETA)
    hand.admit(a_member("beta", der=b"other"))
    route = hand.targets.peer(BETA)
    assert route is not None
    assert route.pin == b"other"


def test_who_left_the_roster_is_nowhere(hand: Hand) -> None:
    assert hand.beta() is not None
    hand.admit()
    assert hand.beta() is None


@pytest.mark.parametrize(
    "addrs", [(), (Address(ip=b"\x08\x08\x08\x08", mesh_port=7_433, ingress_port=7_434),)]
)
def test_a_peer_without_an_address_that_may_be_dialled_is_nowhere(
    hand: Hand, addrs: tuple[Address, ...]
) -> None:
    hand.world.peer("beta", an_endpoint(), addrs=addrs)
    assert hand.beta() is None
    hand.targets.unreached(BETA, Cause.CONNECT_REFUSED)


def test_a_peer_whose_facts_are_unknown_is_nowhere(hand: Hand) -> None:
    hand.world.hear("beta", None, None)
    assert hand.beta() is None


def test_liveness_is_the_meshs_verdict_and_gone_for_strangers(hand: Hand) -> None:
    assert hand.targets.liveness(BETA) is Liveness.FRESH
    hand.world.peer("beta", an_endpoint(), state=Liveness.SUSPECT)
    assert hand.targets.liveness(BETA) is Liveness.SUSPECT
    hand.world.admit()
    assert hand.targets.liveness(BETA) is Liveness.GONE


def test_an_own_engine_takes_requests_while_it_is_well_and_the_node_stays(hand: Hand) -> None:
    hand.endpoints = {"llama": an_endpoint()}
    assert hand.targets.local("llama") is hand.targets.local("llama")
    assert hand.targets.local("other") is None
    hand.endpoints = {"llama": an_endpoint(health=EndpointHealth.UNREACHABLE)}
    assert hand.targets.local("llama") is None
    hand.endpoints = {"llama": an_endpoint(health=EndpointHealth.DEGRADED)}
    assert hand.targets.local("llama") is not None
    hand.draining = True
    assert hand.targets.local("llama") is None


def test_an_own_engine_is_addressed_as_its_manifest_says(hand: Hand) -> None:
    hand.endpoints = {
        "llama": an_endpoint(
            owned=(an_owned("tiny", aliases=("small",)),), credential=Credential("key"), max_queue=1_000
        )
    }
    found = hand.targets.local("llama")
    assert found is not None
    assert (found.ip, found.port, found.host) == ("127.0.0.1", 8_080, b"127.0.0.1:8080")
    assert found.authorization == "Bearer key"
    assert found.connections == CONNECTIONS_MOST
    assert [found.upstream_name(name) for name in ("tiny", "small", "unheard")] == [
        "/tiny.gguf",
        "/tiny.gguf",
        "unheard",
    ]
    assert not found.off_host


def test_an_endpoint_outside_the_mesh_is_verified_by_name_and_never_leads_home(hand: Hand) -> None:
    url = EngineUrl(scheme="https", host="api.example.com", port=443)
    manifest = Manifest(name="out", url=url, engine=EngineKind.OPENAI, cloud=True, remote_host=True)
    hand.endpoints = {"out": an_endpoint("out", manifest=manifest)}
    found = hand.targets.local("out")
    assert found is not None
    assert (found.ip, found.port, found.host) == ("api.example.com", 443, b"api.example.com")
    assert found.path_of(b"/v1/chat/completions") == b"/v1/chat/completions"
    assert found.tls is not None
    assert found.tls.check_hostname
    assert found.tls.verify_mode is ssl.CERT_REQUIRED
    assert found.admits is not None
    assert found.admits(ip_address("203.0.113.9"))
    assert not found.admits(ip_address("127.0.0.1"))


def test_an_api_may_lie_below_another_path(hand: Hand) -> None:
    url = EngineUrl(scheme="https", host="api.example.com", port=443, path="/openai/v1")
    manifest = Manifest(name="out", url=url, engine=EngineKind.OPENAI, cloud=True, remote_host=True)
    hand.endpoints = {"out": an_endpoint("out", manifest=manifest)}
    found = hand.targets.local("out")
    assert found is not None
    assert found.path_of(b"/v1/chat/completions") == b"/openai/v1/chat/completions"


def test_a_changed_engine_is_seen_at_the_next_look(hand: Hand) -> None:
    hand.endpoints = {"llama": an_endpoint(slots=1, max_queue=0)}
    before = hand.targets.local("llama")
    hand.endpoints = {"llama": an_endpoint(slots=2, max_queue=0)}
    after = hand.targets.local("llama")
    assert before is not None
    assert after is not None
    assert (before.connections, after.connections) == (9, 10)


def test_a_peers_error_is_read_as_its_engine_means_it(hand: Hand) -> None:
    told = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    known = hand.targets.peer_classify(BETA, "llama", 503, told)
    assert known.name == FailureClass.LOADING.name
    unknown = hand.targets.peer_classify(BETA, "nowhere", 503, told)
    assert unknown.name in FailureClass.__members__
