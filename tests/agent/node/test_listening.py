"""Ports are taken whole or not at all, and a refusal says what to do."""

import errno
import socket
from ipaddress import ip_address

import pytest

from agent.node.config.ports import bind_all, refusal, shown
from agent.settings.values import Listen
from agent.store.folders import RefuseToStart

LOOPBACK = Listen(ip=ip_address("127.0.0.1"), port=0)


def test_a_bound_port_is_shown_as_it_can_be_dialled() -> None:
    (sock,) = bind_all("api.listen", LOOPBACK)
    with sock:
        assert shown(sock) == f"127.0.0.1:{sock.getsockname()[1]}"


def test_all_addresses_share_one_port() -> None:
    socks = bind_all("mesh.listen", Listen(ip=None, port=0))
    assert len({sock.getsockname()[1] for sock in socks}) == 1
    assert [sock.family for sock in socks] in ([socket.AF_INET], [socket.AF_INET, socket.AF_INET6])
    for sock in socks:
        assert shown(sock).startswith("[::]:" if sock.family == socket.AF_INET6 else "0.0.0.0:")
        sock.close()


def test_a_taken_port_is_refused_with_the_key_to_change() -> None:
    (sock,) = bind_all("api.listen", LOOPBACK)
    taken = Listen(ip=ip_address("127.0.0.1"), port=sock.getsockname()[1])
    with sock, pytest.raises(RefuseToStart) as refused:
        bind_all("api.listen", taken)
    assert refused.value.reason == "port_in_use"
    assert str(taken) in str(refused.value)
    assert "set another api.listen" in str(refused.value)


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(RefuseToStart) as refused:
        bind_all("mesh.listen", Listen(ip=ip_address("192.0.2.1"), port=0))
    assert refused.value.reason == "address_not_here"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EACCES, "port_forbidden"),
        (errno.EADDRINUSE, "port_in_use"),
        (errno.EMFILE, "cannot_listen"),
        (None, "cannot_listen"),
    ],
)
def test_every_fault_has_words(number: int | None, reason: str) -> None:
    fault = OSError(number, "said") if number is not None else OSError("said")
    told = refusal("admin.listen", Listen(ip=ip_address("::1"), port=7_435), fault)
    assert told.reason == reason
    assert "[::1]:7435" in str(told)
    assert "admin.listen" in str(told)
