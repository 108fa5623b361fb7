"""One node's process: built, run, and taken down in order. What it is made of is the assembly's business."""

import asyncio
import contextlib
import os
import sys
from functools import partial
from pathlib import Path

import uvloop

from agent import __version__
from agent.assembly import Assembly
from agent.effects.clock import SystemClock
from agent.identity.own import load_identity, read_machine_id
from agent.lifecycle import ExitCode, Notifier, Signals, Step, StepEnded, drain, keep_watchdog
from agent.mesh.discovery import announced_addresses
from agent.node.listening import refusal
from agent.node.trace import Trace
from agent.observe.capture import captured, report_crash, report_loop
from agent.observe.log import stream_log
from agent.relay.ports import Phase
from agent.relay.wiring import review_on_change
from agent.settings.load import Settings
from agent.store.folders import Folders, RefuseToStart
from router_core.record.state import LeaveReason

STREAMS_MS = 12_000
LEAVE_MS = 700
STORE_MS = 1_500
HEARTBEAT_STALE_MS = 20_000
GOODBYE_MS = 500


def run(
    settings: Settings,
    folders: Folders,
    *,
    keep_identity: bool = False,
    new_identity: bool = False,
    trace: Path | None = None,
) -> int:
    """Run one node until it is told to stop; the exit status. ``trace``: a file for a line per event."""
    clock = SystemClock()
    log = stream_log(sys.stderr, clock)
    with captured(log):
        try:
            folders.prepare()
            own = load_identity(folders.state, read_machine_id(), keep=keep_identity, new=new_identity)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                traced = Trace(trace, clock) if trace is not None else None
                return runner.run(Daemon(Assembly(settings, folders, own, clock, log, traced)).serve())
        except RefuseToStart as refused:
            log.error("start.refused", reason=refused.reason)
            sys.stderr.write(f"pairmesh: {refused}\n")
            return ExitCode.REFUSED
        finally:
            log.flush()


class Daemon:
    """Runs one assembly. ``serve`` builds what needs a loop, runs it, and ends it."""

    def __init__(self, node: Assembly) -> None:
        self._node = node

    async def serve(self) -> int:
        """Run until SIGTERM or SIGINT; the exit status. Raises ``RefuseToStart``."""
        report_loop(self._node.log, asyncio.get_running_loop())
        with contextlib.ExitStack() as bound:
            bound.callback(self._node.close_sockets)
            self._node.bind()
            await self._node.build()
            with Signals(reload=lambda: self._node.log.info("reload.nothing")).caught() as signals:
                return await self._run(signals)

    async def _run(self, signals: Signals) -> int:
        node, settings = self._node, self._node.settings
        notifier = Notifier.from_env(os.environ, os.getpid())
        node.addresses = await asyncio.to_thread(node.own_addresses)
        await node.admin.listen_socket(node.folders.admin_socket)
        try:
            await node.admin.listen_tcp(settings.admin.hosts[0], settings.admin.port)
        except OSError as fault:
            raise refusal("admin.listen", settings.admin, fault) from None
        node.engines.start()
        node.speaking.speak()
        for listener in node.listeners:
            listener.start()
        loops = {
            "mesh": node.driver.run(),
            "sampler": node.sampler.run(),
            "profiles": node.learning.run(),
            "ingress tick": node.ingress_roll.run(),
            "relay review": review_on_change(node.board, node.wiring),
            "discovery": node.discovery.run(partial(announced_addresses, settings.mesh.listen)),
            "addresses": self._follow_addresses(),
            "review": review_on_change(node.board, node.wiring),
            "watchdog": keep_watchdog(notifier, {"sampler": self._is_sampling}, self._stale),
        } | {f"api {at}": acceptor.run(node.tasks) for at, acceptor in node.acceptors.items()}
        ending = asyncio.create_task(signals.stop.wait(), name="stop")
        running = [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        begun = asyncio.create_task(node.driver.begun.wait(), name="begun")
        ended, _ = await asyncio.wait([begun, ending, *running], return_when=asyncio.FIRST_COMPLETED)
        if ended == {begun}:
            node.phase = Phase.SERVING
            node.log.info(
                "ready",
                node=node.own.node_id,
                name=settings.name,
                version=__version__,
                **node.shown_addresses(),
            )
            notifier.ready(f"serving as {settings.name}")
            ended, _ = await asyncio.wait([ending, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in ended - {begun, ending}:
            if (exc := task.exception()) is not None:
                report_crash(node.log, "loop.ended", exc, loop=task.get_name())
        notifier.stopping("draining")
        clean = await self._drain()
        for task in (begun, ending, *running):
            task.cancel()
        await asyncio.gather(begun, ending, *running, return_exceptions=True)
        await node.tasks.aclose()
        return ExitCode.OK if clean and ending in ended else ExitCode.FAILED

    async def _follow_addresses(self) -> None:
        while True:
            await asyncio.sleep(10.0)
            self._node.addresses = await asyncio.to_thread(self._node.own_addresses)

    def _is_sampling(self) -> bool:
        return self._node.clock.boot_ms() - self._node.sampler.heartbeat_ms < HEARTBEAT_STALE_MS

    def _stale(self, names: object) -> None:
        self._node.log.warning("watchdog.stale", parts=names)

    async def _drain(self) -> bool:
        self._node.phase = Phase.DRAINING
        steps = (
            Step(name="streams", run=self._end_requests, within_ms=STREAMS_MS),
            Step(
                name="leave", run=partial(self._node.driver.leave, LeaveReason.SHUTDOWN), within_ms=LEAVE_MS
            ),
            Step(name="store", run=self._store, within_ms=STORE_MS),
        )
        return await drain(steps, self._step_ended)

    async def _end_requests(self) -> None:
        """Nothing new is taken; what streams may end by itself, and is told the truth when time is up."""
        self._node.speaking.drain()
        for roll in (self._node.api_roll, self._node.ingress_roll):
            roll.close_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout((STREAMS_MS - GOODBYE_MS) / 1_000):
                await self._node.wiring.in_hand.emptied()
        for request in tuple(self._node.wiring.in_hand):
            request.shut_down()

    async def _store(self) -> None:
        for listener in self._node.listeners:
            await listener.aclose()
        self._node.pool.close()
        await self._node.engines.aclose()
        await self._node.admin.aclose()
        await self._node.link_server.shutdown(0.1)
        await self._node.learning.save()
        await self._node.journal.aclose()
        self._node.access.flush()

    def _step_ended(self, step: StepEnded) -> None:
        if step.overdue or step.error is not None:
            self._node.log.warning("drain.step", step=step.name, overdue=step.overdue, error=step.error)
