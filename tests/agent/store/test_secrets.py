"""Secrets that settings name."""

import os
from pathlib import Path

import pytest

from agent.store.folders import RefuseToStart
from agent.store.secrets import SECRET_MOST, read_secret


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    made = tmp_path / "credentials"
    made.mkdir()
    return made


def test_a_secret_is_what_its_file_holds_without_the_whitespace(tmp_path: Path, folder: Path) -> None:
    (folder / "token").write_text("s3cret\n")
    assert read_secret(tmp_path, "token") == "s3cret"


def test_the_supervisors_folder_is_read_instead_where_there_is_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").write_text("below the state folder")
    given = tmp_path / "given"
    given.mkdir()
    (given / "token").write_text("given")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    assert read_secret(tmp_path, "token") == "given"


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (None, "cannot be read"),
        (b"\xff", "cannot be read"),
        (b" \n", "is empty"),
        (b"x" * (SECRET_MOST + 1), "is longer than"),
        (b"one\r\ntwo", "no header can carry"),
    ],
)
def test_a_secret_that_is_none_refuses_and_names_its_folder_alone(
    tmp_path: Path, folder: Path, held: bytes | None, why: str
) -> None:
    if held is not None:
        (folder / "token").write_bytes(held)
    with pytest.raises(RefuseToStart, match=why) as refused:
        read_secret(tmp_path, "token")
    assert refused.value.reason == "credential_unreadable"
    assert str(folder) in str(refused.value)
    assert "token" not in str(refused.value), "it may be the key itself, put where the name belongs"
    assert "xxx" not in str(refused.value)


def test_a_pipe_is_no_secret_and_never_waited_for(tmp_path: Path, folder: Path) -> None:
    os.mkfifo(folder / "token")
    with pytest.raises(RefuseToStart, match="cannot be read"):
        read_secret(tmp_path, "token")
