"""The pressure machine: signals in, levels and scores of resources out, and a word when a level changed.

It owns one ``SignalLevel`` per row of its policy and knows no signal by name. It reads no source, keeps no
history beyond its filters and decides nothing about requests.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from router_core.policy.pressure import PressurePolicy
from router_core.pressure.level import Input, SignalLevel, Transition
from router_core.pressure.samples import ResourceState, unsupported
from router_core.record.state import Level, ResourceCode


class SignalsSampled(Struct, frozen=True, kw_only=True):
    """A tick ended with these inputs by signal; a signal without one is not supported here."""

    inputs: Mapping[str, Input]


class PolicyChanged(Struct, frozen=True, kw_only=True):
    """Other rows are in force: levels are kept, holds start anew."""

    policy: PressurePolicy


class Resumed(Struct, frozen=True, kw_only=True):
    """The host was suspended: filters and holds start anew, levels are kept."""


class Notify(Struct, frozen=True, kw_only=True):
    """Tell people that one signal changed its level under ``profile``."""

    transition: Transition
    profile: str


class PublishUrgent(Struct, frozen=True, kw_only=True):
    """The level of a resource changed: tell the mesh now."""


Event = SignalsSampled | PolicyChanged | Resumed
Action = Notify | PublishUrgent


class PressureMachine:
    """``resources`` are the states after the last step, by code; a resource without rows is not among them."""

    def __init__(self, policy: PressurePolicy) -> None:
        self._policy = policy
        self._signals = {row.signal: SignalLevel(row) for row in policy.rows}
        self.resources: tuple[ResourceState, ...] = _resources(self._signals.values())

    @property
    def deadline(self) -> int | None:
        """When a level changes next if the inputs stay as they are; a ``SignalsSampled`` then takes effect."""
        due = [signal.deadline for signal in self._signals.values()]
        return min((at for at in due if at is not None), default=None)

    @property
    def profile(self) -> str:
        return self._policy.profile

    def handle(self, event: Event, now: int) -> list[Action]:
        match event:
            case SignalsSampled():
                return self._step(event.inputs, now)
            case PolicyChanged():
                return self._change(event.policy)
            case Resumed():
                for signal in self._signals.values():
                    signal.resume()
                return []

    def _step(self, inputs: Mapping[str, Input], now: int) -> list[Action]:
        actions: list[Action] = []
        for name, signal in self._signals.items():
            entry = inputs.get(name) or Input(reading=unsupported(now))
            transition = signal.step(entry, now)
            if transition is not None:
                actions.append(Notify(transition=transition, profile=self.profile))
        return actions + self._publish()

    def _change(self, policy: PressurePolicy) -> list[Action]:
        kept = self._signals
        self._policy = policy
        self._signals = {}
        for row in policy.rows:
            signal = kept.get(row.signal)
            if signal is None:
                signal = SignalLevel(row)
            else:
                signal.adopt(row)
            self._signals[row.signal] = signal
        return self._publish()

    def _publish(self) -> list[Action]:
        before, self.resources = self.resources, _resources(self._signals.values())
        same = [(r.code, r.level) for r in before] == [(r.code, r.level) for r in self.resources]
        return [] if same else [PublishUrgent()]


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
