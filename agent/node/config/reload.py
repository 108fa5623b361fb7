"""The config folder followed while the daemon runs: ``policy.toml`` and the manifests, swapped whole or not at all, and
the credentials that they name.

Files are looked at every ``POLL_S`` and read once they have not changed between two looks, so that a half-written one
is not believed; SIGHUP has them read at once. They are read again when an endpoint has left, as one that was refused
may have room then. A policy that is refused leaves the old one in force; what is wrong stays told until it is mended.
``pairmesh.toml`` is not followed: its settings need a new start, and which wait for one is told, as is a file that
nobody reads, whose name may be misspelt.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agent.node.config.endpoints import OwnEndpoints
from agent.node.config.in_force import InForce, differences
from agent.observe.log import Log
from agent.settings.fault import Fault
from agent.settings.load import FILE, Settings
from agent.settings.manifest import ManifestsRead, read_manifests
from agent.settings.policy import POLICY_FILE, PolicyRead, load_policy
from agent.settings.unread import ENDPOINTS, unread
from agent.store.folders import RefuseToStart
from router_core.policy.placement import PlacementPolicy

POLL_S = 2.0
FAULTS_MOST = 64
"""So many faults are told; each is a line of the log and of the status."""

SECRETS_MOST = 64
"""So many files of the credentials' folder are looked at; the others are read when anything else changes."""

Look = Mapping[str, tuple[int, int, int, int]]
"""By path, what tells one version of a file from the next."""


class Settling:
    """When what is looked at is to be read: once two looks see the same, which was not ``read`` yet, or if asked."""

    def __init__(self) -> None:
        self.read: Look | None = None
        self._last: Look | None = None

    def is_due(self, look: Look, *, asked: bool) -> bool:
        """One more look."""
        due = asked or (look == self._last and look != self.read)
        self._last = look
        return due


class Reloading:
    """``current`` is the policy in force, ``swap`` puts another in its place or raises ``RefuseToStart``, and reads anew
    what the same one names; ``secrets`` is the folder of the credentials; ``in_force`` holds what was read last;
    ``now`` is set to have all files read."""

    def __init__(
        self,
        folder: Path,
        secrets: Path,
        *,
        current: Callable[[], PlacementPolicy],
        swap: Callable[[PlacementPolicy], None],
        endpoints: OwnEndpoints,
        in_force: InForce,
        now: asyncio.Event,
        log: Log,
    ) -> None:
        self._folder = folder
        self._secrets = secrets
        self._current = current
        self._swap = swap
        self._endpoints = endpoints
        self._in_force = in_force
        self._now = now
        self._log = log
        self.faults: tuple[str, ...] = ()
        """What is wrong with the files as they are now."""
        self.waits: tuple[str, ...] = ()
        """Settings of ``pairmesh.toml`` that the next start would change."""
        self._unread: frozenset[str] = frozenset()
        self._removed: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Follow the folder until cancelled."""
        settling = Settling()
        while True:
            asked = self._now.is_set()
            look = await asyncio.to_thread(look_at, self._folder, self._secrets)
            if asked:
                self._now.clear()
            if settling.is_due(look, asked=asked):
                await self._read()
                if asked or settling.read is not None:
                    waits = {"waits_for_restart": self.waits} if self.waits else {}
                    self._log.info(
                        "config.reloaded", policy=self._current().hash, faults=len(self.faults), **waits
                    )
                settling.read = look
            if self._endpoints.sweep() and self.faults:
                settling.read = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._now.wait()

    async def _read(self) -> None:
        policy = await asyncio.to_thread(load_policy, self._folder)
        manifests = await asyncio.to_thread(read_manifests, self._folder / ENDPOINTS)
        faults = self._take_policy(policy) if isinstance(policy, PolicyRead) else _refusals(policy)
        faults += await self._look_at_settings()
        faults += manifest_faults(manifests)
        if manifests.listed:
            faults += await self._endpoints.follow(manifests.manifests)
        self.tell(faults)

    def _take_policy(self, read: PolicyRead) -> list[str]:
        policy, before = read.policy, self._current()
        try:
            self._swap(policy)
        except RefuseToStart as refused:
            return _refusals([refused])
        self._in_force.policy = read
        if policy != before:
            self._log.info("policy.replaced", preset=policy.name, hash=policy.hash)
        return []

    async def _look_at_settings(self) -> list[str]:
        found, stray = await asyncio.to_thread(lambda: (self._in_force.next_start(), unread(self._folder)))
        for each in sorted(set(stray) - self._unread):
            self._log.warning("config.unread", file=each)
        self._unread = frozenset(stray)
        self._warn(found.warnings if isinstance(found, Settings) else ())
        if not isinstance(found, Settings):
            self.waits = ()
            return [f"{each} (a restart would be refused)" for each in found]
        self.waits = tuple(each.key for each in differences(self._in_force.settings.written, found.written))
        return []

    def _warn(self, settings: Iterable[Fault]) -> None:
        """Log each key without effect once, for as long as it stands in a file."""
        found = frozenset(map(str, (*settings, *self._in_force.policy.warnings)))
        for each in sorted(found - self._removed):
            self._log.warning("config.key_removed", warning=each)
        self._removed = found

    def tell(self, faults: Iterable[str]) -> None:
        """Log what is newly wrong; ``faults`` is all there is."""
        found = tuple(dict.fromkeys(faults))
        if len(found) > FAULTS_MOST:
            found = (*found[:FAULTS_MOST], f"and {len(found) - FAULTS_MOST} more: see pairmesh config check")
        for fault in found:
            if fault not in self.faults:
                self._log.error("config.refused", fault=fault)
        if self.faults and not found:
            self._log.info("config.mended")
        self.faults = found


def look_at(folder: Path, secrets: Path) -> Look:
    """The versions of the files that are followed, as far as they can be looked at."""
    found = {}
    for path in (
        folder,
        folder / ENDPOINTS,
        folder / FILE,
        folder / POLICY_FILE,
        *sorted((folder / ENDPOINTS).glob("*.toml")),
        *sorted(secrets.glob("*"))[:SECRETS_MOST],
    ):
        with contextlib.suppress(OSError):
            seen = path.stat()
            found[str(path)] = (seen.st_ino, seen.st_mtime_ns, seen.st_size, seen.st_mode)
    return found


def manifest_faults(read: ManifestsRead) -> list[str]:
    """The faults of the manifests, each with the folder in front."""
    return [f"{ENDPOINTS}/{fault}" for fault in read.faults]


def _refusals(faults: Iterable[object]) -> list[str]:
    return [f"{fault} (the policy before it stays in force)" for fault in faults]
