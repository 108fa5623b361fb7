"""Daemons on one LAN, paired by file, each with a fake engine; and the invariants over all they leave behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos import invariants
from tests.support.chaos.lan import Lan
from tests.support.chaos.load import CANARY, Load
from tests.support.chaos.node import NodeProc, Usage, pair_by_file, started
from tests.support.chaos.waiting import until

FULL_VIEW_S = 10.0
QUIESCE_S = 10.0
LEAK_S = 12.0
WARM_TOKENS = 4


@dataclass(kw_only=True)
class Mesh:
    """``mesh["a"]`` is a node. ``loads`` are all that ever ran; ``usage`` what each process held when idle."""

    base: Path
    lan: Lan
    nodes: dict[str, NodeProc]
    loads: list[Load] = field(default_factory=list)
    usage: dict[int, tuple[NodeProc, Usage]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> NodeProc:
        return self.nodes[name]

    def load(self, on: str, **plan: Any) -> Load:
        """A load on a node's API, not yet started."""
        name = f"load{len(self.loads)}-{on}"
        load = self.nodes[on].load(self.base / f"{name}.jsonl", name=name, **plan)
        self.loads.append(load)
        return load

    @contextlib.asynccontextmanager
    async def loaded(self, on: str, **plan: Any) -> AsyncIterator[Load]:
        """A steady load while the block runs; every request has ended after it."""
        load = self.load(on, **plan)
        await load.start()
        try:
            yield load
            await load.stop()
        finally:
            await load.kill()

    async def burst(self, on: str, count: int, **plan: Any) -> list[dict[str, Any]]:
        """``count`` requests at once; their lines when all have ended."""
        load = self.load(on, burst=count, **plan)
        await load.start()
        await load.ended()
        return lines_of(load)

    async def form(self) -> None:
        """Start every node, pair them, and wait until all see all."""
        await started(list(self.nodes.values()))
        await pair_by_file(list(self.nodes.values()))
        await self.full_view()

    async def full_view(self, names: Sequence[str] | None = None, within_s: float = FULL_VIEW_S) -> None:
        """Wait until each of ``names`` (all) routes to each of them."""
        wanted = set(names or self.nodes)
        for name in sorted(wanted):
            node = self.nodes[name]

            async def complete(node: NodeProc = node) -> bool:
                return wanted <= await node.routes_to()

            try:
                await until(complete, within_s, f"{name} routes to {sorted(wanted)}")
            except AssertionError as late:
                raise AssertionError(f"{late}; {await self.picture()}") from None

    async def quiesce(self) -> None:
        """Heal every fault and wait until nothing is in flight and all see all, for ``QUIESCE_S`` at most."""
        self.lan.heal()
        await self.quiet()

    async def quiet(self) -> None:
        """Wait until nothing is in flight and all see all, whatever faults there are."""
        await self.full_view(within_s=QUIESCE_S)

        async def idle() -> bool:
            statuses = await asyncio.gather(*(node.members() for node in self.nodes.values()))
            ours = [e["ours"] for seen in statuses for m in seen.values() for e in m["engines"]]
            return not any(ours) and not invariants.members_agree(await self.views())

        await until(idle, QUIESCE_S, "nothing is in flight and all agree")

    async def picture(self) -> str:
        """What each node says of each, a line per pair, for people."""
        lines = []
        for name, node in self.nodes.items():
            for seen in (await node.members()).values():
                facts = {
                    key: seen[key] for key in ("liveness", "routable", "flags", "age_ms", "epoch", "link")
                }
                lines.append(f"{name} of {seen['name']}: {facts}")
        return "\n".join(lines)

    async def views(self) -> dict[str, dict[str, str]]:
        return {name: await node.sees() for name, node in self.nodes.items()}

    async def note_usage(self) -> None:
        """Keep what every process holds now, once per process."""
        for node in self.nodes.values():
            if node.pid not in self.usage:
                self.usage[node.pid] = (node, node.usage())

    async def violations(self) -> list[str]:
        """All invariants over all artefacts so far. Call it when the mesh is quiet."""
        found: list[str] = []
        for name, node in self.nodes.items():
            trace = invariants.parse(node.trace.read_text())
            checks = (
                invariants.sent_only_where_allowed,
                invariants.stamps_only_rise,
                invariants.reservations_end,
            )
            found += [f"{name}: {text}" for check in checks for text in check(trace)]
            decisions = await node.get("/v1/decisions?limit=1000")
            found += [f"{name}: {t}" for t in invariants.decisions_explain_themselves(told(decisions))]
            found += [f"{name}: {t}" for t in invariants.decisions_replay(told(decisions))]
            found += [f"{name}: {t}" for t in invariants.no_content(await self.sinks(node), CANARY)]
        sent = [line for load in self.loads for line in lines_of(load)]
        found += invariants.one_request_one_end(sent, self.executions())
        found += invariants.members_agree(await self.views())
        return found + await self.leaks()

    async def leaks(self) -> list[str]:
        """What the processes that were noted hold beyond that, ``LEAK_S`` after at most."""

        def found() -> list[str]:
            return [
                f"{node.name}: {text}"
                for pid, (node, before) in self.usage.items()
                if node.process is not None and node.process.returncode is None and node.pid == pid
                for text in invariants.nothing_leaks(before, node.usage())
            ]

        async def clean() -> bool:
            return not found()

        with contextlib.suppress(AssertionError):
            await until(clean, LEAK_S, "nothing leaks")
        return found()

    def executions(self) -> list[dict[str, Any]]:
        """What the fake engines executed."""
        files = [n.engine.executions for n in self.nodes.values() if n.engine is not None]
        return [line for file in files if file.exists() for line in invariants.parse(file.read_text())]

    async def sinks(self, node: NodeProc) -> dict[str, bytes]:
        """Everything the node keeps or tells."""
        kept = [node.log, node.trace, *(path for path in node.state.rglob("*") if path.is_file())]
        found = {str(path): path.read_bytes() for path in kept if path.exists()}
        for path in ("/metrics", "/v1/status", "/v1/view", "/v1/decisions?limit=1000"):
            found[path] = await node.raw(path)
        return found

    async def close(self) -> None:
        """End everything, whatever state it is in."""
        for load in self.loads:
            await load.kill()
        for node in self.nodes.values():
            await node.end()
        self.lan.close()


def lines_of(load: Load) -> list[dict[str, Any]]:
    """What became of a load's requests so far."""
    out = Path(load.plan.out)
    return invariants.parse(out.read_text()) if out.exists() else []


def told(document: Any) -> list[dict[str, Any]]:
    """The records in the admin API's list of decisions."""
    return list(document["decisions"] if isinstance(document, dict) else document)


@contextlib.asynccontextmanager
async def meshed(
    under: Path,
    name: str,
    hosts: Sequence[str],
    *,
    static: bool = False,
    multicast: bool = True,
    slots: int = 8,
    first_byte_ms: int = 0,
) -> AsyncIterator[Mesh]:
    """A mesh that is READY, paired and warm, in the new folder ``under / name``.

    ``static``: nodes know each other's addresses from their settings.
    """
    base = under / name
    base.mkdir()
    mesh = Mesh(base=base, lan=Lan.made(name, hosts), nodes={})
    try:
        if not multicast:
            mesh.lan.no_multicast()
        for host in hosts:
            node = mesh.nodes[host] = NodeProc.on(mesh.lan, host, base)
            node.mount()
            peers = (
                tuple(f"@{other}={mesh.lan.ip(other)}" for other in hosts if other != host) if static else ()
            )
            node.write_chaos_settings(peers)
            await node.give_engine(slots=slots, first_byte_ms=first_byte_ms)
        await mesh.form()
        yield mesh
    finally:
        await mesh.close()
