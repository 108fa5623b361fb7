"""What the residency machine remembers of one model: its state, its failures, how much it was used."""

from typing import Final

from msgspec import Struct

from router_core.placement.residency.events import EngineResidency, Model, ModelStage
from router_core.policy.residency import ResidencyPolicy

FOLLOWED: Final = {
    EngineResidency.ABSENT: ModelStage.PRESENT,
    EngineResidency.LOADING: ModelStage.LOADING,
    EngineResidency.RESIDENT: ModelStage.RESIDENT,
    EngineResidency.LEAVING: ModelStage.UNLOADING,
    EngineResidency.FAILED: ModelStage.PRESENT,
}
"""The state of a model that its engine moves by itself."""
GONE: Final = (EngineResidency.ABSENT, EngineResidency.FAILED)
"""Not in memory; an engine that had to be killed to unload may call that a failure."""


class ModelHistory(Struct, kw_only=True):
    """Times are boot ms. ``turn_ms`` is when the model may be loaded if it still should be, ``waits_since_ms`` since when
    its requests wait longer than a load takes."""

    state: ModelStage = ModelStage.PRESENT
    since_ms: int
    held: EngineResidency = EngineResidency.ABSENT
    failures: int = 0
    retry_ms: int = 0
    waits_since_ms: int | None = None
    turn_ms: int | None = None
    started: int
    served: float = 0.0
    asked: float = 0.0

    def enter(self, state: ModelStage, now: int) -> None:
        """Be in ``state`` from now on."""
        self.state, self.since_ms = state, now
        self.turn_ms = self.waits_since_ms = None

    def resume(self, now: int) -> None:
        """Be what the engine says it is."""
        self.enter(FOLLOWED[self.held], now)

    def load_came(self, now: int) -> None:
        """In memory, whoever loaded it: what failed before is forgotten."""
        self.enter(ModelStage.RESIDENT, now)
        self.failures = 0

    def fail(self, policy: ResidencyPolicy, now: int) -> None:
        """Each failure in a row doubles the time until the model is tried again."""
        self.enter(ModelStage.FAILED, now)
        self.retry_ms = now + min(policy.retry_most_ms, policy.retry_ms << min(self.failures, 16))
        self.failures += 1

    def count(self, model: Model, share_ms: int, passed_ms: int) -> None:
        """Add what was served and asked for since the last look; what was before halves every ``share_ms``."""
        fade = 0.5 ** (passed_ms / share_ms)
        self.served = self.served * fade + max(0, model.started - self.started)
        self.asked = self.asked * fade + model.rate * passed_ms / 1000.0
        self.started = model.started

    def follow(self, before: EngineResidency, policy: ResidencyPolicy, now: int) -> None:
        """The engine moves the model by itself: it was ``before``, and is ``held`` now."""
        held = self.held
        if held is EngineResidency.FAILED and before is not EngineResidency.FAILED:
            self.fail(policy, now)
        elif self.state is ModelStage.FAILED and held in GONE:
            if now >= self.retry_ms:
                self.enter(ModelStage.PRESENT, now)
        elif held is EngineResidency.RESIDENT and self.state is not ModelStage.RESIDENT:
            self.load_came(now)
        elif self.state is not FOLLOWED[held]:
            self.resume(now)
