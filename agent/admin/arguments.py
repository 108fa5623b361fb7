"""What the verbs share: arguments that are typed and bounded before anything acts, and the trail of what was done."""

from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from agent.admin.ports import VerbRefused

T = TypeVar("T", bound=Struct)


class Audit(Protocol):
    """Keeps the log of changes that an operator made."""

    def audit(self, event: str, **facts: str | int | bool | None) -> None:
        """Keep one line about a change."""


def typed(arguments: dict[str, Any], kind: type[T]) -> T:
    """``arguments`` as ``kind``. Raises ``VerbRefused``."""
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError:
        raise VerbRefused(
            "arguments_malformed", f"takes {' '.join(kind.__struct_fields__) or 'none'}"
        ) from None
