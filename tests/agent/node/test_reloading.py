"""When files of the config folder are read: whole ones, once, and at once if somebody asks."""

from agent.node.config.reload import Look, Settling

OLD: Look = {"policy.toml": (1, 1, 10, 0o600)}
HALF: Look = {"policy.toml": (1, 2, 4, 0o600)}
NEW: Look = {"policy.toml": (1, 3, 12, 0o600)}


def dues(settling: Settling, *looks: Look, asked: bool = False) -> list[bool]:
    """What is said of each look; what is due is read."""
    found = []
    for look in looks:
        found.append(settling.is_due(look, asked=asked))
        if found[-1]:
            settling.read = look
    return found


def test_what_does_not_change_is_read_once() -> None:
    assert dues(Settling(), OLD, OLD, OLD, OLD) == [False, True, False, False]


def test_a_file_that_is_being_written_is_read_when_it_is_whole() -> None:
    settling = Settling()
    dues(settling, OLD, OLD)
    assert dues(settling, HALF, NEW, NEW, NEW) == [False, False, True, False]


def test_who_asks_is_not_kept_waiting_and_what_comes_later_is_read_as_ever() -> None:
    settling = Settling()
    assert dues(settling, HALF, asked=True) == [True]
    assert dues(settling, HALF, NEW, NEW) == [False, False, True]
