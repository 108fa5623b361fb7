"""Exit statuses of ``pairmesh``; those above 2 are the ones of ``sysexits.h``."""

from enum import IntEnum


class Exit(IntEnum):
    """The exit statuses of ``pairmesh``."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    CONFIG = 78
