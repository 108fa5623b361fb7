"""One node's process: built, run, and taken down in order. What it is made of is the assembly's business."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from agent import __version__
from agent.assembly.node import Assembly
from agent.effects.clock import SystemClock
from agent.effects.descriptors import raise_limit
from agent.effects.tasks import keep_running
from agent.identity.own import load_identity, read_machine_id
from agent.lifecycle import ExitCode, Notifier, Signals, Step, StepEnded, drain, keep_watchdog
from agent.node.config.ports import refusal
from agent.node.routing.trace import Trace
from agent.observe.capture import captured, report_crash, report_loop
from agent.observe.log import Severity, stream_log
from agent.relay.forwarding.context import review_on_change, watch_lateness
from agent.relay.ports import Phase
from agent.settings.load import Settings
from agent.store.folders import Folders, RefuseToStart, claim
from router_core.record.state import LeaveReason

STREAMS_MS = 12_000
LEAVE_MS = 700
STORE_MS = 1_500
STALE_MS = 20_000
GOODBYE_MS = 500
SUM_UP_S = 10.0
GIVE_UP_S = 2.0
"""How long threads are waited for that a dead disk may keep for ever, once everything else has ended."""
FIRST_LOOK_MS = 500
"""How long the first statement waits for the engines, so that it names their models: the next S is a second away."""


def run(
    settings: Settings,
    folders: Folders,
    *,
    keep_identity: bool = False,
    new_identity: bool = False,
    trace: Path | None = None,
    least: Severity = Severity.INFO,
    assembly: type[Assembly] = Assembly,
    daemon: "Callable[[Assembly], Daemon] | None" = None,
) -> int:
    """Run one node until it is told to stop; the exit status.

    ``trace``: a file for a line per event. ``least``: what is logged; at DEBUG the event loop watches itself too.
    ``assembly`` is what the node is made of, ``daemon`` what runs it, ``Daemon`` if not given.
    """
    clock = SystemClock()
    log, writer = stream_log(sys.stderr, clock, least=least)
    debug = True if least is Severity.DEBUG else None
    with captured(log, least):
        try:
            raise_limit()
            folders.prepare()
            claim(folders.state)
            own = load_identity(folders.state, read_machine_id(), keep=keep_identity, new=new_identity)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop, debug=debug) as runner:
                traced = Trace(trace, clock) if trace is not None else None
                node = assembly(settings, folders, own, clock, log, traced)
                code = runner.run((daemon or Daemon)(node).serve())
                _end_within(GIVE_UP_S, code)
                return code
        except RefuseToStart as refused:
            log.error("start.refused", reason=refused.reason)
            writer.put(f"pairmesh: {refused}")
            return ExitCode.REFUSED
        except Exception as exc:
            report_crash(log, "crash", exc)
            return ExitCode.FAILED
        finally:
            log.flush()
            writer.close()


def _end_within(seconds: float, code: int) -> None:
    """End this process with ``code`` by then, whatever keeps it."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


class Daemon:
    """Runs one assembly. ``serve`` builds what needs a loop, runs it, and ends it.

    A part that made no progress for ``stale_ms`` is left to the supervisor's watchdog.
    """

    def __init__(self, node: Assembly, *, stale_ms: int = STALE_MS) -> None:
        self._node = node
        self._stale_ms = stale_ms

    async def serve(self) -> int:
        """Run until SIGTERM or SIGINT; the exit status. Raises ``RefuseToStart``."""
        report_loop(self._node.log, asyncio.get_running_loop())
        with contextlib.ExitStack() as bound:
            bound.callback(self._node.ports.close)
            signals = Signals(reload=self._node.reload.set)
            bound.enter_context(signals.caught())
            self._node.ports.bind()
            await self._node.build()
            return await self._run(signals)

    async def _run(self, signals: Signals) -> int:
        node, settings = self._node, self._node.settings
        notifier = Notifier.from_env(os.environ, os.getpid())
        await node.admin.listen_socket(node.folders.admin_socket)
        try:
            await node.admin.listen_tcp(settings.admin.hosts[0], settings.admin.port)
        except OSError as fault:
            raise refusal("admin.listen", settings.admin, fault) from None
        node.host.engines.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_MS / 1_000):
                await node.host.engines.looked()
        node.host.speaking.speak()
        for listener in node.relay.listeners:
            listener.start()
        vital = {"mesh": node.mesh.driver.run(), "sampler": node.host.sampler.run()} | {
            f"api {at}": acceptor.run(node.tasks) for at, acceptor in node.relay.acceptors.items()
        }
        optional: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "profiles": node.placement.learning.run,
            "config": node.reloading.run,
            "ingress tick": node.relay.ingress_roll.run,
            "residency": node.host.residency.run,
            "discovery": lambda: node.mesh.discovery.run(node.mesh.announced),
            "addresses": lambda: node.mesh.own.follow(node.moved),
            "review": lambda: review_on_change(node.placement.board, node.relay.wiring),
            "lateness": lambda: watch_lateness(node.relay.wiring),
            "watchdog": lambda: keep_watchdog(notifier, self._parts(), self._stale),
            "log": self._sum_up_log,
        }
        if settings.router:
            optional["probes"] = node.relay.probing.run
        loops = vital | {name: keep_running(name, loop, node.part_failed) for name, loop in optional.items()}
        ending = asyncio.create_task(signals.stop.wait(), name="stop")
        running = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        begun = asyncio.create_task(node.mesh.driver.begun.wait(), name="begun")
        ended, _ = await asyncio.wait([begun, ending, *running], return_when=asyncio.FIRST_COMPLETED)
        if ended == {begun}:
            node.phase = Phase.SERVING
            node.log.info(
                "ready",
                node=node.own.node_id,
                name=settings.name,
                version=__version__,
                **node.ports.shown(),
            )
            notifier.ready(f"serving as {settings.name}")
            ended, _ = await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in ended - {begun, ending}:
            if (exc := task.exception()) is not None:
                report_crash(node.log, "loop.ended", exc, loop=task.get_name())
        notifier.stopping("draining")
        node.log.info("stopping", asked=ending in ended, requests=len(node.relay.wiring.in_hand))
        clean = await self._drain()
        for task in (begun, ending, *running):
            task.cancel()
        await asyncio.gather(begun, ending, *running, return_exceptions=True)
        await node.tasks.aclose()
        node.log.info("stopped", clean=clean)
        return ExitCode.OK if clean and ending in ended else ExitCode.FAILED

    async def _sum_up_log(self) -> None:
        while True:
            await asyncio.sleep(SUM_UP_S)
            self._node.log.sum_up()

    def _parts(self) -> dict[str, Callable[[], bool]]:
        """What has to make progress for this process to be left alive."""
        return {
            "sampler": lambda: self._is_recent(self._node.host.sampler.heartbeat_ms),
            "mesh": lambda: self._is_recent(self._node.mesh.driver.stepped_ms),
            "listeners": self._is_accepting,
        }

    def _is_recent(self, at_ms: int) -> bool:
        return self._node.clock.boot_ms() - at_ms < self._stale_ms

    def _is_accepting(self) -> bool:
        if self._node.phase is Phase.DRAINING:
            return True
        now = self._node.clock.boot_ms()
        api = [acceptor.is_stuck(now, self._stale_ms) for acceptor in self._node.relay.acceptors.values()]
        peers = [listener.is_stuck(now, self._stale_ms) for listener in self._node.relay.listeners]
        return not any(api + peers)

    def _stale(self, names: object) -> None:
        self._node.log.warning("watchdog.stale", parts=names)

    async def _drain(self) -> bool:
        self._node.phase = Phase.DRAINING
        steps = (
            Step(name="streams", run=self._end_requests, within_ms=STREAMS_MS),
            Step(
                name="leave",
                run=partial(self._node.mesh.driver.leave, LeaveReason.SHUTDOWN),
                within_ms=LEAVE_MS,
            ),
            Step(name="store", run=self._store, within_ms=STORE_MS),
        )
        return await drain(steps, self._step_ended)

    async def _end_requests(self) -> None:
        """Nothing new is taken; what waits for room is told so, what streams may end by itself, and is told the truth
        when time is up."""
        self._node.host.speaking.drain()
        for request in tuple(self._node.relay.wiring.in_hand):
            if request.is_held:
                request.shut_down()
        for roll in (self._node.relay.api_roll, self._node.relay.ingress_roll):
            roll.close_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((STREAMS_MS - GOODBYE_MS) / 1_000):
                await self._node.relay.wiring.in_hand.emptied()
        for request in tuple(self._node.relay.wiring.in_hand):
            request.shut_down()

    async def _store(self) -> None:
        for listener in self._node.relay.listeners:
            await listener.aclose()
        self._node.relay.pool.close()
        await self._node.host.engines.aclose()
        await self._node.admin.aclose()
        await self._node.relay.link_server.shutdown(0.1)
        self._node.relay.observing.settle()
        await self._node.placement.learning.save()
        await self._node.journal.aclose()
        self._node.relay.access.flush()

    def _step_ended(self, step: StepEnded) -> None:
        if step.overdue or step.error is not None:
            self._node.log.warning("drain.step", step=step.name, overdue=step.overdue, error=step.error)
