"""Public reports about hosts with many addresses, moving ones and firewalls, as whole daemons in namespaces meet them."""

import asyncio
import sys
import time
from typing import Any

import pytest

from tests.support.chaos.namespaces import entering, sh
from tests.support.chaos.networks import Hosts, hosts
from tests.support.chaos.waiting import until

pytestmark = pytest.mark.timeout(60)

SOON_S = 1.0
"""Below it nobody waited for an address that does not answer (2 s)."""
DOCKER0 = "172.17.0.1"
BRIDGES = [f"172.{n}.0.1" for n in range(18, 28)]


def bridges(_host: str, ns: str) -> None:
    """Ten container bridges, each with a container on it, as of a compose file that starts before the network does, and
    an eleventh without."""
    sh("ip", "-n", ns, "link", "add", "docker0", "type", "bridge")
    sh("ip", "-n", ns, "addr", "add", f"{DOCKER0}/16", "dev", "docker0")
    sh("ip", "-n", ns, "link", "set", "docker0", "up")
    for n, ip in enumerate(BRIDGES):
        sh("ip", "-n", ns, "link", "add", f"br-{n:012x}", "type", "bridge")
        sh("ip", "-n", ns, "addr", "add", f"{ip}/16", "dev", f"br-{n:012x}")
        sh("ip", "-n", ns, "link", "set", f"br-{n:012x}", "up")
        sh("ip", "-n", ns, "link", "add", f"v{n}", "type", "veth", "peer", "name", f"c{n}")
        sh("ip", "-n", ns, "link", "set", f"v{n}", "master", f"br-{n:012x}", "up")
        sh("ip", "-n", ns, "link", "set", f"c{n}", "up")


def whole(lines: list[dict[str, object]]) -> bool:
    return {line["outcome"] for line in lines} == {"whole"}


async def test_hosts_with_container_bridges_are_told_and_reached_by_their_lan_addresses_from_the_first_request() -> (
    None
):
    """exo-explore/exo#724, habitat-sh/habitat#864"""
    async with hosts("bridges", "a", "b", engines=["a"], first=bridges) as here:
        lan = [here.lan.ip("a")]
        assert await here.told("a") == await here.told("a", seen_at="b") == lan
        exported = (await here["a"].do("trust-export"))["file"]
        assert lan[0] in exported
        assert not any(ip in exported for ip in (DOCKER0, *BRIDGES))
        await here["b"].term()
        await here["b"].start()
        await here.route("b", "a")
        [line] = await here.ask("b")
        assert line["outcome"] == "whole"
        assert line["took"] < SOON_S


async def test_two_hosts_that_exchange_their_addresses_find_each_other_and_serve() -> None:
    """What a DHCP server does when its leases are lost."""
    async with hosts("exchange", "a", "b", engines=["a"]) as here:
        old = {name: f"{here.lan.ip(name)}/24" for name in ("a", "b")}
        for name in ("a", "b"):
            here.ip(name, "addr", "del", old[name], "dev", "eth0")
        here.ip("a", "addr", "add", old["b"], "dev", "eth0")
        here.ip("b", "addr", "add", old["a"], "dev", "eth0")
        moved = time.monotonic()

        async def serves() -> bool:
            return whole(await here.ask("b"))

        await until(serves, 15, "requests go on")
        assert time.monotonic() - moved < 15
        assert await here.told("a", seen_at="b") == [here.lan.ip("b")]


async def unreachable(here: Hosts, at: str, of: str) -> bool:
    return (await here.requests(at, of)).get("state") == "unreachable"


async def test_a_port_for_requests_that_a_firewall_closes_is_told_before_anybody_waits_for_it() -> None:
    """gpustack/gpustack#4131: links stand, requests do not get through."""
    async with hosts("firewall", "a", "b", "c", engines=["a", "c"]) as here:
        here.firewall("a", "tcp dport 7434 drop")
        await here["b"].term()
        await here["b"].start()
        await until(lambda: unreachable(here, "b", "a"), 10, "b knows that a takes no requests")
        await here.route("b", "c")
        member = (await here["b"].members())["a"]
        assert (member["liveness"], member["link"]["state"], member["routable"]) == ("fresh", "up", False)
        _, status, _ = await here["b"].cli("status")
        assert "requests: unreachable (port 7434)" in status
        code, doctor, _ = await here["b"].cli("doctor")
        assert code != 0
        assert "ufw allow 7434/tcp" in doctor
        lines = await here.ask("b", 6)
        assert whole(lines)
        assert {line["node"] for line in lines} == {"@c/fake"}, (
            "where another can serve, it costs nobody anything"
        )
        assert max(line["took"] for line in lines) < SOON_S
        await here["c"].term()

        async def refused() -> dict[str, Any] | None:
            """A node that has just started waits a while for others that may have the model."""
            [line] = await here.ask("b")
            return line if line["code"] != "starting" else None

        line = await until(refused, 15, "b has heard of everybody")
        assert line is not None
        assert (line["status"], line["code"]) == (503, "unreachable")
        assert line["took"] < SOON_S
        here.firewall("a")
        await here.route("b", "a")
        assert whole(await here.ask("b"))
        log = here["b"].log.read_text()
        assert 0 < log.rindex("requests.unreachable") < log.rindex("requests.reachable")


async def test_addresses_that_one_operator_lists_serve_links_and_requests_both_ways() -> None:
    """Hosts outside ``allow_networks``, linked by ``mesh.peers`` at one end."""
    async with hosts(
        "listed",
        "a",
        "b",
        engines=["a", "b"],
        settings='allow_networks = ["192.168.0.0/16"]',
        peers=lambda host, lan: [f"@a={lan.ip('a')}"] if host == "b" else (),
    ) as here:
        for at, other in (("a", "b"), ("b", "a")):
            [line] = await here.ask(at, headers={"x-pairmesh-require": f"node=@{other}"})
            assert (line["outcome"], line["node"]) == ("whole", f"@{other}/fake")


async def test_an_address_that_nothing_allows_is_named_with_the_cure() -> None:
    only = 'allow_networks = ["192.168.0.0/16"]'
    async with hosts("outside", "a", "b", engines=[], settings=only, ready=False) as here:

        async def told() -> bool:
            _, doctor, _ = await here["b"].cli("doctor")
            return f'"@a={here.lan.ip("a")}" to mesh.peers' in doctor

        await until(told, 10, "doctor names address and setting")


HOARD = """
import select, socket, sys
target, sources = sys.argv[1], sys.argv[2:]
held = []
def hold(source, port):
    sock = socket.socket()
    sock.settimeout(2)
    try:
        sock.bind((source, 0))
        sock.connect((target, port))
        held.append((sock, source, port))
    except OSError:
        sock.close()
for port in (7433, 7434):
    for source in sources * 8:
        hold(source, port)
print("held", flush=True)
while held:
    for each in [entry for entry in held if select.select([entry[0]], [], [], 0)[0]]:
        held.remove(each)
        each[0].close()
        hold(*each[1:])
    select.select([], [], [], 0.05)
"""
"""Eight connections from each address to both ports that never say anything, begun anew when they are closed."""


async def test_strangers_that_hoard_half_open_connections_lock_no_member_out() -> None:
    """Six addresses with eight connections each, on 7433 and 7434; four were enough to fill both."""
    async with hosts("hoard", "a", "b", engines=["a"]) as here:
        here.lan.add("evil")
        sources = [f"10.99.0.{200 + number}" for number in range(6)]
        for source in sources:
            here.ip("evil", "addr", "add", f"{source}/24", "dev", "eth0")
        await here["b"].term()
        hoard = await asyncio.create_subprocess_exec(
            *entering(here.lan.hosts["evil"]),
            sys.executable,
            *("-c", HOARD, here.lan.ip("a"), *sources),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert hoard.stdout is not None
            assert await hoard.stdout.readline() == b"held\n"
            await here["b"].start()
            await here.route("b", "a", within_s=5)
            lines = await here.ask("b", 6)
            assert whole(lines)
            assert max(line["took"] for line in lines) < 2 * SOON_S
        finally:
            hoard.kill()
            await hoard.wait()
        metrics = (await here["a"].raw("/metrics")).decode()
        for port in ("link", "ingress"):
            assert f'pairmesh_connections_refused_total{{port="{port}",why="unauthenticated"}}' in metrics
        assert "connections.refused" in here["a"].log.read_text()
