"""Keys that earlier versions knew. A file that sets one still loads, with a warning by the key's name.

A key whose meaning nobody may lose unnoticed names the one value that still loads; any other is refused.
"""

from dataclasses import dataclass
from typing import Final

ANY_VALUE: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedKey:
    """One key. ``since`` is the first version without it, ``instead`` says what holds now; ``harmless`` is the only
    value that still loads, and any does if it is not given."""

    path: str
    since: str
    instead: str
    harmless: object = ANY_VALUE

    @property
    def problem(self) -> str:
        """What to tell whoever sets it."""
        return f"removed in {self.since}: {self.instead}"

    def loads(self, written: object) -> bool:
        """True if a file that sets the key to ``written`` still loads."""
        return self.harmless is ANY_VALUE or (
            written == self.harmless and type(written) is type(self.harmless)
        )


SETTINGS: Final = (
    RemovedKey(
        path="api.local_token",
        since="0.1.0",
        instead="this version checks no API keys, and only this host reaches the API",
        harmless=False,
    ),
    RemovedKey(
        path="api.tls_cert", since="0.1.0", instead="this version serves no TLS to clients", harmless=""
    ),
    RemovedKey(
        path="api.tls_key", since="0.1.0", instead="this version serves no TLS to clients", harmless=""
    ),
    RemovedKey(
        path="api.engine_admin",
        since="0.1.0",
        instead="ask the engine itself to pull, load or delete models",
        harmless=False,
    ),
)
"""Of ``pairmesh.toml``."""

POLICY: Final[tuple[RemovedKey, ...]] = ()
"""Of ``policy.toml``."""
