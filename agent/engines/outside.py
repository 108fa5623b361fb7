"""Where the name of a ``cloud`` endpoint may lead: anywhere but home.

A name is looked up at each connect, and the endpoint's key and its requests go wherever it leads then: never to this
host, a neighbour on the link or a member of the mesh. A literal address is the operator's own word and is not judged
here.
"""

from collections.abc import Callable, Container
from ipaddress import IPv4Address, IPv6Address, ip_address

IpAddress = IPv4Address | IPv6Address
Outside = Callable[[IpAddress], bool]
"""True for an address that a name may lead to."""


def is_literal(host: str) -> bool:
    """True if ``host`` is an address, and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_outside(address: IpAddress) -> bool:
    """True unless ``address`` is this host's or only means something on this link."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not (
        address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    )


def beyond(mesh: Callable[[], Container[IpAddress]]) -> Outside:
    """As ``is_outside``, and no address of ``mesh``, which is asked each time."""
    return lambda address: is_outside(address) and address not in mesh()
