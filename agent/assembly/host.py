"""The rooms of this host: its engines, its load, the models it holds, and what is said of them."""

import os
from collections.abc import Callable, Sequence
from functools import partial

from agent import __version__
from agent.admin.documents import HostDoc
from agent.assembly.ground import Ground
from agent.assembly.placement import PlacementRooms
from agent.effects.entropy import new_rng
from agent.effects.tasks import Tasks
from agent.engines.contract import EndpointStatus
from agent.engines.outside import Outside
from agent.engines.watch import EngineWatch, KeyedManifest
from agent.node.config.drains import Drains
from agent.node.state.concurrency import OwnLimits
from agent.node.state.loads import SeenLoads
from agent.node.state.own_work import own_work
from agent.node.state.publication import Listeners, Sources, Speaking
from agent.node.status.engine_log import EngineLog
from agent.node.status.host import host_doc
from agent.observe.instruments import LoadMetrics
from agent.residency import ModelResidency
from agent.residency import ResidencyListeners as ResidencyListeners
from agent.residency import ResidencySources as ResidencySources
from agent.sampling.files import Roots
from agent.sampling.loop import OwnWork, Sampler, SamplerPorts
from agent.sampling.nvml import NvmlClient, binding_file
from agent.sampling.nvml_report import ProbeReport
from agent.sampling.reader import HostReader
from agent.sampling.report import SamplingReport
from router_core.policy.residency import ResidencyPolicy
from router_core.pressure.samples import Sampled
from router_core.pressure.wire import load_memory_mib, node_level
from router_core.record.state import Address, Level, Static, Volatile


class HostRooms:
    """``engine_ports`` are tried where engines are to be found; ``cut_off`` ends what is in flight at an endpoint by name; ``said`` and ``told_mesh`` hear each new statement."""

    def __init__(
        self,
        ground: Ground,
        placement: PlacementRooms,
        tasks: Tasks,
        manifests: Sequence[KeyedManifest],
        *,
        outside: Outside,
        roots: Roots,
        engine_ports: tuple[int, ...],
        residency_policy: ResidencyPolicy,
        addresses: Callable[[], tuple[Address, ...]],
        cut_off: Callable[[str], None],
        said: Callable[[Static, Volatile], None],
        told_mesh: Callable[[Static, Volatile, bool], None],
    ) -> None:
        settings, clock, log = ground.settings, ground.clock, ground.log
        self._clock = clock
        self._work = work = placement.work
        learning, router = placement.learning, placement.router
        self.engines = EngineWatch(
            manifests,
            clock=clock,
            rng=new_rng(),
            changed=self._engine_changed,
            failed=ground.failed,
            ports=engine_ports if settings.autodetect else (),
            outside=outside,
        )
        self.drains = Drains(
            endpoints=self.engines.endpoints,
            in_flight=work.in_flight,
            cut=cut_off,
            changed=lambda: self.speaking.speak(),
            clock=clock,
        )
        self.speaking = Speaking(
            Sources(
                endpoints=self.engines.endpoints,
                addresses=addresses,
                dispatch=lambda: router.dispatch.row(clock.boot_ms()),
                claims=partial(learning.claims, ground.own.id16),
                used=learning.used,
                demand=lambda: router.demand.rows(clock.boot_ms()),
                leaving=router.leaving,
                reserved_mib=lambda: self.residency.reserved_mib,
                drains=self.drains,
            ),
            Listeners(view=said, mesh=told_mesh, work=self._report_work),
            work,
            clock,
            version=__version__,
            router=settings.router,
        )
        self.limits = OwnLimits(self.engines.endpoints, self.engines.report_slots, clock)
        work.changed = self._work_changed
        self.sampling_report = SamplingReport(log, clock.boot_ms)
        binding = binding_file()
        self.probe_report = ProbeReport(log, binding)
        self.nvml = self._gpus(ground, binding)
        self.sampler = Sampler(
            settings.sampling,
            clock,
            SamplerPorts(
                read=HostReader(
                    roots, clock.boot_ms, library_path=os.environ.get("LD_LIBRARY_PATH", "")
                ).read,
                work=self._own_work,
                on_sampled=self._sampled,
                on_notify=self.sampling_report.notify,
                on_failed=self.sampling_report.failed,
            ),
            gpus=self.nvml,
        )
        self.load_metrics = LoadMetrics()
        self.residency = ModelResidency(
            self.engines,
            ResidencySources(
                fleet=placement.fleet,
                free_mib=lambda: load_memory_mib(self.sampler.latest, clock.boot_ms()),
                level=self._level,
                used=learning.used,
            ),
            ResidencyListeners(changed=self.speaking.models_moved, loaded=learning.loaded),
            leave=router.leave,
            clock=clock,
            rng=new_rng(),
            tasks=tasks,
            log=log,
            metrics=self.load_metrics,
            policy=residency_policy,
        )
        self._engine_log = EngineLog(log, self.engines.endpoints)
        self._loads = SeenLoads(
            self.load_metrics,
            endpoints=self.engines.endpoints,
            ordered=self.residency.loads,
            clock=clock,
        )

    def measured(self) -> HostDoc:
        """This host for people, as it was measured last."""
        return host_doc(self.sampler, self.nvml)

    def _gpus(self, ground: Ground, binding: str) -> NvmlClient | None:
        if ground.settings.sampling.nvml == "off":
            return None
        return NvmlClient(
            clock=ground.clock,
            rng=new_rng(),
            folder=ground.folders.runtime,
            environ=os.environ,
            binding=binding,
            report=self.probe_report,
            failed=ground.failed,
        )

    def _engine_changed(self, status: EndpointStatus, urgent: bool) -> None:
        self._loads.engine_changed(status)
        self._engine_log.engine_changed(status)
        self.speaking.engine_changed(status, urgent)
        if urgent:
            self.residency.noticed()

    def _sampled(self, sampled: Sampled, urgent: bool) -> None:
        self.speaking.sampled(sampled, urgent)
        self.residency.sampled(urgent)

    def _work_changed(self, endpoint: str) -> None:
        self.limits.work_changed(endpoint, self._work.in_flight(endpoint))
        self.speaking.work_changed(endpoint)
        self.sampler.worked()

    def _report_work(self, endpoint: str, in_flight: int, began: bool) -> None:
        if endpoint in self.engines.endpoints():
            self.engines.report_work(endpoint, in_flight, began=began)

    def _level(self) -> Level | None:
        sampled = self.sampler.latest
        return node_level(sampled, self._clock.boot_ms()) if sampled is not None else None

    def _own_work(self) -> OwnWork:
        local = [each for each in self.engines.endpoints().values() if not each.manifest.remote_host]
        up = [status for status in local if status.health.takes_requests]
        return own_work(up, self._work.in_flight, ordering=self.residency.ordering)
