"""What every room may stand on, built before any of them."""

from dataclasses import dataclass

from agent.effects.clock import Clock
from agent.identity.own import OwnIdentity
from agent.observe.capture import report_crash
from agent.observe.log import Log
from agent.settings.load import Settings
from agent.store.folders import Folders
from agent.store.secrets import read_secret


@dataclass(frozen=True, slots=True)
class Ground:
    settings: Settings
    folders: Folders
    own: OwnIdentity
    clock: Clock
    log: Log

    def failed(self, name: str, exc: BaseException) -> None:
        """A task that nobody waits for ended with ``exc``."""
        report_crash(self.log, "task.failed", exc, task=name)

    def secret(self, name: str) -> str:
        """The secret that a setting names. Raises ``RefuseToStart``."""
        return read_secret(self.folders.state, name)
