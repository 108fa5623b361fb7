"""Which daemon a command line means."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli.daemon_client import DaemonClient, Unreachable
from agent.cli.whose import folders_here
from agent.store.folders import Folders


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short folder: the path of a socket is."""
    monkeypatch.chdir(tmp_path)
    return Path()


@pytest.fixture
def service(base: Path) -> Folders:
    return Folders(state=base / "var", runtime=base / "run", config=base / "etc")


@pytest.fixture
def env(base: Path) -> dict[str, str]:
    return {"HOME": "home", "XDG_RUNTIME_DIR": "session"}


@contextlib.contextmanager
def listening(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "admin.sock"))
        sock.listen()
        yield


def test_a_users_own_daemon_comes_before_the_service(env: dict[str, str], service: Folders) -> None:
    with listening(Path("session/pairmesh")), listening(service.runtime):
        assert folders_here(env, service) == Folders.from_env(env)


def test_the_service_is_found_where_the_user_runs_none(env: dict[str, str], service: Folders) -> None:
    with listening(service.runtime):
        assert folders_here(env, service) == service


def test_an_own_daemon_that_died_does_not_hide_the_service(env: dict[str, str], service: Folders) -> None:
    with listening(Path("session/pairmesh")):
        pass
    with listening(service.runtime):
        assert folders_here(env, service) == service


def test_an_own_daemon_of_another_session_is_found(env: dict[str, str], service: Folders) -> None:
    with listening(Path("home/.local/state/pairmesh/run")), listening(service.runtime):
        assert folders_here(env, service).runtime == Path("home/.local/state/pairmesh/run")


@pytest.mark.parametrize("name", ["STATE_DIRECTORY", "RUNTIME_DIRECTORY", "CONFIGURATION_DIRECTORY"])
def test_what_the_environment_names_comes_before_all(
    env: dict[str, str], service: Folders, name: str
) -> None:
    asked = env | {name: "asked"}
    with listening(service.runtime):
        assert folders_here(asked, service) == Folders.from_env(asked)


def test_a_service_that_does_not_run_is_meant_by_whoever_has_no_folders(
    env: dict[str, str], service: Folders
) -> None:
    assert folders_here(env, service) == Folders.from_env(env)
    service.state.mkdir()
    assert folders_here(env, service) == service
    Path("home/.local/state/pairmesh").mkdir(parents=True)
    assert folders_here(env, service) == Folders.from_env(env)


def test_a_path_that_no_socket_can_have_is_no_daemon(env: dict[str, str], service: Folders) -> None:
    env["XDG_RUNTIME_DIR"] = "x" * 200
    with listening(service.runtime):
        assert folders_here(env, service) == service


def test_who_may_not_use_the_socket_is_told_who_may(base: Path) -> None:
    with listening(base / "run"):
        (base / "run").chmod(0o700)
        client = DaemonClient(base / "run" / "admin.sock")
        if os.geteuid() != 0:
            pytest.skip("needs root to become somebody else")
        os.chmod(base / "run" / "admin.sock", 0o600)
        os.seteuid(65_534)
        try:
            with pytest.raises(Unreachable, match="run this as root or as the daemon's user"):
                client.read("/v1/status")
        finally:
            os.seteuid(0)
