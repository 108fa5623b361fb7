"""Which addresses of a host are told to others, in which order, and how they are kept current."""

import asyncio
from ipaddress import ip_address

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mesh.interfaces import HostNetwork, Interface, InterfaceAddress, IpAddress, read_network
from agent.mesh.own_addresses import OwnAddresses, ranked
from agent.settings.values import Listen
from router_core import limits
from tests.support.until import until

ANY = Listen(ip=None, port=7433)


def network(*found: tuple[Interface, str]) -> HostNetwork:
    """Interfaces with their addresses, blank separated, in the kernel's order; ``-`` marks a temporary one, ``!`` one
    that is not used."""
    held = [
        InterfaceAddress(
            ip=ip_address(text.strip("-!")),
            interface=each.name,
            temporary="-" in text,
            usable="!" not in text,
        )
        for each, texts in found
        for text in texts.split()
    ]
    return HostNetwork(interfaces=tuple(each for each, _ in found), addresses=tuple(held))


def shown(found: HostNetwork, *in_use: str) -> list[str]:
    return [str(ip) for ip in ranked(found, {ip_address(each) for each in in_use})]


LO = (Interface(name="lo", kind=""), "127.0.0.1 ::1")
ETH = (Interface(name="eth0", kind="", metric=100), "192.168.1.5 fe80::1")


def bridge(name: str, *, running: bool = True, metric: int | None = None) -> Interface:
    return Interface(name=name, kind="bridge", running=running, metric=metric)


def port(of: str, name: str = "veth1", kind: str = "veth") -> tuple[Interface, str]:
    return Interface(name=name, kind=kind, master=of), ""


def test_bridges_of_containers_made_before_the_lan_interface_are_told_to_nobody() -> None:
    """exo-explore/exo#724"""
    bridges = [(bridge(f"br-{n:012x}"), f"172.{n}.0.1") for n in range(18, 28)]
    ports = [port(each.name, f"veth{n}") for n, (each, _) in enumerate(bridges)]
    assert shown(network(LO, *bridges, *ports, ETH)) == ["192.168.1.5"]


@pytest.mark.parametrize("name", ["docker0", "virbr0", "cni0", "podman1", "lxdbr0", "any0", "br-lan"])
def test_a_bridge_that_only_guests_hang_on_is_left_out_whatever_its_name(name: str) -> None:
    guests = (port(name), port(name, "vnet0", "tun"))
    assert shown(network(LO, (bridge(name), "172.17.0.1"), *guests, ETH)) == ["192.168.1.5"]
    assert shown(network(LO, (bridge(name), "172.17.0.1"), ETH)) == ["192.168.1.5"]


@pytest.mark.parametrize("name", ["br-lan", "vmbr0", "br0", "docker0"])
def test_a_bridge_with_a_port_that_leads_out_is_the_lan_whatever_its_name(name: str) -> None:
    out = port(name, "enp3s0", "")
    found = network(LO, (bridge("virbr0"), "192.168.122.1"), (bridge(name), "192.168.1.5"), port(name), out)
    assert shown(found) == ["192.168.1.5"]


def test_a_bridge_with_the_default_route_is_the_lan_though_only_guests_hang_on_it() -> None:
    """A host that is itself a container."""
    assert shown(network(LO, (bridge("br0", metric=0), "10.0.3.7"), port("br0"))) == ["10.0.3.7"]


@pytest.mark.parametrize(
    "name", ["docker0", "vmnet8", "vboxnet0", "veth12ab", "cali12ab", "virbr0", "bridge100"]
)
@pytest.mark.parametrize("kind", [None, ""])
def test_where_the_kernel_does_not_say_the_name_does(name: str, kind: str | None) -> None:
    lan = (Interface(name="en0", kind=kind), "192.168.1.5")
    assert shown(network((Interface(name=name, kind=kind), "172.17.0.1"), lan)) == ["192.168.1.5"]


def test_the_address_in_a_container_is_the_only_one_and_told() -> None:
    assert shown(network(LO, (Interface(name="eth0", kind="veth", metric=0), "172.17.0.2"))) == ["172.17.0.2"]
    assert shown(network(LO, (Interface(name="eth0", kind="veth"), "10.99.0.1"))) == ["10.99.0.1"]


def test_if_nothing_else_is_there_a_bridge_is_told() -> None:
    assert shown(network(LO, (bridge("docker0"), "172.17.0.1"))) == ["172.17.0.1"]


def test_a_bridge_that_a_link_runs_over_is_told_last() -> None:
    docker = (bridge("docker0"), "172.17.0.1")
    vpn = (Interface(name="tailscale0", kind="tun"), "100.90.1.2")
    assert shown(network(docker, vpn, ETH), "172.17.0.1") == ["192.168.1.5", "100.90.1.2", "172.17.0.1"]


@pytest.mark.parametrize(
    "vpn",
    [
        Interface(name="tailscale0", kind="tun"),
        Interface(name="home", kind="wireguard"),
        Interface(name="nordlynx", kind="wireguard", metric=0),
        Interface(name="utun3"),
        Interface(name="gre7", kind="gre", point_to_point=True),
        Interface(name="odd", kind="", point_to_point=True),
    ],
    ids=lambda each: each.name,
)
def test_a_vpn_comes_after_the_lan_even_if_everything_leaves_by_it(vpn: Interface) -> None:
    wifi = (Interface(name="wlp2s0", kind=""), "192.168.1.5")
    assert shown(network((vpn, "10.8.0.3"), wifi)) == ["192.168.1.5", "10.8.0.3"]
    assert shown(network((vpn, "10.8.0.3"))) == ["10.8.0.3"]


def test_the_default_route_with_the_least_metric_comes_first_then_other_lans_then_what_is_public() -> None:
    found = network(
        (Interface(name="pub", kind=""), "203.0.113.9"),
        (Interface(name="lab", kind=""), "10.1.0.5"),
        (Interface(name="wlan0", kind="", metric=600), "192.168.7.8"),
        ETH,
    )
    assert shown(found) == ["192.168.1.5", "192.168.7.8", "10.1.0.5", "203.0.113.9"]


def test_what_links_run_over_comes_first() -> None:
    lab = (Interface(name="lab", kind=""), "10.1.0.5")
    assert shown(network(ETH, lab), "10.1.0.5") == ["10.1.0.5", "192.168.1.5"]
    assert shown(network(ETH, lab), "10.1.0.5", "192.168.1.5") == ["192.168.1.5", "10.1.0.5"]


def test_an_interface_without_a_carrier_is_told_only_if_none_has_one() -> None:
    pulled = (Interface(name="eth0", kind="", running=False), "192.168.1.5")
    docker = (bridge("docker0", running=False), "172.17.0.1")
    assert shown(network(docker, pulled, (Interface(name="wlan0", kind=""), "192.168.1.6"))) == [
        "192.168.1.6"
    ]
    assert shown(network(docker, pulled)) == ["192.168.1.5"]


def test_of_ipv6_what_lasts_is_told_and_after_ipv4() -> None:
    eth = Interface(name="eth0", kind="", metric=100)
    told = "fe80::1 2001:db8::aa- 2001:db8::1 fd00::1 fd00::2! 192.168.1.5 169.254.7.7"
    assert shown(network((eth, told))) == ["192.168.1.5", "fd00::1", "2001:db8::1"]
    assert shown(network((eth, "2001:db8::aa- fe80::1"))) == ["2001:db8::aa"]


def test_an_address_on_two_interfaces_is_told_once() -> None:
    assert shown(network(ETH, (Interface(name="eth1", kind=""), "192.168.1.5"))) == ["192.168.1.5"]


KINDS = st.sampled_from([None, "", "bridge", "veth", "tun", "wireguard", "vlan", "bond"])
NAMES = st.sampled_from(["eth0", "docker0", "br-1", "wg0", "vmnet1", "lan"])
INTERFACES = st.builds(
    Interface,
    name=NAMES,
    kind=KINDS,
    running=st.booleans(),
    point_to_point=st.booleans(),
    master=st.none() | NAMES,
    metric=st.none() | st.integers(0, 3),
)
ADDRESSES = st.sampled_from(
    [
        ip_address(t)
        for t in ("10.0.0.1", "172.17.0.1", "100.64.0.1", "fd00::1", "fe80::1", "127.0.0.1", "192.0.2.1")
    ]
)


@given(
    interfaces=st.lists(INTERFACES, unique_by=lambda each: each.name, min_size=1),
    data=st.data(),
    in_use=st.frozensets(ADDRESSES),
)
def test_what_is_told_is_held_dialable_and_never_nothing_if_there_is_anything(
    interfaces: list[Interface], data: st.DataObject, in_use: frozenset[IpAddress]
) -> None:
    names = st.sampled_from([each.name for each in interfaces])
    held = data.draw(
        st.lists(
            st.builds(InterfaceAddress, ip=ADDRESSES, interface=names, temporary=st.booleans()), max_size=12
        )
    )
    found = HostNetwork(interfaces=tuple(interfaces), addresses=tuple(held))
    told = ranked(found, in_use)
    fit = {each.ip for each in held if not each.ip.is_link_local and not each.ip.is_loopback}
    assert set(told) <= fit
    assert len(told) == len(set(told))
    assert bool(told) == bool(fit)


def own(found: HostNetwork, mesh: Listen = ANY, ingress: Listen = ANY) -> OwnAddresses:
    made = OwnAddresses(mesh, ingress, read=lambda: found)
    made.look()
    return made


def test_only_what_both_listeners_cover_is_told() -> None:
    found = network(ETH, (Interface(name="lab", kind=""), "10.1.0.5 fd00::5"))
    literal = Listen(ip=ip_address("10.1.0.5"), port=7434)
    assert [str(ip) for ip in own(found).ips] == ["192.168.1.5", "10.1.0.5", "fd00::5"]
    assert own(found, ANY, literal).ips == own(found, literal, ANY).ips == (ip_address("10.1.0.5"),)
    only_v6 = Listen(ip=ip_address("::"), port=7434)
    assert own(found, ANY, only_v6).ips == (ip_address("fd00::5"),)


def test_every_address_is_the_nodes_own_unless_it_listens_at_one_alone() -> None:
    found = network(ETH, (bridge("docker0"), "172.17.0.1"))
    assert ip_address("172.17.0.1") in own(found)
    assert ip_address("172.17.0.2") not in own(found)
    literal = own(found, Listen(ip=ip_address("192.168.1.5"), port=7433))
    assert ip_address("192.168.1.5") in literal
    assert ip_address("172.17.0.1") not in literal


def test_a_literal_address_that_the_host_lost_is_missed() -> None:
    literal = Listen(ip=ip_address("192.168.1.5"), port=7434)
    assert own(network(ETH), ANY, literal).missing is None
    assert own(network(LO), ANY, literal).missing == ip_address("192.168.1.5")
    assert own(network(LO)).missing is None
    assert own(network(), Listen(ip=ip_address("127.0.0.7"), port=1024)).missing is None


def test_at_most_eight_are_told() -> None:
    many = [(Interface(name=f"eth{n}", kind=""), f"10.{n}.0.1") for n in range(20)]
    assert len(own(network(*many)).ips) == limits.ADDRESSES


async def test_a_change_is_noticed_and_told_with_what_changed() -> None:
    found = [network(ETH)]
    in_use: set[IpAddress] = set()
    watched = OwnAddresses(ANY, ANY, read=lambda: found[0], in_use=lambda: in_use, look_s=0.01)
    watched.look()
    told: list[tuple[list[str], bool]] = []
    following = asyncio.create_task(
        watched.follow(lambda moved: told.append(([str(ip) for ip in watched.ips], moved)))
    )
    lab = (Interface(name="lab", kind=""), "10.1.0.5")
    found[0] = network(ETH, lab)
    await until(lambda: told == [(["192.168.1.5", "10.1.0.5"], True)])
    in_use.add(ip_address("10.1.0.5"))
    await until(lambda: told[1:] == [(["10.1.0.5", "192.168.1.5"], False)])
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_the_kernel_tells_the_addresses_that_others_know_too() -> None:
    told = {
        ip_address(address.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family.name in ("AF_INET", "AF_INET6") and psutil.net_if_stats()[name].isup
    }
    assert {each.ip for each in read_network().addresses} == told
    assert all(each.kind is not None for each in read_network().interfaces)
