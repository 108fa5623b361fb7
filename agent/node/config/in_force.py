"""What of the config folder is in force, and what waits for a restart.

``pairmesh.toml`` is read at start alone; the policy and the manifests are followed. Whoever asks what is in force is told
what runs, not what the files say by now.
"""

import socket
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from agent.settings.fault import Fault
from agent.settings.load import FLAGS, Settings, load
from agent.settings.policy import PolicyRead
from agent.settings.reading import Written


class Changed(Struct, frozen=True, kw_only=True):
    """A setting that the next start would take on: ``written`` instead of ``in_force``."""

    key: str
    in_force: Written
    written: Written


class InForce:
    """The settings of this process life, and the policy as it was last swapped."""

    def __init__(self, settings: Settings, folder: Path, policy: PolicyRead) -> None:
        self.settings = settings
        self.policy = policy
        self._folder = folder

    def next_start(self) -> Settings | tuple[Fault, ...]:
        """The settings that the next start would take on, or why it would be refused. Reads ``pairmesh.toml``."""
        now = self.settings.written
        flags = {key: each.value for key, each in now.items() if each.source == FLAGS}
        return load(self._folder, host_name=socket.gethostname(), flags=flags)

    def waiting(self) -> tuple[Changed, ...] | tuple[Fault, ...]:
        """What the next start would change, or why it would be refused. Reads ``pairmesh.toml``."""
        found = self.next_start()
        return differences(self.settings.written, found.written) if isinstance(found, Settings) else found


def differences(now: Mapping[str, Written], then: Mapping[str, Written]) -> tuple[Changed, ...]:
    """The keys whose value is another one then."""
    return tuple(
        Changed(key=key, in_force=now[key], written=written)
        for key, written in then.items()
        if now[key].value != written.value
    )
