"""Exit statuses of ``pairmesh``; those above 2 are the ones of ``sysexits.h``."""

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 69
    CONFIG = 78
