"""What sampling tells people about the process that talks to the driver: log lines and counters.

GPUs are named by the hash of their UUID. Errors that stay are repeated hourly, not every tick.
"""

from collections.abc import Iterable
from typing import Final

from agent.observe.log import Log
from agent.observe.metrics import Counter, Family, Histogram
from agent.sampling.nvml_states import MISMATCH, Absence, ProbeState, StateChanged

REPEAT_MS: Final = 3_600_000
STDERR_LINES: Final = 5
STDERR_CHARS: Final = 200
MINUTE_MS: Final = 60_000
OP_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
CURES: Final = {
    Absence.BINDING: "install nvidia-ml-py >= 12.560.30 and nothing else that provides pynvml",
    Absence.DENIED: "access to the GPUs was denied or revoked: check the device files, recreate the container",
}


class ProbeReport:
    """Also a collector of the probe's counters. ``library`` names the file of the binding in use."""

    def __init__(self, log: Log, library: str) -> None:
        self._log = log
        self._library = library
        self._told: dict[str, int] = {}
        self._lines: tuple[int, int] = (0, 0)
        self.restarts = Counter(
            "pairmesh_probe_restarts_total", "Ends of the process that reads GPUs.", ("cause",)
        )
        self.errors = Counter("pairmesh_nvml_errors_total", "Errors of the GPU driver.", ("code",))
        self.seconds = Histogram(
            "pairmesh_probe_op_seconds", "Time the GPU driver took.", ("op",), OP_SECONDS
        )

    def collect(self) -> Iterable[Family]:
        for part in (self.restarts, self.errors, self.seconds):
            yield from part.collect()

    def changed(self, change: StateChanged, culprit: dict[str, object], now: int) -> None:
        """The process changed its state; ``culprit`` names the call that was at work, if any."""
        code = change.code or None
        known = {name: value for name, value in ({"code": code} | culprit).items() if value is not None}
        match change.state, change.cause:
            case ProbeState.READY, _:
                self._told.clear()
                self._log.info("sampling.probe_ready")
            case ProbeState.HUNG, _:
                self._log.warning("sampling.probe_hung", **known)
            case ProbeState.UNDEAD, _:
                self._log.warning("sampling.probe_undead", **known)
            case ProbeState.BACKOFF, cause if cause is not None:
                self.restarts.inc(cause.value)
                self._absent(cause, change.code, known, now)
            case _:
                pass

    def _absent(self, cause: Absence, code: int, known: dict[str, object], now: int) -> None:
        event = {
            Absence.CRASH: "sampling.probe_crashed",
            Absence.HANG: "sampling.probe_crashed",
            Absence.RECYCLE: "sampling.probe_recycled",
            Absence.BINDING: "sampling.binding_shadowed",
            Absence.DENIED: "sampling.access_revoked",
            Absence.INIT: "sampling.probe_refused",
        }[cause]
        if code == MISMATCH:
            event, known = "sampling.reboot_pending", known | {"cure": "reload the driver or reboot"}
        told = self._told.get(event)
        if cause not in (Absence.CRASH, Absence.HANG) and told is not None and now - told < REPEAT_MS:
            return
        self._told[event] = now
        if cause in CURES:
            known = known | {"cure": CURES[cause]}
        if cause is Absence.BINDING:
            known = known | {"found": self._library}
        severe = cause in CURES or code == MISMATCH
        (self._log.error if severe else self._log.warning)(event, cause=cause.value, **known)

    def lost(self, gpu: str, code: int) -> None:
        self._log.error("sampling.gpu_lost", gpu=gpu, code=code)

    def back(self, gpu: str) -> None:
        self._log.info("sampling.gpu_back", gpu=gpu)

    def protocol_fault(self, problem: str) -> None:
        self._log.warning("sampling.probe_garbled", problem=problem)

    def said(self, line: bytes, now: int) -> None:
        """A line of the process's stderr; a few a minute are kept."""
        since, lines = self._lines
        if now - since >= MINUTE_MS:
            since, lines = now, 0
        self._lines = since, lines + 1
        if lines < STDERR_LINES:
            text = line.decode("utf-8", "replace").strip()[:STDERR_CHARS]
            self._log.warning("sampling.probe_said", line=text)
