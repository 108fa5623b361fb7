"""Whether what listens for links and what listens for requests can be told to others as one address.

A node is dialled for both at the same addresses, at two ports.
"""

from collections.abc import Iterator
from typing import Final

from agent.settings.values import Listen

LOWEST_PORT: Final = 1_024


def disagreements(mesh: Listen, ingress: Listen) -> Iterator[tuple[str, str]]:
    """Key and problem of everything that would let links stand and requests fail, or neither."""
    for key, listen in (("mesh.listen", mesh), ("ingress.listen", ingress)):
        if 0 < listen.port < LOWEST_PORT:
            yield key, f"members dial no port below {LOWEST_PORT}, as {listen} is: take a higher one"
    if not _meet(mesh, ingress):
        yield (
            "ingress.listen",
            f"{ingress} is reached at no address of mesh.listen, {mesh}: links would stand and requests fail; "
            "give both the same address, or none",
        )
    elif mesh.port and mesh.port == ingress.port:
        yield "ingress.listen", f"{ingress} has the port of mesh.listen: give it another one"


def _meet(one: Listen, other: Listen) -> bool:
    """True if there may be an address that leads to both."""
    if one.ip is None or other.ip is None:
        return True
    if one.ip.is_unspecified or other.ip.is_unspecified:
        return one.ip.version == other.ip.version
    return one.ip == other.ip
