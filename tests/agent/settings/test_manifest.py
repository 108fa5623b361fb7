"""Endpoint manifests: every key read, every fault reported at once."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.engines.catalogue import CATALOGUE
from agent.settings.manifest import (
    LATER,
    MANIFEST_BYTES,
    Caps,
    DeclaredModel,
    EngineKind,
    EngineUrl,
    Manifest,
    ManifestFault,
    parse_manifest,
    read_manifests,
)
from router_core.record.state import Capability, Dialect

SMALLEST = 'url = "http://127.0.0.1:8080"\nengine = "llamacpp"\n'


def parsed(text: str, file: str = "box.toml") -> Manifest:
    manifest, faults = parse_manifest(text.encode(), file)
    assert faults == ()
    assert manifest is not None
    return manifest


def keys(text: str, file: str = "box.toml") -> list[str]:
    manifest, faults = parse_manifest(text.encode(), file)
    assert (manifest is None) == bool(faults)
    return [fault.key for fault in faults]


def test_the_smallest_manifest_takes_its_name_from_the_file_and_the_defaults() -> None:
    assert parsed(SMALLEST) == Manifest(
        name="box",
        url=EngineUrl(scheme="http", host="127.0.0.1", port=8080),
        engine=EngineKind.LLAMACPP,
        connect_ms=2_000,
        first_byte_ms=0,
        idle_ms=300_000,
    )


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("slots", 1, 65_535),
        ("max_queue", 0, 65_535),
        ("connect_ms", 1, 60_000),
        ("first_byte_ms", 0, 86_400_000),
        ("idle_ms", 1_000, 86_400_000),
    ],
)
def test_every_number_has_its_bounds(key: str, least: int, most: int) -> None:
    assert [getattr(parsed(f"{SMALLEST}{key} = {each}"), key) for each in (least, most)] == [least, most]
    assert [keys(f"{SMALLEST}{key} = {each}") for each in (least - 1, most + 1)] == [[key], [key]]


def test_a_name_is_of_32_characters_at_most_and_a_port_is_never_zero() -> None:
    assert parsed(f'{SMALLEST}name = "{"n" * 32}"').name == "n" * 32
    assert keys(f'{SMALLEST}name = "{"n" * 33}"') == ["name"]
    assert keys('url = "http://127.0.0.1:0"\nengine = "llamacpp"\n') == ["url"]


@pytest.mark.parametrize("label", ["a/../b", "a//b"])
def test_a_model_name_that_no_request_could_say_is_refused(label: str) -> None:
    assert keys(f'{SMALLEST}[[models]]\nname = "{label}"\n') == ["models[0].name"]
    assert keys(f'{SMALLEST}[[models]]\nname = "a"\naliases = ["{label}"]\n') == ["models[0].aliases"]


def test_every_key_is_read() -> None:
    manifest = parsed(
        """
        name = "gpu-box"
        url = "https://api.example.com"
        engine = "openai"
        cloud = true
        credential = "api.key"
        dialects = ["chat", "embed"]
        price_in = 0.5
        price_out = 2
        pass_headers = ["X-Session-Id", "x-llm-d-*"]
        unit = "llama-server.service"
        slots = 3
        max_queue = 0
        jit_load = true
        allow_offload = true
        reserve_vram_mib = 512
        connect_ms = 500
        first_byte_ms = 60000
        idle_ms = 10000
        labels = { rack = "a1" }

        [[models]]
        name = "org/big"
        upstream_name = "/srv/big.gguf"
        aliases = ["big"]
        digest = "sha256:%s"
        base = "big-8b"
        family = "llama"
        params_b = 8.03
        active_b = 3
        quant = "Q4_K_M"
        ctx_max = 8192
        size_bytes = 5000000000
        kv_bytes_per_token = 131072
        caps = { tools = true, vision = false }
        keep = true
        """
        % ("ab" * 32)
    )
    assert manifest.name == "gpu-box"
    assert str(manifest.url) == "https://api.example.com"
    assert (manifest.cloud, manifest.remote_host) == (True, True), "cloud implies another host"
    assert manifest.dialects == Dialect.CHAT | Dialect.EMBED
    assert (manifest.price_in, manifest.price_out) == (0.5, 2.0)
    assert manifest.pass_headers == ("x-session-id", "x-llm-d-*")
    assert (manifest.slots, manifest.max_queue, manifest.jit_load) == (3, 0, True)
    assert (manifest.connect_ms, manifest.first_byte_ms, manifest.idle_ms) == (500, 60_000, 10_000)
    assert manifest.labels == (("rack", "a1"),)
    (model,) = manifest.models
    assert (model.name, model.upstream_name, model.aliases) == ("org/big", "/srv/big.gguf", ("big",))
    assert model.digest == b"\xab" * 32
    assert model.caps == Caps(known=Capability.TOOLS | Capability.VISION, has=Capability.TOOLS)
    assert model.keep


def test_the_reference_names_every_key() -> None:
    told = (Path(__file__).parents[3] / "docs/reference/manifest.md").read_text()
    for key in (*Manifest.__struct_fields__, *(f"models.{name}" for name in DeclaredModel.__struct_fields__)):
        assert f"| `{key}` |" in told, key


def test_all_faults_are_reported_at_once() -> None:
    text = """
    url = "ftp://user:pw@192.0.2.1:0/path"
    engine = "gpt"
    slots = 0
    jit_load = "yes"
    dialects = ["chat", "telepathy"]
    colour = "blue"
    labels = { "bad key!" = "x", ok = 5 }
    [[models]]
    aliases = ["a", "a"]
    ctx_max = -1
    caps = { flight = true, tools = "yes" }
    shape = "round"
    """
    assert sorted(set(keys(text))) == sorted(
        {
            "url",
            "engine",
            "slots",
            "jit_load",
            "dialects[1]",
            "colour",
            "labels.bad key!",
            "labels.ok",
            "models[0].name",
            "models[0].aliases[1]",
            "models[0].aliases",
            "models[0].ctx_max",
            "models[0].caps.flight",
            "models[0].caps.tools",
            "models[0].shape",
        }
    )


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("http://localhost:8080", ""),
        ("http://192.0.2.1:8080", ""),
        ("http://169.254.169.254", ""),
        ("http://2130706433:8080", ""),
        ("http://0x7f000001:8080", ""),
        ("http://[::ffff:127.0.0.1]:8080", ""),
        ("http://0.0.0.0:8080", "remote_host = true"),
        ("http://224.0.0.1:8080", "remote_host = true"),
        ("http://example.com:8080", "remote_host = true"),
        ("https://127.0.0.1:8080", ""),
        ("http://127.0.0.1:99999", ""),
        ("http://127.0.0.1:8080//v1", ""),
        ("http://127.0.0.1:8080/a/../v1", ""),
        ("http://127.0.0.1:8080/a b", ""),
        ("http://127.0.0.1:8080/a\\tb", ""),
        ("http://127.0\\n.0.1:8080", ""),
        ("http://127.0.0.1:8080/%2e%2e", ""),
        ("http://127.0.0.1:8080/" + "x" * 128, ""),
        ("http://127.0.0.1:8080/v1?x=1", ""),
        ("http://127.0.0.1:8080?x=1", ""),
        ("http://key@127.0.0.1:8080", ""),
        ("unix:///run/x.sock", ""),
        ("http://", ""),
        ("http://[::1", ""),
        ("https://example", "cloud = true"),
        ("https://exa mple.com", "cloud = true"),
    ],
)
def test_addresses_that_are_not_allowed(url: str, extra: str) -> None:
    assert set(keys(f'url = "{url}"\nengine = "openai"\n{extra}')) == {"url"}


@pytest.mark.parametrize(
    ("url", "extra", "host", "port"),
    [
        ("http://127.0.0.1:8080/", "", "127.0.0.1", 8080),
        ("http://127.0.0.9", "", "127.0.0.9", 80),
        ("http://[::1]:8080", "", "::1", 8080),
        ("http://192.0.2.1:8080", "remote_host = true", "192.0.2.1", 8080),
        ("https://api.example.com", "cloud = true", "api.example.com", 443),
    ],
)
def test_addresses_that_are_allowed(url: str, extra: str, host: str, port: int) -> None:
    manifest = parsed(f'url = "{url}"\nengine = "openai"\n{extra}')
    assert (manifest.url.host, manifest.url.port) == (host, port)


@pytest.mark.parametrize(
    ("url", "chats"),
    [
        ("http://127.0.0.1:8080", "/v1/chat/completions"),
        ("http://127.0.0.1:8080/v1/", "/v1/chat/completions"),
        ("http://127.0.0.1:8080/openai/v1", "/openai/v1/chat/completions"),
        ("http://127.0.0.1:8080/v1beta/openai/", "/v1beta/openai/chat/completions"),
    ],
)
def test_a_url_may_end_in_what_clients_call_the_base_url(url: str, chats: str) -> None:
    found = parsed(f'url = "{url}"\nengine = "openai"\n').url
    assert found.path_of("/v1/chat/completions") == chats
    assert found.path_of("/health") == "/health"
    _, (fault,) = parse_manifest(f'url = "{url}x/y"\nengine = "ollama"\n'.encode(), "a.toml")
    assert str(fault).startswith("a.toml: url: ")


def test_missing_keys_and_an_unfit_file_name_are_faults() -> None:
    assert keys("", "My Box.toml") == ["engine", "name", "url"]
    assert parsed(SMALLEST + 'name = "box-2"', "My Box.toml").name == "box-2"


def test_lists_are_bounded() -> None:
    models = "".join(f'[[models]]\nname = "m{n}"\n' for n in range(65))
    assert keys(SMALLEST + models) == ["models"]
    labels = ", ".join(f'l{n} = "x"' for n in range(17))
    assert keys(SMALLEST + f"labels = {{ {labels} }}") == ["labels"]
    aliases = [f"a{n}" for n in range(9)]
    assert keys(SMALLEST + f'[[models]]\nname = "m"\naliases = {aliases}') == ["models[0].aliases"]


def test_a_name_is_used_once_within_a_manifest() -> None:
    text = SMALLEST + '[[models]]\nname = "a"\n[[models]]\nname = "b"\naliases = ["a"]\n'
    assert keys(text) == ["models[1].aliases"]


def test_a_folder_gives_its_good_manifests_and_the_faults_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(SMALLEST)
    (tmp_path / "two.toml").write_text(SMALLEST + 'name = "one"')
    (tmp_path / "three.toml").write_text("url = ")
    (tmp_path / "four.toml").write_bytes(b"\xff")
    (tmp_path / "five.toml").write_bytes(b"#" * (MANIFEST_BYTES + 1))
    (tmp_path / "six.toml").mkdir()
    (tmp_path / "readme.md").write_text("not a manifest")
    read = read_manifests(tmp_path)
    assert [manifest.name for manifest in read.manifests] == ["one"]
    assert sorted(fault.file for fault in read.faults) == [
        "five.toml",
        "four.toml",
        "six.toml",
        "three.toml",
        "two.toml",
    ]
    assert read_manifests(tmp_path / "missing").manifests == ()


def test_a_fault_reads_as_file_key_and_problem() -> None:
    assert str(ManifestFault(file="a.toml", key="slots", problem="0 is not in 1..9")) == (
        "a.toml: slots: 0 is not in 1..9"
    )


Value = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(max_codepoint=0x7E), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(max_codepoint=0x7E), max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def toml(value: object) -> str:
    """``value`` as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(Manifest.__struct_fields__), Value))
def test_any_tree_gives_a_manifest_or_faults_and_never_an_exception(tree: dict[str, object]) -> None:
    text = "".join(f"{key} = {toml(value)}\n" for key, value in tree.items())
    manifest, faults = parse_manifest(text.encode(), "box.toml")
    assert not any("not TOML" in fault.problem for fault in faults)
    assert (manifest is None) == bool(faults)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_manifest_or_faults(raw: bytes) -> None:
    manifest, faults = parse_manifest(raw, "box.toml")
    assert (manifest is None) == bool(faults)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5_000 + "]" * 5_000,
        "x = " + "9" * 5_000,
        "slots = 0x" + "f" * 5_000,
        "price_in = 1" + "0" * 400,
        "[[models]]\nparams_b = -0x" + "f" * 300,
        "a." * 20 + "b = 1",
        "a." * 100_000 + "b = 1",
    ],
)
def test_an_absurd_manifest_is_a_fault_and_no_crash(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.toml").write_text(text)
    (fault,) = read_manifests(tmp_path).faults
    assert (fault.file, "not TOML" in fault.problem) == ("odd.toml", True)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_manifest_that_everybody_may_write_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "open.toml"
    path.write_text('engine = "openai"\nurl = "http://127.0.0.1:1"\n')
    assert len(read_manifests(tmp_path).manifests) == 1
    (tmp_path if what == "folder" else path).chmod(0o777)
    read = read_manifests(tmp_path)
    assert (read.manifests, ["writable by everybody" in fault.problem for fault in read.faults]) == (
        (),
        [True],
    )


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "endpoints").write_text("a file")
    read = read_manifests(tmp_path / "endpoints")
    assert (read.listed, len(read.faults)) == (False, 1)
    assert read_manifests(tmp_path / "absent").listed


def test_what_is_no_file_is_a_fault_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (fault,) = read_manifests(tmp_path).faults
    assert str(fault) == "pipe.toml: unreadable: not a file"


def test_a_file_name_that_is_no_text_is_told_in_text(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.toml")).write_text("x")
    (fault,) = read_manifests(tmp_path).faults
    assert str(fault).encode("utf-8").startswith("\ufffd.toml: not TOML".encode())


def test_an_engine_without_an_adapter_is_refused_with_what_to_write_instead() -> None:
    assert {kind for kind in EngineKind if kind not in LATER} == {engine for engine, _ in CATALOGUE}
    for kind in LATER:
        _, (fault,) = parse_manifest(f'url = "http://127.0.0.1:1/v1"\nengine = "{kind}"\n'.encode(), "a.toml")
        assert str(fault) == f'a.toml: engine: use engine = "openai" for {LATER[kind]}'


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:8080", "must begin with http://"),
        ("localhost:11434", "must begin with http://"),
        ("https://127.0.0.1:8080", "must begin with http://"),
        ("http://127.0.0.1:11434/v1", "must end after the port"),
        ("http://localhost:11434", "must name an address: write 127.0.0.1 or [::1] for localhost"),
    ],
)
def test_what_is_commonly_written_for_a_url_is_told_in_one_sentence(url: str, problem: str) -> None:
    _, (fault,) = parse_manifest(f'url = "{url}"\nengine = "ollama"\n'.encode(), "a.toml")
    assert str(fault) == f"a.toml: url: {problem}"
