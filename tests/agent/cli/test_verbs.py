"""Claims about the command line against a daemon on a real socket, and without one."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.admin.config_verbs import config_verbs
from agent.admin.questions import ExplainBody
from agent.admin.trust_verbs import trust_verbs
from agent.cli import VERBS, main, run
from agent.cli.run import flags_of
from agent.identity.membership import Membership
from agent.node.config.in_force import InForce
from agent.settings.load import Settings, load
from agent.settings.policy import PolicyRead, load_policy
from router_core.placement.reasons import Reason
from router_core.placement.record import DecisionRecord
from tests.agent.admin.daemon import Daemon
from tests.agent.admin.membership import membership
from tests.agent.observe.records import record


class Host:
    """One host's folders, in the environment of this process."""

    def __init__(self, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state, self.runtime, self.config = base / "state", base / "run", base / "config"
        for folder in (self.state, self.runtime, self.config):
            folder.mkdir(mode=0o700)
        self._capsys = capsys

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        """Run one command line beside the loop; exit status, stdout, stderr."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(self._exit_of, words)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    @staticmethod
    def _exit_of(words: tuple[str, ...]) -> int:
        try:
            return main(words)
        except SystemExit as exit_:
            return int(exit_.code or 0)


@pytest.fixture
def pairmesh(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(tmp_path, capsys)
    monkeypatch.setenv("STATE_DIRECTORY", str(host.state))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(host.runtime))
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(host.config))
    return host


@pytest.fixture
async def daemon(pairmesh: Host) -> AsyncIterator[Daemon]:
    async with Daemon(pairmesh.runtime) as running:
        yield running


async def test_status_prints_the_table_or_the_document(pairmesh: Host, daemon: Daemon) -> None:
    code, out, _ = await pairmesh("status")
    assert code == 0
    assert "NODE    STATE" in out
    code, out, _ = await pairmesh("status", "--json")
    assert [m["name"] for m in json.loads(out)["members"]] == ["atlas", "borg", "cyan"]


async def test_explain_finds_the_newest_or_the_named_decision(pairmesh: Host, daemon: Daemon) -> None:
    assert (await pairmesh("explain"))[0] == 1
    for number in range(2):
        daemon.journal.put(record(f"{number:026d}"))
    assert f"decision {1:026d} " in (await pairmesh("explain"))[1]
    assert f"decision {0:026d} " in (await pairmesh("explain", f"{0:026d}"))[1]
    code, out, _ = await pairmesh("explain", "--json", f"{0:026d}")
    assert json.loads(out)["chosen"] == "@atlas/ollama"
    for wrong in ("nothing", "../../etc", "a/b?c#d", "%00", ""):
        code, _, err = await pairmesh("explain", wrong)
        assert (code, err) == (
            1,
            "pairmesh: no such decision here: it may be another node's, or too old\n",
        ), wrong


async def test_explain_tells_where_a_request_would_go(pairmesh: Host, daemon: Daemon) -> None:
    words = ("explain", "--model", "tiny", "--prompt-tokens", "700", "--class", "batch", "--no-stream")
    hint = ("--header", "X-Pairmesh-Prefer: @beta", "--header", "x-pairmesh-prefer: @nobody")
    code, out, err = await pairmesh(*words, *hint, "--requires", "tools", "--requires", "vision")
    assert (code, err) == (0, "")
    assert out.startswith("dry run ")
    assert "asked for tiny (chat, batch, in one piece): about 700 prompt tokens" in out
    assert "hint prefer: ignored: nothing of that name is known\n" in out
    told = json.loads((await pairmesh(*words, "--json"))[1])
    assert (told["req"]["prompt_tokens"], told["req"]["class"], told["outcome"]) == (
        700,
        "batch",
        None,
    )
    assert (await pairmesh("explain"))[2] == "pairmesh: no decision yet\n"


async def test_every_fault_of_a_supposed_request_is_told(pairmesh: Host, daemon: Daemon) -> None:
    code, _, err = await pairmesh("explain", "--model", "tiny", "--images", "-1", "--class", "royal")
    assert code == 1
    assert "images: takes a whole number from 0 to 1,000" in err
    assert "class: takes one of interactive batch background" in err


async def test_explain_replays_a_stored_decision(pairmesh: Host, daemon: Daemon) -> None:
    supposed = daemon.dry_runs.explain(ExplainBody(model="tiny"))
    assert isinstance(supposed, DecisionRecord)
    daemon.journal.put(supposed)
    for words in (("explain", "--replay"), ("explain", supposed.id, "--replay")):
        code, out, _ = await pairmesh(*words)
        assert code == 0
        assert out.startswith(
            f"replay of decision {supposed.id}, by the policy that made it, comes to the same: tiny at @"
        )
    told = json.loads((await pairmesh("explain", supposed.id, "--replay", "--json"))[1])
    assert (told["same"], told["record"]["chosen"]) == (True, supposed.chosen)
    daemon.journal.put(replace(supposed, full=False))
    code, _, err = await pairmesh("explain", supposed.id, "--replay")
    assert (code, err) == (
        1,
        "pairmesh: refused: the record tells only the rows nearest to the chosen one (not_replayable)\n",
    )


async def test_a_decision_is_replayed_under_another_policy(
    pairmesh: Host, daemon: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "what-if.toml"
    supposed = daemon.dry_runs.explain(ExplainBody(model="tiny", headers={"x-pairmesh-prefer": "@beta"}))
    assert isinstance(supposed, DecisionRecord)
    assert supposed.reason is Reason.HINT
    daemon.journal.put(supposed)
    file.write_text("[adj]\nhint = 0.0\n")
    told = json.loads((await pairmesh("explain", supposed.id, "--policy", str(file), "--json"))[1])
    assert told["record"]["reason"] == "native"
    assert told["record"]["policy_hash"] not in ("", supposed.policy_hash)
    assert (
        f"by policy balanced {told['record']['policy_hash'][:8]}, comes to "
        in (await pairmesh("explain", supposed.id, "--replay", "--policy", str(file)))[1]
    )

    file.write_text("[adj]\nhint = 7\nhnit = 1\n")
    code, _, err = await pairmesh("explain", supposed.id, "--policy", str(file))
    assert code == 78
    assert "adj.hint" in err
    assert "did you mean adj.hint" in err
    code, _, err = await pairmesh("explain", "--policy", str(tmp_path / "none.toml"))
    assert (code, "cannot read" in err) == (1, True)
    file.write_bytes(b"\xff")
    assert (await pairmesh("explain", "--policy", str(file)))[0] == 78


@pytest.mark.parametrize(
    "words",
    [
        ("--class", "batch"),
        ("--model", "tiny", "--policy", "x.toml"),
        ("someid", "--model", "tiny"),
        ("--model", "tiny", "--replay"),
        ("--model", "tiny", "--header", "no colon"),
        ("--model", "tiny", "--header", ": no name"),
    ],
)
async def test_what_explain_cannot_mean_is_wrong_usage(pairmesh: Host, words: tuple[str, ...]) -> None:
    code, _, err = await pairmesh("explain", *words)
    assert (code, err.startswith("pairmesh explain: ")) == (2, True)


@pytest.mark.parametrize("verb", [["status"], ["explain"], ["trust", "list"], ["trust", "export"]])
async def test_a_missing_daemon_is_69_and_names_the_socket(pairmesh: Host, verb: list[str]) -> None:
    code, _, err = await pairmesh(*verb)
    assert code == 69
    assert str(pairmesh.runtime / "admin.sock") in err
    assert "pairmesh run" in err


async def test_a_dead_socket_is_told_from_a_missing_one(pairmesh: Host) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(pairmesh.runtime / "admin.sock"))
    left.close()
    code, _, err = await pairmesh("status")
    assert code == 69
    assert "nobody listens on" in err


async def test_a_user_who_may_not_ask_is_told_which_users_may(pairmesh: Host) -> None:
    async with Daemon(pairmesh.runtime, read_peer=lambda _: None):
        code, _, err = await pairmesh("status")
    assert code == 69
    assert "run this as root or as the daemon's user" in err


async def test_a_peer_that_talks_no_http_is_unreachable(pairmesh: Host) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xffwhat\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(babble, str(pairmesh.runtime / "admin.sock"))
    try:
        code, _, err = await pairmesh("status")
    finally:
        server.close()
        await server.wait_closed()
    assert (code, "broke off" in err) == (69, True)


# --- trust -----------------------------------------------------------------------------------------------


@pytest.fixture
async def borg(tmp_path: Path) -> AsyncIterator[Membership]:
    async with membership(tmp_path / "borg", "borg") as made:
        yield made


@pytest.fixture
async def trusting(pairmesh: Host, tmp_path: Path) -> AsyncIterator[Membership]:
    """A daemon with a real membership behind its socket."""

    class Silent:
        def audit(self, event: str, **facts: Any) -> None: ...

    async with membership(tmp_path / "atlas", "atlas") as made:
        verbs = trust_verbs(made, made.own.node_id, lambda: [], Silent())
        async with Daemon(pairmesh.runtime, verbs=verbs):
            yield made


async def test_members_are_exported_added_listed_and_removed(
    pairmesh: Host, trusting: Membership, borg: Membership, tmp_path: Path
) -> None:
    code, out, err = await pairmesh("trust", "export")
    assert (code, json.loads(out)["node_id"]) == (0, trusting.own.node_id)
    assert f"--id {trusting.own.node_id}" in err
    assert "no other members" in (await pairmesh("trust", "list"))[1]

    file = tmp_path / "borg.member"
    file.write_bytes(borg.export([]))
    code, out, _ = await pairmesh("trust", "add", str(file), "--id", borg.own.node_id, "--role", "node")
    assert (code, f"{borg.own.node_id} added" in out) == (0, True)
    code, out, _ = await pairmesh("trust", "list")
    assert out.splitlines()[-1].split() == ["borg", borg.own.node_id, "member", "node", "1"]
    code, out, _ = await pairmesh("trust", "remove", "@borg")
    assert (code, out) == (0, f"{borg.own.node_id} removed here; 0 of its connections cut\n")
    assert json.loads((await pairmesh("trust", "list", "--json"))[1])["members"][0]["removed"] is True


async def test_refusals_of_the_daemon_are_1_and_say_why(
    pairmesh: Host, trusting: Membership, borg: Membership, tmp_path: Path
) -> None:
    file = tmp_path / "borg.member"
    file.write_bytes(borg.export([]))
    code, _, err = await pairmesh("trust", "add", str(file), "--id", trusting.own.node_id)
    assert (code, "(id_differs)" in err) == (1, True)
    code, _, err = await pairmesh("trust", "remove", "@nobody")
    assert (code, "(not_a_member)" in err) == (1, True)


async def test_a_file_that_cannot_be_one_is_not_sent(pairmesh: Host, daemon: Daemon, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"\xff" * 100)
    huge = tmp_path / "huge"
    huge.write_bytes(b"x" * 100_000)
    for name in (blob, huge, tmp_path / "missing", tmp_path):
        code, _, err = await pairmesh("trust", "add", str(name), "--id", "x")
        assert (code, "cannot read" in err) == (1, True)


# --- settings --------------------------------------------------------------------------------------------


async def test_config_shows_and_checks_all_files(pairmesh: Host) -> None:
    (pairmesh.config / "pairmesh.toml").write_text('name = "atlas"\n')
    code, out, _ = await pairmesh("config", "show")
    assert (code, 'name = "atlas"  # pairmesh.toml' in out) == (0, True)
    shown = json.loads((await pairmesh("config", "show", "--json"))[1])
    assert shown["pairmesh.toml"]["name"] == {"value": "atlas", "source": "pairmesh.toml"}
    assert shown["policy.toml"]["weights.slo"] == {"value": 0.5, "source": "preset balanced"}
    assert shown["policy_hash"] in out
    assert (await pairmesh("config", "check"))[:2] == (0, f"no fault in {pairmesh.config}\n")

    (pairmesh.config / "pairmesh.toml").write_text('nmae = "atlas"\n[api]\nlisten = 3\n')
    (pairmesh.config / "endpoints").mkdir()
    (pairmesh.config / "endpoints" / "x.toml").write_text("engine = 7\n")
    (pairmesh.config / "policy.toml").write_text('preset = "turbo"\n')
    code, _, err = await pairmesh("config", "check")
    assert code == 78
    for about in ("nmae", "api.listen", "endpoints/x.toml", "policy.toml: preset"):
        assert about in err
    assert len(json.loads((await pairmesh("config", "check", "--json"))[1])["faults"]) >= 4
    assert (await pairmesh("config", "show"))[0] == 78


async def test_check_and_doctor_warn_of_a_key_without_effect_and_the_file_is_sound(pairmesh: Host) -> None:
    (pairmesh.config / "pairmesh.toml").write_text("[api]\nengine_admin = false\n")
    code, out, _ = await pairmesh("config", "check")
    assert code == 0
    assert out.splitlines()[1].startswith("warning: pairmesh.toml: api.engine_admin: removed in 0.1.0: ")
    (warning,) = json.loads((await pairmesh("config", "check", "--json"))[1])["warnings"]
    assert warning.startswith("pairmesh.toml: api.engine_admin: removed in")
    assert "api.engine_admin: removed in" in (await pairmesh("doctor"))[1]
    assert (await pairmesh("config", "show"))[0] == 0


async def test_a_credential_that_cannot_be_had_is_a_fault(pairmesh: Host) -> None:
    (pairmesh.config / "endpoints").mkdir()
    manifest = 'engine = "openai"\nurl = "http://127.0.0.1:9"\ncredential = "key"\n'
    (pairmesh.config / "endpoints" / "vllm.toml").write_text(manifest)
    folder = pairmesh.state / "credentials"
    code, _, err = await pairmesh("config", "check")
    assert (code, err) == (
        78,
        f"pairmesh: endpoints: vllm: credential: the file that it names in {folder} cannot be read\n",
    )
    assert re.search(r"^bad +settings +endpoints: vllm: credential", (await pairmesh("doctor"))[1], re.M)
    folder.mkdir()
    (folder / "key").write_text("")
    assert "is empty" in (await pairmesh("config", "check"))[2]
    (folder / "key").write_text("secret")
    assert (await pairmesh("config", "check"))[0] == 0
    policy = '[authority]\nmode = "advisory"\nurl = "http://127.0.0.1:9/"\ncredential = "other"\n'
    (pairmesh.config / "policy.toml").write_text(policy)
    code, _, err = await pairmesh("config", "check")
    assert (code, "policy.toml: authority.credential: the file that it names" in err) == (78, True)


async def test_config_show_tells_what_is_in_force_and_apart_what_waits(pairmesh: Host) -> None:
    started = load(pairmesh.config, host_name="atlas", flags={"name": "flagged"})
    policy = load_policy(pairmesh.config)
    assert isinstance(started, Settings)
    assert isinstance(policy, PolicyRead)
    in_force = InForce(started, pairmesh.config, policy)
    verbs = config_verbs(started.written, lambda: in_force.policy, in_force.waiting)
    async with Daemon(pairmesh.runtime, verbs=verbs):
        await _shows_what_waits(pairmesh, policy.policy.hash)


async def _shows_what_waits(pairmesh: Host, policy_hash: str) -> None:
    code, out, _ = await pairmesh("config", "show")
    assert (code, out.splitlines()[0]) == (0, "# in force")
    assert 'name = "flagged"  # flags' in out
    assert "wait for a restart" not in out

    (pairmesh.config / "pairmesh.toml").write_text('name = "file"\n[api]\nhosts = ["box:1"]\n')
    (pairmesh.config / "policy.toml").write_text('preset = "latency"\n')
    _, out, _ = await pairmesh("config", "show")
    before, _, after = out.partition("these wait for a restart:\n")
    assert "hosts = []  # default" in before
    assert f"# policy.toml, hash {policy_hash}" in before
    assert after == '# api.hosts = ["box:1"]  # pairmesh.toml; in force: []\n'
    shown = json.loads((await pairmesh("config", "show", "--json"))[1])
    assert shown["pairmesh.toml"]["api.hosts"] == {"value": [], "source": "default"}
    assert list(shown["waiting"]) == ["api.hosts"]
    assert tomllib.loads(before)["api"]["hosts"] == []

    (pairmesh.config / "pairmesh.toml").write_text("nmae = 3\n")
    code, out, _ = await pairmesh("config", "show")
    assert (code, "a restart would be refused" in out) == (0, True)


async def test_without_a_daemon_config_show_says_whose_word_it_is(pairmesh: Host) -> None:
    _, out, _ = await pairmesh("config", "show")
    assert out.startswith(f"# by the files in {pairmesh.config}, for a daemon that is started now (no daemon")
    assert json.loads((await pairmesh("config", "show", "--json"))[1])["daemon"] is False


async def test_more_manifests_than_are_followed_are_a_fault(pairmesh: Host) -> None:
    (pairmesh.config / "endpoints").mkdir()
    for number in range(17):
        manifest = pairmesh.config / "endpoints" / f"e{number:02}.toml"
        manifest.write_text('engine = "openai"\nurl = "http://127.0.0.1:9"\n')
    code, _, err = await pairmesh("config", "check")
    assert (code, err) == (78, "pairmesh: endpoints: e16: more than 16 endpoints\n")


async def test_files_that_nobody_reads_are_named(pairmesh: Host) -> None:
    for name in (
        "llama.toml",
        "polcy.toml",
        "Policy.toml",
        "policy.tml",
        "policy.toml.bak",
        "pairmesh.toml~",
        "notes.txt",
    ):
        (pairmesh.config / name).write_text("")
    for folder in ("endpoints", "endpoint", "models", "tls"):
        (pairmesh.config / folder).mkdir()
    (pairmesh.config / "models" / "llama.toml").write_text("")
    for name in ("ollama.conf", "old.toml.off", ".llama.toml.swp", "on\x1b.cfg"):
        (pairmesh.config / "endpoints" / name).write_text("")
    code, out, _ = await pairmesh("config", "check")
    assert (code, out.splitlines()[1:]) == (
        0,
        [
            "note: Policy.toml is not read: did you mean policy.toml?",
            "note: endpoint/ is not read: did you mean endpoints/?",
            "note: llama.toml is not read: manifests lie in endpoints/",
            "note: models/ is not read: manifests lie in endpoints/",
            "note: notes.txt is not read: this folder holds pairmesh.toml, policy.toml and endpoints/",
            "note: polcy.toml is not read: did you mean policy.toml?",
            "note: policy.tml is not read: did you mean policy.toml?",
            "note: endpoints/ollama.conf is not read: the name of a manifest ends in .toml",
            "note: endpoints/on\\x1b.cfg is not read: the name of a manifest ends in .toml",
        ],
    )
    assert "warning  settings  llama.toml is not read" in (await pairmesh("doctor"))[1]


async def test_a_config_folder_that_is_not_there_is_said(
    pairmesh: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(pairmesh.config / "absent"))
    assert "no such folder, so everything is as by default" in (await pairmesh("config", "check"))[1]


async def test_run_refuses_bad_settings_before_it_starts_anything(pairmesh: Host) -> None:
    (pairmesh.config / "policy.toml").write_text('preset = "turbo"\n')
    code, _, err = await pairmesh("run", "--api-listen", "0.0.0.0:11433", "--name", "No Name")
    assert code == 78
    assert "policy.toml: preset" in err
    assert "flags: api.listen" in err
    assert "flags: name" in err
    assert list(pairmesh.state.iterdir()) == []


def test_flags_are_settings_by_their_dotted_keys() -> None:
    parser = ArgumentParser()
    run.declare(parser)
    assert flags_of(parser.parse_args([])) == {}
    words = ["--name", "x", "--mesh-listen", ":1", "--no-router", "--engines-autodetect"]
    assert flags_of(parser.parse_args(words)) == {
        "name": "x",
        "mesh.listen": ":1",
        "router": False,
        "engines.autodetect": True,
    }


# --- doctor ----------------------------------------------------------------------------------------------


async def test_doctor_looks_at_everything_and_changes_nothing(pairmesh: Host, daemon: Daemon) -> None:
    code, out, _ = await pairmesh("doctor", "--json")
    assert code == 1
    found = json.loads(out)
    assert {finding["about"] for finding in found} == {
        "versions",
        "folders",
        "identity",
        "settings",
        "daemon",
        "clock",
        "ports",
        "gpu",
        "engines",
        "members",
    }
    said = "\n".join(finding["said"] for finding in found)
    assert "cyan is in another mesh" in said
    assert [*pairmesh.state.iterdir(), *pairmesh.config.iterdir()] == []


async def test_doctor_without_a_daemon_still_looks_at_the_rest(pairmesh: Host) -> None:
    pairmesh.state.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (pairmesh.config / "pairmesh.toml").write_text(
            f'[api]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        )
        code, out, _ = await pairmesh("doctor")
    assert code == 1
    assert f"chmod 0700 {pairmesh.state}" in out
    assert "is taken, by another program" in out
    assert "no daemon" in out
    assert "skipped  members" in out


# --- the command line itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("verb", sorted(VERBS))
async def test_every_verb_tells_what_it_does(pairmesh: Host, verb: str) -> None:
    code, out, _ = await pairmesh(verb, "--help")
    assert (code, out.startswith(f"usage: pairmesh {verb}")) == (0, True)
    assert verb in (await pairmesh("--help"))[1]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing"],
        ["--what"],
        ["status", "extra"],
        ["trust"],
        ["config"],
        ["config", "burn"],
        ["trust", "add", "f"],
    ],
)
async def test_wrong_usage_is_2(pairmesh: Host, words: list[str]) -> None:
    assert (await pairmesh(*words))[0] == 2


async def test_the_module_runs_as_a_program(pairmesh: Host) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent", "status", stderr=asyncio.subprocess.PIPE
    )
    _, err = await process.communicate()
    assert process.returncode == 69
    assert b"admin.sock" in err


async def test_a_light_verb_loads_no_heavy_library(pairmesh: Host) -> None:
    probe = (
        "import sys; from agent.cli import main; main(['status']); "
        "print([m for m in ('asyncio', 'aiohttp', 'cryptography', 'uvloop', 'zeroconf') if m in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", probe, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    out, _ = await process.communicate()
    assert out.strip() == b"[]"


def test_output_that_nobody_reads_to_its_end_is_no_fault(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unheard:
        said = subprocess.run(
            [sys.executable, "-m", "agent", "config", "show"],
            env=os.environ | {"CONFIGURATION_DIRECTORY": str(tmp_path)},
            stdout=unheard,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (said.returncode, said.stderr) == (1, b"")
