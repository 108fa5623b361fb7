"""What every room may stand on, built before any of them."""

from dataclasses import dataclass, field
from pathlib import Path

from agent.effects.clock import Clock
from agent.identity.own import OwnIdentity
from agent.observe.capture import report_crash
from agent.observe.log import Log
from agent.settings.load import Settings
from agent.store.folders import Folders
from agent.store.secrets import read_secret


@dataclass(frozen=True, slots=True)
class Ground:
    """What every part of the daemon needs: settings, folders, identity, clock, log, and faults found at
    start."""

    settings: Settings
    folders: Folders
    own: OwnIdentity
    clock: Clock
    log: Log
    faults: list[str] = field(default_factory=list)
    """What was found at start that the operator must see."""

    def failed(self, name: str, exc: BaseException) -> None:
        """A task that nobody waits for ended with ``exc``."""
        report_crash(self.log, "task.failed", exc, task=name)

    def newer(self, path: Path, version: int, aside: Path) -> None:
        """A file of a newer version was set aside."""
        self.log.warning("state.newer", file=path, version=version, kept_as=aside.name)
        self.faults.append(
            f"{path} was written by a newer version of pairmesh (its schema is {version}): it is kept as {aside.name} for "
            "that version, and a new one is used"
        )

    def secret(self, name: str) -> str:
        """The secret that a setting names. Raises ``RefuseToStart``."""
        return read_secret(self.folders.state, name)
