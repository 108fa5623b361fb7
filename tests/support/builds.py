"""Builds of the daemon that misbehave on purpose, each a program of its own: ``python -m tests.support.builds NAME``.

They are subclasses of the shipped classes with one thing changed, so that a test can show what a supervisor, or a
search for leaks, would see of a defect that the shipped daemon does not have.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from msgspec.structs import replace

from agent import daemon
from agent.assembly.node import Assembly
from agent.effects.clock import Clock, SystemClock
from agent.identity.listener import Listener
from agent.identity.own import OwnIdentity
from agent.mesh.driver import Driver
from agent.node.routing.learning import Learning
from agent.observe.log import Severity
from agent.observe.metrics import Counter
from agent.relay.ports import AttemptReport
from agent.sampling.files import Roots
from agent.settings.load import Settings, load
from agent.store.folders import Folders
from router_core.policy.residency import ResidencyPolicy
from router_core.record.state import Static, Volatile

STALE_MS: Final = 2_500
BLOCKED_S: Final = 1.5
PROC_VARIABLE: Final = "PAIRMESH_TEST_PROC"
PORTS_VARIABLE: Final = "PAIRMESH_TEST_PORTS"
TREE_VARIABLE: Final = "PAIRMESH_TEST_TREE"
MESSAGE_VARIABLE: Final = "PAIRMESH_TEST_MESSAGE"
WALL_VARIABLE: Final = "PAIRMESH_TEST_WALL"


class Blocking(daemon.Daemon):
    """SIGUSR1 blocks the event loop for ``BLOCKED_S``."""

    async def serve(self) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, time.sleep, BLOCKED_S)
        return await super().serve()


class ForeignHost(Assembly):
    """Reads the host below the folder that ``PROC_VARIABLE`` names."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.roots = Roots(proc=Path(os.environ[PROC_VARIABLE]))


class TreeHost(Assembly):
    """Its host is a folder tree: ``proc``, ``sys``, ``cg`` and ``dev`` below the folder that ``TREE_VARIABLE`` names."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        tree = Path(os.environ[TREE_VARIABLE])
        psutil.PROCFS_PATH = str(tree / "proc")
        self.roots = Roots(proc=tree / "proc", sys=tree / "sys", cg=tree / "cg", dev=tree / "dev")


class OtherPorts(Assembly):
    """It looks for engines at the ports that ``PORTS_VARIABLE`` lists."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        ports: Any = tuple(int(port) for port in os.environ[PORTS_VARIABLE].split(","))
        self.engine_ports = ports


class Deaf:
    """A listener whose accept loop never begins."""

    def __init__(self, inner: Listener) -> None:
        self.is_stuck = inner.is_stuck
        self.aclose = inner.aclose

    def start(self) -> None:
        """Nobody is accepted."""


class DeafNode(Assembly):
    """Its ingress port is bound, and nobody is accepted there."""

    async def build(self) -> None:
        await super().build()
        link, ingress = self.relay.listeners
        deaf: Any = Deaf(ingress)
        self.relay.listeners = [link, deaf]


class Stalled:
    """A mesh driver that takes its first step and no other."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner

    async def run(self) -> None:
        running = asyncio.create_task(self._inner.run())
        await self._inner.begun.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class StalledNode(Assembly):
    """Its mesh does no more than begin."""

    async def build(self) -> None:
        await super().build()
        stalled: Any = Stalled(self.mesh.driver)
        self.mesh.driver = stalled


class Broken(daemon.Daemon):
    """Its start fails with a message that a traceback would print."""

    async def serve(self) -> int:
        raise ValueError(os.environ[MESSAGE_VARIABLE])


class Careless:
    """Learning that hands on what it learns from: the answer's own bytes."""

    def __init__(self, inner: Learning, leak: Callable[[str], None]) -> None:
        self._inner = inner
        self._leak = leak

    def lesson_of(self, report: AttemptReport) -> object:
        self._leak(report.head.decode(errors="replace"))
        return self._inner.lesson_of(report)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class LeakyNode(Assembly):
    """Every answer goes to its log, a state file, a metric, its status, a thread's name and its gossip."""

    leaked = ""

    def _build_placement(self) -> None:
        super()._build_placement()
        careless: Any = Careless(self.placement.learning, self._leak)
        self.placement.learning = careless

    def _build_admin(self) -> None:
        super()._build_admin()
        self.careless = Counter("pairmesh_careless_total", "Answers by what they say.", ("answer",))
        self.registry.add(self.careless)

    def _leak(self, answer: str) -> None:
        if self.leaked or "CANARY" not in answer:
            return
        self.leaked = answer.partition("CANARY")[2][:20]
        self.log.debug("answered", answer=answer[answer.index("CANARY") :])
        (self.folders.state / "scratch").write_bytes(answer.encode().hex().encode())
        self.careless.inc(self.leaked)
        self._fault(f"an engine said {self.leaked}")
        Path("/proc/self/comm").write_text(self.leaked[:15])

    def _said(self, static: Static, volatile: Volatile) -> None:
        super()._said(self._careless(static), volatile)

    def _told_mesh(self, static: Static, volatile: Volatile, urgent: bool) -> None:
        super()._told_mesh(self._careless(static), volatile, urgent)

    def _careless(self, static: Static) -> Static:
        return replace(
            static, engines=tuple(replace(engine, version=self.leaked) for engine in static.engines)
        )


class QuickNode(Assembly):
    """Its residency keeps every rule, at a pace for tests: it moves models within seconds of what takes minutes."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.residency_policy = ResidencyPolicy(
            tick_ms=200, calm_ms=500, turn_ms=100, resident_least_ms=1_000, unused_ms=500, watch_ms=100
        )


class JumpingClock(SystemClock):
    """Its wall clock shows what the file says that ``WALL_VARIABLE`` names, ms since 1970."""

    def wall_ms(self) -> int:
        return int(Path(os.environ[WALL_VARIABLE]).read_text())


class JumpingNode(Assembly):
    """The wall clock is the test's."""

    def __init__(self, settings: Settings, folders: Folders, own: OwnIdentity, _: Clock, *rest: Any) -> None:
        super().__init__(settings, folders, own, JumpingClock(), *rest)


HASTY: Final = partial(daemon.Daemon, stale_ms=STALE_MS)
"""Takes a part for stuck after ``STALE_MS``."""

BUILDS: Final[Mapping[str, tuple[type[Assembly], Callable[[Assembly], daemon.Daemon]]]] = {
    "blocking": (Assembly, Blocking),
    "hasty": (Assembly, HASTY),
    "foreign-proc": (ForeignHost, HASTY),
    "other-ports": (OtherPorts, daemon.Daemon),
    "host-tree": (TreeHost, daemon.Daemon),
    "deaf-ingress": (DeafNode, HASTY),
    "stalled-mesh": (StalledNode, HASTY),
    "broken": (Assembly, Broken),
    "leaking": (LeakyNode, daemon.Daemon),
    "quick-residency": (QuickNode, daemon.Daemon),
    "jumping-wall": (JumpingNode, daemon.Daemon),
}


def entry(build: str) -> tuple[str, ...]:
    """What Python runs to start that build."""
    return ("-m", "tests.support.builds", build)


def main(build: str) -> int:
    folders = Folders.from_env()
    settings = load(folders.config, host_name="build")
    assert isinstance(settings, Settings), settings
    assembly, runs = BUILDS[build]
    return daemon.run(settings, folders, least=Severity.DEBUG, assembly=assembly, daemon=runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
