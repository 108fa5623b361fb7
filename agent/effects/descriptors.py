"""How many files and sockets this process may have open."""

import errno
import resource
from typing import Final

from router_core import limits

OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that say that there is no room for another one, here or on the whole host."""
NOT_LISTENING: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
"""Errors of ``accept`` that say that the socket is no listening one any more."""


def raise_limit(most: int = limits.OPEN_FILES) -> int:
    """Lift the soft limit of this process as far as its hard limit and ``most`` allow; what it is then.

    A login shell starts with 1,024 and an idle client costs one, so that a browser with many tabs would be enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted
