"""What may be a key, put where the name of its file belongs, is told to nobody: not in a fault, nor among the settings."""

import json
from pathlib import Path

import pytest

from agent.cli import main
from agent.cli.config import faults_of
from agent.settings.manifest import parse_manifest
from agent.store.folders import Folders

KEY = "sk-proj-0123456789abcdefghijklmnopqrstuv"
UNFIT = f"Bearer {KEY}"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    found = Folders(state=tmp_path / "state", runtime=tmp_path / "run", config=tmp_path)
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path))
    (tmp_path / "endpoints").mkdir()
    return found


@pytest.mark.parametrize(
    ("file", "text", "about"),
    [
        ("policy.toml", '[authority]\ncredential = "{}"', "authority.credential: not a file's name"),
        ("policy.toml", '[authority]\ncredential = ["{}"]', "authority.credential: not a file's name"),
        ("policy.toml", 'authority = "{}"', "authority: not a table"),
        ("policy.toml", '[authority]\nurl = "http://me:{}@127.0.0.1:9/"', "authority"),
        ("policy.toml", '[session]\nheaders = ["authorization: {}"]', "session.headers: not a header's name"),
        ("pairmesh.toml", '[api]\nlocal_token = "{}"', "api.local_token: removed in"),
        ("pairmesh.toml", '[api]\ntls_key = "{}"', "api.tls_key: removed in"),
        ("pairmesh.toml", 'api = "{}"', "api: not a table"),
        ("pairmesh.toml", 'api_key = "{}"', "api_key: unknown key"),
        ("endpoints/a.toml", 'credential = "{}"', "credential: does not match"),
        ("endpoints/a.toml", 'credential = ["{}"]', "credential: must be a string"),
        ("endpoints/a.toml", 'key = "{}"', "key: unknown key"),
        ("endpoints/a.toml", 'pass_headers = ["authorization: {}"]', "pass_headers[0]: 'authorization' does"),
        ("endpoints/a.toml", 'url = "http://me:{}@127.0.0.1:9"', "url: must not hold a user or a password"),
        ("endpoints/a.toml", 'url = "http://127.0.0.1:{}"', "url: not a URL"),
        ("endpoints/a.toml", 'url = "http://me:{}\u2100@127.0.0.1"', "url: not a URL"),
    ],
)
def test_a_fault_never_spells_what_may_be_a_key(folders: Folders, file: str, text: str, about: str) -> None:
    (folders.config / file).write_text(text.format(UNFIT))
    said = "\n".join(faults_of(folders))
    assert about in said
    assert KEY not in said
    assert KEY[:12] not in said


def test_a_key_that_could_be_a_files_name_is_not_shown_among_the_settings(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders.config / "policy.toml").write_text(f'[authority]\ncredential = "{KEY}"')
    assert main(["config", "show"]) == 0
    said = capsys.readouterr().out
    assert KEY not in said
    assert "# credential is set  # policy.toml" in said
    assert main(["config", "show", "--json"]) == 0
    said = capsys.readouterr().out
    assert KEY not in said
    assert json.loads(said)["policy.toml"]["authority.credential"] == {"value": None, "source": "policy.toml"}


def test_a_name_of_a_file_is_taken_as_it_is() -> None:
    text = b'engine = "openai"\nurl = "http://127.0.0.1:9"\ncredential = "vllm-key"\npass_headers = ["X-Trace", "x-a*"]\n'
    manifest, faults = parse_manifest(text, "a.toml")
    assert faults == ()
    assert manifest is not None
    assert (manifest.credential, manifest.pass_headers) == ("vllm-key", ("x-trace", "x-a*"))
