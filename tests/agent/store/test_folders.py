import os
from pathlib import Path

import pytest

from agent.store.folders import Folders, RefuseToStart, claim


def test_systemd_names_the_folders_where_it_runs_us() -> None:
    env = {
        "STATE_DIRECTORY": "/var/lib/pairmesh:/var/lib/other",
        "RUNTIME_DIRECTORY": "/run/pairmesh",
        "CONFIGURATION_DIRECTORY": "/etc/pairmesh",
        "XDG_STATE_HOME": "/ignored",
    }
    assert Folders.from_env(env) == Folders(
        Path("/var/lib/pairmesh"), Path("/run/pairmesh"), Path("/etc/pairmesh")
    )


def test_else_they_lie_below_the_xdg_folders() -> None:
    env = {"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r", "XDG_CONFIG_HOME": "/c"}
    assert Folders.from_env(env) == Folders(Path("/s/pairmesh"), Path("/r/pairmesh"), Path("/c/pairmesh"))


def test_else_below_the_home_folder_and_the_runtime_one_below_the_state() -> None:
    found = Folders.from_env({"HOME": "/h/ada"})
    assert found.state == Path("/h/ada/.local/state/pairmesh")
    assert found.runtime == found.state / "run"
    assert found.config == Path("/h/ada/.config/pairmesh")
    assert found.admin_socket == found.runtime / "admin.sock"


def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "state", tmp_path / "state/run", tmp_path / "config")


def refusal(found: Folders) -> RefuseToStart:
    with pytest.raises(RefuseToStart) as caught:
        found.prepare()
    return caught.value


def test_missing_folders_are_made_private(tmp_path: Path) -> None:
    found = folders(tmp_path)
    found.prepare()
    found.prepare()
    assert found.state.stat().st_mode & 0o777 == 0o700
    assert found.runtime.stat().st_mode & 0o777 == 0o700
    assert not found.config.exists()


@pytest.mark.threat("T26")
@pytest.mark.parametrize(
    ("which", "mode", "reason"),
    [
        ("state", 0o750, "state_not_private"),
        ("state", 0o701, "state_not_private"),
        ("runtime", 0o755, "runtime_not_private"),
        ("config", 0o777, "config_writable"),
    ],
)
def test_a_folder_open_to_others_refuses_and_says_what_to_do(
    tmp_path: Path, which: str, mode: int, reason: str
) -> None:
    found = folders(tmp_path)
    found.prepare()
    folder = getattr(found, which)
    folder.mkdir(exist_ok=True)
    folder.chmod(mode)
    refused = refusal(found)
    assert refused.reason == reason
    assert (
        f"chmod {mode & ~(0o077 if which == 'state' else 0o027 if which == 'runtime' else 0o002):04o}"
        in str(refused)
    )
    assert str(folder) in str(refused)


@pytest.mark.parametrize("which", ["state", "runtime"])
def test_a_folder_that_cannot_be_made_refuses_and_says_why(tmp_path: Path, which: str) -> None:
    (tmp_path / "file").write_text("")
    places = {"state": tmp_path / "state", "runtime": tmp_path / "run"} | {which: tmp_path / "file" / "sub"}
    refused = refusal(Folders(places["state"], places["runtime"], tmp_path / "config"))
    assert refused.reason == "folder_not_made"
    assert str(refused).startswith(f"{tmp_path}/file/sub cannot be made (Not a directory): make it for this")
    assert f"set {which.upper()}_DIRECTORY" in str(refused)
    places[which] = tmp_path / "file"
    assert refusal(Folders(places["state"], places["runtime"], tmp_path / "config")).reason == "not_a_folder"


def test_a_runtime_folder_may_be_open_to_its_group(tmp_path: Path) -> None:
    found = folders(tmp_path)
    found.prepare()
    found.runtime.chmod(0o750)
    found.prepare()


def test_a_socket_path_too_long_for_the_kernel_refuses(tmp_path: Path) -> None:
    found = Folders(tmp_path / "state", tmp_path / ("r" * 100), tmp_path / "config")
    assert refusal(found).reason == "socket_path_too_long"


def test_a_state_folder_is_one_daemons_for_as_long_as_it_lives(tmp_path: Path) -> None:
    held = claim(tmp_path)
    with pytest.raises(RefuseToStart, match="another daemon runs with") as refused:
        claim(tmp_path)
    assert refused.value.reason == "state_in_use"
    os.close(held)
    os.close(claim(tmp_path))
