"""Daemons on a LAN of namespaces for one field case: a few lines each, nothing left behind."""

import contextlib
import itertools
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.capabilities import probe, required
from tests.support.chaos.lan import Lan
from tests.support.chaos.namespaces import sh
from tests.support.chaos.node import NodeProc, pair_by_file, started
from tests.support.chaos.waiting import until

MODEL = "tiny"
_NUMBERS = itertools.count()


@dataclass(kw_only=True)
class Hosts:
    """``hosts["a"]`` is a daemon on the host of that name."""

    base: Path
    lan: Lan
    nodes: dict[str, NodeProc] = field(default_factory=dict)

    def __getitem__(self, name: str) -> NodeProc:
        return self.nodes[name]

    def ip(self, name: str, *words: str) -> None:
        """``ip`` on a host."""
        sh("ip", "-n", self.lan.hosts[name], *words)

    def firewall(self, name: str, *rules: str) -> None:
        """Rules of the input chain of a host, in place of those that were; none: no firewall."""
        script = ["add table inet case", "delete table inet case"]
        if rules:
            script += [
                "add table inet case",
                "add chain inet case input { type filter hook input priority 0; }",
            ]
            script += [f"add rule inet case input {rule}" for rule in rules]
        sh("nft", "-f", "-", ns=self.lan.hosts[name], stdin="\n".join(script) + "\n")

    async def ask(self, at: str, count: int = 1, **plan: Any) -> list[dict[str, Any]]:
        """``count`` chats at once at the API of a node; a line for each, with ``took`` in seconds."""
        out = self.base / f"asked{next(_NUMBERS)}.jsonl"
        load = self[at].load(out, burst=count, model=MODEL, tokens=2, **plan)
        await load.start()
        await load.ended()
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return [line | {"took": line["ended"] - line["begun"]} for line in lines]

    async def requests(self, at: str, of: str) -> dict[str, Any]:
        """What a node knows of whether another takes its requests."""
        return dict((await self[at].members())[of]["requests"] or {})

    async def told(self, by: str, seen_at: str | None = None) -> list[str]:
        """The addresses that a node tells, as another has them in its record (by default: as it says itself)."""
        if seen_at is None:
            return list((await self[by].get("/v1/status"))["own"]["told"])
        nodes = (await self[seen_at].get("/v1/view"))["nodes"]
        [static] = [node["static"] for node in nodes if node["name"] == by]
        return [_ip(bytes.fromhex(addr["ip"])) for addr in static["addrs"]]

    async def route(self, at: str, *to: str, within_s: float = 15.0) -> None:
        """Wait until a node places requests on the others."""

        async def complete() -> bool:
            return set(to) <= await self[at].routes_to()

        await until(complete, within_s, f"{at} routes to {to}; {await self[at].sees()}")


def _ip(packed: bytes) -> str:
    from ipaddress import ip_address

    return str(ip_address(packed))


@contextlib.asynccontextmanager
async def hosts(
    name: str,
    *names: str,
    engines: Sequence[str],
    first: Callable[[str, str], None] = lambda _host, _ns: None,
    settings: str = "",
    peers: Callable[[str, Lan], Sequence[str]] = lambda _host, _lan: (),
    ready: bool = True,
) -> AsyncIterator[Hosts]:
    """Paired daemons on one LAN, those of ``engines`` with an engine, each seen by all.

    ``first`` gets host and namespace before the LAN interface is made there, ``settings`` are lines for ``[mesh]``,
    ``peers`` what ``mesh.peers`` is to be. Without ``ready`` nobody waits until all see all.
    """
    _demand()
    with tempfile.TemporaryDirectory(prefix="pmc-") as folder:
        lan = Lan.made(name, ())
        made = Hosts(base=Path(folder), lan=lan)
        try:
            for host in names:
                lan.add(host, first=partial(first, host))
            for host in names:
                node = made.nodes[host] = NodeProc.on(lan, host, made.base)
                node.write_chaos_settings(tuple(peers(host, lan)), more=settings)
                if host in engines:
                    await node.give_engine()
            await started(list(made.nodes.values()))
            await pair_by_file(list(made.nodes.values()))
            if ready:
                for host in names:
                    await made.route(host, *engines)
            yield made
        finally:
            for node in made.nodes.values():
                await node.end()
            lan.close()


def _demand() -> None:
    missing = probe().missing
    if required() & missing.keys():
        pytest.fail(f"needs {missing}")
    if missing:
        pytest.skip("; ".join(f"{name}: {why}" for name, why in missing.items()))
