"""An accept loop is stuck when the kernel has connections for it and it takes no turn; never when it is idle."""

import socket
from collections.abc import Iterator

import pytest

from agent.effects.turns import Turns
from agent.identity.listener import bind


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as sock:
        yield sock


def knock(listening: socket.socket) -> socket.socket:
    """A connection that waits to be accepted; TCP has it in the queue when this returns."""
    return socket.create_connection(listening.getsockname(), timeout=5)


def test_a_loop_that_nobody_wants_anything_of_is_not_stuck(listening: socket.socket) -> None:
    turns = Turns(listening)
    assert not turns.is_stuck(0, 100)
    assert not turns.is_stuck(1_000_000, 100)


def test_a_connection_that_waits_for_the_whole_time_proves_it(listening: socket.socket) -> None:
    turns = Turns(listening)
    with knock(listening):
        assert not turns.is_stuck(5_000, 100), "it may have come this very moment"
        assert not turns.is_stuck(5_099, 100)
        assert turns.is_stuck(5_100, 100)


def test_a_turn_begins_the_time_anew(listening: socket.socket) -> None:
    turns = Turns(listening)
    with knock(listening):
        turns.is_stuck(0, 100)
        turns.turn()
        assert not turns.is_stuck(100, 100)
        assert turns.is_stuck(200, 100)


def test_a_loop_at_its_cap_is_not_suspected_until_it_turns_again(listening: socket.socket) -> None:
    turns = Turns(listening)
    with knock(listening):
        turns.hold()
        assert not turns.is_stuck(0, 100)
        assert not turns.is_stuck(1_000, 100)
        turns.turn()
        assert not turns.is_stuck(2_000, 100)
        assert turns.is_stuck(2_100, 100)


def test_a_queue_that_was_emptied_between_two_looks_clears_the_suspicion(listening: socket.socket) -> None:
    turns = Turns(listening)
    with knock(listening):
        turns.is_stuck(0, 100)
        listening.accept()[0].close()
    assert not turns.is_stuck(200, 100)
    with knock(listening):
        assert not turns.is_stuck(300, 100)


def test_a_closed_socket_listens_to_nobody(listening: socket.socket) -> None:
    turns = Turns(listening)
    listening.close()
    assert turns.is_stuck(0, 100)
