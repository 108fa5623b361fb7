"""How dialects and capabilities are spelt: in lower case, alike in records, hints, manifests and questions."""

from functools import lru_cache
from typing import Final

from router_core.record.state import Capability, Dialect

DIALECTS: Final = {str(dialect.name).lower(): dialect for dialect in Dialect}
CAPABILITIES: Final = {str(capability.name).lower(): capability for capability in Capability}


@lru_cache(maxsize=64)
def dialect_name(bits: int) -> str:
    """The name of the one dialect in ``bits``, ``unknown`` if it is none of ours."""
    return (Dialect(bits).name or "unknown").lower()


@lru_cache(maxsize=1024)
def capability_names(bits: int) -> tuple[str, ...]:
    """The names of the capabilities in ``bits``; bits that are none of ours are left out."""
    return tuple([name for name, capability in CAPABILITIES.items() if capability & bits])
