"""One chaos run: its seed, and the account of what it must not leave behind."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.support.chaos import namespaces


@dataclass(kw_only=True)
class Run:
    """``base`` is short, since unix sockets lie below it."""

    seed: int
    base: Path
    before: dict[int, str] = field(default_factory=namespaces.children)

    def __post_init__(self) -> None:
        namespaces.reap()

    def leftovers(self) -> list[str]:
        """Namespaces, mounts and processes of this run that are still there."""
        mark = namespaces.prefix()
        left = [f"namespace {name}" for name in namespaces.namespaces() if name.startswith(mark)]
        left += [f"mount {folder}" for source, folder in namespaces.mounts() if source.startswith(mark)]
        now = namespaces.children()
        return left + [f"process {pid} {name}" for pid, name in now.items() if pid not in self.before]
