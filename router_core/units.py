"""Units as types. A name's suffix and its type say the same: ``_ms`` is a ``Ms``, ``_mib`` a ``Mib``."""

from typing import NewType

BootMs = NewType("BootMs", int)
"""Milliseconds of the suspend-inclusive monotonic clock of one host. The only clock the core knows."""

Ms = NewType("Ms", int)
"""A duration in milliseconds."""

Ds = NewType("Ds", int)
"""A duration in tenths of a second, the wire's unit for ages and short waits."""

Mib = NewType("Mib", int)
"""Mebibytes, rounded down."""

Percent = NewType("Percent", int)
"""0..100."""

Hundredths = NewType("Hundredths", int)
"""0..100, read as 0..1."""
