"""All endpoints of this node: one monitor per manifest, and one per engine found on a loopback port."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any

from agent.effects.clock import Clock
from agent.effects.tasks import Failed, Tasks
from agent.engines.catalogue import LOOPBACK_PORTS
from agent.engines.client import EngineClient
from agent.engines.contract import Credential, EndpointStatus
from agent.engines.detect import Detection, default_manifest
from agent.engines.monitor import NO_WORK, Cadence, Changed, EndpointMonitor, OwnRequests
from agent.engines.outside import Outside, is_outside
from agent.settings.manifest import Manifest
from router_core import limits
from router_core.errors import LocalMisuse
from router_core.record.state import Dialect

DETECT_EVERY_S = 5.0
"""An engine that starts is found within twice this."""
UNKNOWN_MS = 2_000
LOOK_S = 2.0
"""How long a new manifest of an endpoint waits for its first look before it takes over."""
CLOUD = Cadence(busy_ms=15_000, fast_ms=30_000, quiet_ms=60_000, slow_ms=600_000)
"""Somebody else's server is asked no more than is needed to know that it is there."""


KeyedManifest = tuple[Manifest, Credential | None]
Progress = Callable[[str], OwnRequests]


def no_progress(endpoint: str) -> OwnRequests:
    """Nobody knows of any request."""
    return NO_WORK


class EngineWatch:
    """Starts and stops the monitors, and knows the newest status of every endpoint.

    ``changed(status, urgent)`` is called on the event loop for every change.
    ``ports`` empty switches detection off; ``outside`` says where names of ``cloud`` endpoints may lead. At most
    ``limits.ENGINES`` endpoints are watched.
    """

    def __init__(
        self,
        manifests: Iterable[KeyedManifest],
        *,
        clock: Clock,
        rng: Random,
        changed: Changed,
        failed: Failed,
        ports: tuple[int, ...] = LOOPBACK_PORTS,
        cadence: Cadence | None = None,
        outside: Outside = is_outside,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._tasks = Tasks(failed)
        self._ports = ports
        self._cadence = cadence or Cadence()
        self._outside = outside
        self._monitors: dict[str, EndpointMonitor] = {}
        self.progress: Progress = no_progress
        """Asked how own requests at an endpoint get on."""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._unknown_ms = 0
        self._newest = _Newest(self._monitors)
        for manifest, key in manifests:
            if manifest.name in self._monitors:
                raise LocalMisuse(f"two manifests are named {manifest.name!r}")
            if len(self._monitors) == limits.ENGINES:
                raise LocalMisuse(f"more than {limits.ENGINES} endpoints")
            self._monitors[manifest.name] = self._monitor(manifest, key, detected=False)

    def start(self) -> None:
        """Begin to watch. Needs a running event loop."""
        for monitor in self._monitors.values():
            self._running[monitor.status.name] = self._run(monitor)
        if self._ports:
            self._tasks.spawn(self._detect(), "engine detection")

    async def looked(self) -> None:
        """Wait until every endpoint of a manifest was looked at once, whatever that found."""
        for monitor in tuple(self._monitors.values()):
            await monitor.looked.wait()

    async def aclose(self) -> None:
        """Stop watching and close every connection."""
        await self._tasks.aclose()

    async def adopt(self, manifest: Manifest, credential: Credential | None) -> None:
        """Watch the endpoint of ``manifest``. One of the same name stays in its place until the new one was looked at."""
        name = manifest.name
        monitor = self._monitor(manifest, credential, detected=False)
        running = self._run(monitor)
        if name in self._monitors:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await monitor.looked.wait()
        if (before := self._monitors.get(name)) is not None:
            monitor.succeed(before)
            self._running[name].cancel()
        self._monitors[name], self._running[name] = monitor, running
        self._changed(monitor.status, True)

    def drop(self, name: str) -> None:
        """Stop watching an endpoint. What is still reported about it is ignored."""
        monitor = self._monitors.pop(name)
        self._running.pop(name).cancel()
        self._changed(monitor.status, True)

    def endpoints(self) -> Mapping[str, EndpointStatus]:
        """The newest status of every endpoint, by name, at each look."""
        return self._newest

    def report_work(self, endpoint: str, in_flight: int, *, began: bool = False) -> None:
        """Own requests now in the hands of an engine; call it when the number changes or any ``began`` since."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_work(in_flight, began=began)

    def report_sent(self, endpoint: str, model: str, sent_ms: int) -> None:
        """A request for ``model`` was sent to an engine at ``sent_ms``, boot time."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_sent(model, sent_ms)

    def report_heard(self, endpoint: str, model: str, sent_ms: int) -> None:
        """That request has got its first byte, or has ended without one."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_heard(model, sent_ms)

    def report_connect_failed(self, endpoint: str, *, refused: bool = True) -> None:
        """A request could not connect; not ``refused``: it only took too long."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_connect_failed(refused=refused)

    def report_slots(self, endpoint: str, slots: int) -> None:
        """An engine that does not tell was seen to take so many requests at a time."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_slots(slots)

    def look_soon(self, endpoint: str) -> None:
        """An engine was told to change what it holds."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.look_soon()

    def report_denied(self, endpoint: str, model: str, dialect: Dialect) -> None:
        """An engine answered a request as if it did not have the model, or the route."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_denied(model, dialect)

    def look_for_models(self) -> None:
        """Somebody asked for a model that nobody lists: engines that learn of new ones by themselves are asked for their
        lists, at most once in ``UNKNOWN_MS``."""
        now = self._clock.boot_ms()
        if now < self._unknown_ms:
            return
        self._unknown_ms = now + UNKNOWN_MS
        for monitor in self._monitors.values():
            if not monitor.status.manifest.cloud:
                monitor.list_soon()

    def report_auth(self, endpoint: str) -> None:
        """An engine refused a request: maybe for the endpoint's own key."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_auth()

    def report_served(self, endpoint: str, dialect: Dialect) -> None:
        """An engine answered a request in ``dialect`` well."""
        if (monitor := self._monitors.get(endpoint)) is not None:
            monitor.report_served(dialect)

    async def _detect(self) -> None:
        detection = Detection(self._clock)
        while True:
            for found in await detection.detect(self._free_ports()):
                if len(self._monitors) < limits.ENGINES and found.port in self._free_ports():
                    manifest = default_manifest(found, self._monitors)
                    self._monitors[manifest.name] = monitor = self._monitor(manifest, None, detected=True)
                    self._running[manifest.name] = self._run(monitor)
            await asyncio.sleep(DETECT_EVERY_S)

    def _free_ports(self) -> list[int]:
        """The ports to look at: those at which no endpoint of this host is known."""
        manifests = [monitor.status.manifest for monitor in self._monitors.values()]
        taken = {manifest.url.port for manifest in manifests if not manifest.remote_host}
        return [port for port in self._ports if port not in taken]

    def _monitor(
        self, manifest: Manifest, credential: Credential | None, *, detected: bool
    ) -> EndpointMonitor:
        return EndpointMonitor(
            manifest,
            EngineClient(manifest, credential, self._outside),
            clock=self._clock,
            rng=self._rng,
            spawn=self._tasks.spawn,
            changed=self._changed,
            cadence=CLOUD if manifest.cloud else self._cadence,
            credential=credential,
            detected=detected,
            progress=lambda: self.progress(manifest.name),
        )

    def _run(self, monitor: EndpointMonitor) -> asyncio.Task[None]:
        return self._tasks.spawn(monitor.run(), f"endpoint {monitor.status.name}")


class _Newest(Mapping[str, EndpointStatus]):
    """A live view of the monitors: it is looked at several times a request, and costs nothing to have."""

    def __init__(self, monitors: Mapping[str, EndpointMonitor]) -> None:
        self._monitors = monitors

    def __getitem__(self, name: str) -> EndpointStatus:
        return self._monitors[name].status

    def get(self, name: str, default: Any = None) -> Any:
        monitor = self._monitors.get(name)
        return default if monitor is None else monitor.status

    def __contains__(self, name: object) -> bool:
        return name in self._monitors

    def __iter__(self) -> Iterator[str]:
        return iter(self._monitors)

    def __len__(self) -> int:
        return len(self._monitors)
