"""The hash of a policy: equal numbers give equal hashes, whatever they were written as.

The canonical text is JSON of all fields in order of their names, every number as a float. A field that is not part of
the comparison of two policies is not part of their hash.
"""

import json
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, Final

from router_core.errors import LocalMisuse

HASH_BYTES: Final = 16


def hash_of(policy: object) -> str:
    """BLAKE2b-128 of the canonical text of a dataclass, in hex. Raises ``LocalMisuse`` on a value without one."""
    return blake2b(canonical(policy).encode(), digest_size=HASH_BYTES).hexdigest()


def canonical(policy: object) -> str:
    """The text that is hashed."""
    return json.dumps(_plain(policy), sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: object) -> object:
    match value:
        case Enum():
            return _plain(value.value)
        case None | bool() | str():
            return value
        case int() | float():
            return float(value)
        case tuple() | list():
            return [_plain(item) for item in value]
        case _ if is_dataclass(value):
            compared: list[Field[Any]] = [known for known in fields(value) if known.compare]
            return {known.name: _plain(getattr(value, known.name)) for known in compared}
        case _:
            raise LocalMisuse(f"a policy cannot hold {type(value).__name__}")
