"""The pressure machine: signals in, levels and scores of resources out, and a word when a level changed.

It owns one ``SignalLevel`` per row of its policy, for rows about GPUs one per GPU, and knows no signal by name. A
resource of GPUs is as pressed as the least pressed GPU that can take work. It reads no source, keeps no history
beyond its filters and decides nothing about requests.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from router_core.policy.pressure import PressurePolicy, SignalRow
from router_core.pressure.level import Input, Pressed, SignalLevel, Transition
from router_core.pressure.samples import ResourceState, unsupported
from router_core.record.state import Level, ResourceCode


class GpuSignals(Struct, frozen=True, kw_only=True):
    """The inputs of one GPU by signal; whether it can take work; whether its memory is the host's."""

    inputs: Mapping[str, Input]
    usable: bool = True
    unified: bool = False


class SignalsSampled(Struct, frozen=True, kw_only=True):
    """A tick ended with these inputs by signal, and with these GPUs by key; a signal without an input is not
    supported here, a GPU not listed is gone."""

    inputs: Mapping[str, Input]
    gpus: Mapping[str, GpuSignals] = field(default_factory=dict)


class GpuPressure(Struct, frozen=True, gc=False, kw_only=True):
    """One GPU's resources, its level and its greatest score; None while none is known."""

    resources: tuple[ResourceState, ...]
    level: Level | None
    score: float | None


class PolicyChanged(Struct, frozen=True, kw_only=True):
    """Other rows are in force: levels are kept, holds start anew."""

    policy: PressurePolicy


class HostResumed(Struct, frozen=True, kw_only=True):
    """The host was suspended: filters and holds start anew, levels are kept."""


class NotifyLevel(Struct, frozen=True, kw_only=True):
    """Tell people that one signal changed its level under ``profile``."""

    transition: Transition
    profile: str


class PublishUrgent(Struct, frozen=True, kw_only=True):
    """The level of a resource changed: tell the mesh now."""


Event = SignalsSampled | PolicyChanged | HostResumed
Action = NotifyLevel | PublishUrgent


_NO_GPUS: Final[Mapping[str, GpuSignals]] = {}


class PressureMachine:
    """``resources`` are the states after the last step, by code; a resource without rows, or of GPUs where there is
    none, is not among them. ``gpus`` are the states of the GPUs by key."""

    def __init__(self, policy: PressurePolicy) -> None:
        self._policy = policy
        self._signals = {row.signal: SignalLevel(row) for row in policy.rows if not row.per_gpu}
        self._gpu_signals: dict[str, dict[str, SignalLevel]] = {}
        self._listed: Mapping[str, GpuSignals] = _NO_GPUS
        self.resources: tuple[ResourceState, ...] = _resources(self._signals.values())
        self.gpus: dict[str, GpuPressure] = {}

    @property
    def deadline(self) -> int | None:
        """When a level changes next if the inputs stay as they are; a ``SignalsSampled`` then takes effect."""
        due = [signal.deadline for signal in self._every()]
        return min((at for at in due if at is not None), default=None)

    @property
    def profile(self) -> str:
        return self._policy.profile

    def pressed(self, least: Level = Level.HIGH) -> tuple[Pressed, ...]:
        """The signals that hold a resource at ``least`` or above now."""
        return tuple(found for signal in self._every() if (found := signal.pressed(least)) is not None)

    def handle(self, event: Event, now: int) -> list[Action]:
        match event:
            case SignalsSampled():
                return self._step(event, now)
            case PolicyChanged():
                return self._change(event.policy)
            case HostResumed():
                for signal in self._every():
                    signal.resume()
                return []

    def _every(self) -> Iterable[SignalLevel]:
        yield from self._signals.values()
        for signals in self._gpu_signals.values():
            yield from signals.values()

    def _step(self, event: SignalsSampled, now: int) -> list[Action]:
        kept = self._gpu_signals
        self._listed = event.gpus
        self._gpu_signals = {key: kept.get(key) or self._rows_of(key) for key in event.gpus}
        actions = self._feed(self._signals, event.inputs, now)
        for key, gpu in event.gpus.items():
            actions += self._feed(self._gpu_signals[key], gpu.inputs, now)
        return actions + self._publish()

    def _rows_of(self, gpu: str) -> dict[str, SignalLevel]:
        return {row.signal: SignalLevel(row, gpu) for row in self._policy.rows if row.per_gpu}

    def _feed(
        self, signals: Mapping[str, SignalLevel], inputs: Mapping[str, Input], now: int
    ) -> list[Action]:
        actions: list[Action] = []
        for name, signal in signals.items():
            entry = inputs.get(name) or Input(reading=unsupported(now))
            transition = signal.step(entry, now)
            if transition is not None:
                actions.append(NotifyLevel(transition=transition, profile=self.profile))
        return actions

    def _change(self, policy: PressurePolicy) -> list[Action]:
        self._policy = policy
        self._signals = _adopted(self._signals, [row for row in policy.rows if not row.per_gpu], None)
        rows = [row for row in policy.rows if row.per_gpu]
        self._gpu_signals = {key: _adopted(kept, rows, key) for key, kept in self._gpu_signals.items()}
        return self._publish()

    def _publish(self) -> list[Action]:
        before = self.resources, self.gpus
        host = _resources(self._signals.values())
        memory = next((state for state in host if state.code is ResourceCode.MEMORY), None)
        self.gpus = {
            key: _gpu_pressure(signals.values(), memory if self._listed[key].unified else None)
            for key, signals in self._gpu_signals.items()
        }
        node = _of_all_gpus([(self._listed[key].usable, gpu) for key, gpu in self.gpus.items()])
        self.resources = tuple(sorted((*host, *node), key=lambda state: state.code))
        return [] if _levels(*before) == _levels(self.resources, self.gpus) else [PublishUrgent()]


def _adopted(
    kept: Mapping[str, SignalLevel], rows: Iterable[SignalRow], gpu: str | None
) -> dict[str, SignalLevel]:
    """The signals of ``rows``: those that were there go on under their new numbers."""
    adopted: dict[str, SignalLevel] = {}
    for row in rows:
        signal = kept.get(row.signal)
        if signal is None:
            signal = SignalLevel(row, gpu)
        else:
            signal.adopt(row)
        adopted[row.signal] = signal
    return adopted


def _levels(resources: tuple[ResourceState, ...], gpus: Mapping[str, GpuPressure]) -> object:
    return [(r.code, r.level) for r in resources], {key: gpu.level for key, gpu in gpus.items()}


def _gpu_pressure(signals: Iterable[SignalLevel], memory: ResourceState | None) -> GpuPressure:
    """The levels of one GPU; where its memory is the host's, the level of that is its own."""
    resources = _resources(signals)
    if memory is not None:
        others = [state for state in resources if state.code is not ResourceCode.VRAM]
        resources = (*others, replace(memory, code=ResourceCode.VRAM))
    return GpuPressure(
        resources=resources,
        level=max((state.level for state in resources if state.level is not None), default=None),
        score=max((state.score for state in resources if state.score is not None), default=None),
    )


def _of_all_gpus(gpus: Iterable[tuple[bool, GpuPressure]]) -> list[ResourceState]:
    """Each resource as the least pressed usable GPU has it; where none is usable, as the others still hold it."""
    grouped: dict[ResourceCode, list[tuple[bool, ResourceState]]] = {}
    for usable, gpu in gpus:
        for state in gpu.resources:
            grouped.setdefault(state.code, []).append((usable, state))
    return [_least_pressed(states) for states in grouped.values()]


def _least_pressed(states: list[tuple[bool, ResourceState]]) -> ResourceState:
    candidates = [state for usable, state in states if usable] or [state for _, state in states]
    known = [
        (state.level, state.score or 0.0, -state.taken_ms, state)
        for state in candidates
        if state.level is not None
    ]
    if known:
        return min(known, key=lambda entry: entry[:3])[3]
    return max(candidates, key=lambda state: state.taken_ms)


def _resources(signals: Iterable[SignalLevel]) -> tuple[ResourceState, ...]:
    grouped: dict[ResourceCode, list[SignalLevel]] = {}
    for signal in signals:
        grouped.setdefault(ResourceCode[signal.row.resource.upper()], []).append(signal)
    return tuple(_resource(code, grouped[code]) for code in sorted(grouped))


def _resource(code: ResourceCode, signals: list[SignalLevel]) -> ResourceState:
    """Level and score are the maxima over known signals; a signal whose gate is shut counts as NONE and 0."""
    known = [
        (
            signal.level if signal.counts else Level.NONE,
            (signal.score or 0.0) if signal.counts else 0.0,
            signal.taken_ms,
        )
        for signal in signals
        if signal.level is not None
    ]
    if not known:
        newest = max(signal.taken_ms for signal in signals)
        return ResourceState(code=code, level=None, score=None, taken_ms=newest)
    level, _, taken_ms = max(known)
    return ResourceState(code=code, level=level, score=max(score for _, score, _ in known), taken_ms=taken_ms)
