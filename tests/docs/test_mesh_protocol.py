"""The page about the mesh protocol tells fields, codes, limits and times as the code has them."""

import re
from enum import IntEnum, IntFlag

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Struct

from agent.identity.keys import Ed25519Verifier
from agent.mesh.dialling import LINK_PATH, SUBPROTOCOL
from agent.mesh.discovery import SERVICE
from agent.settings.values import MESH_PORT
from router_core import limits
from router_core.ids import id32_of_key, node_id_of
from router_core.mesh.protocol import messages
from router_core.mesh.records.receiver import PENALTIES, DropReason
from router_core.policy.mesh import MeshPolicy
from router_core.record import codec, envelope, state
from router_core.record.crypto import ENDORSE_DOMAIN, RECORD_DOMAIN, REMOVE_DOMAIN
from router_core.record.membership import Liveness
from router_core.trust import statements
from tests.docs.tables import page, plain, table
from tests.docs.wire import fields_of
from tests.support.sealing import unseal

PAGE = page("mesh-protocol.md")
MESH = MeshPolicy()

STRUCTS: dict[str, type[Struct]] = {
    "HELLO": messages.Hello,
    "HAVE": messages.Have,
    "HaveState": messages.HaveState,
    "RECS": messages.Heard,
    "WANT": messages.Wanted,
    "PING and PONG": messages.Ping,
    "BYE": messages.Bye,
    "Header": envelope.Header,
    "V body: Volatile": state.Volatile,
    "HostLoad": state.HostLoad,
    "GpuLoad": state.GpuLoad,
    "ResourceLevel": state.ResourceLevel,
    "EngineLoad": state.EngineLoad,
    "ResidentModel": state.ResidentModel,
    "SeenRouter": state.SeenRouter,
    "Dispatch": state.Dispatch,
    "LostLink": state.LostLink,
    "ModelDemand": state.ModelDemand,
    "S body: Static": state.Static,
    "Address": state.Address,
    "Software": state.Software,
    "Platform": state.Platform,
    "HostFacts": state.HostFacts,
    "GpuFacts": state.GpuFacts,
    "EngineFacts": state.EngineFacts,
    "ModelFacts": state.ModelFacts,
    "ProfileFacts": state.ProfileFacts,
    "L body: Leave": state.Leave,
    "Statement": statements._Frame,
    "E body": statements._EndorseBody,
    "X body": statements._RemoveBody,
}

CODES: dict[tuple[str, str], type[IntEnum]] = {
    ("GpuLoad", "state"): state.GpuState,
    ("ResourceLevel", "code"): state.ResourceCode,
    ("ResourceLevel", "level"): state.Level,
    ("EngineLoad", "state"): state.EngineState,
    ("ResidentModel", "state"): state.ModelState,
    ("X body", "reason"): statements.RemovalReason,
}

LIMITS = {
    "largest message accepted, bytes": limits.LINK_MESSAGE,
    "largest message sent, bytes": limits.LINK_MESSAGE_SENT,
    "soft size of a message, bytes": limits.LINK_MESSAGE_SOFT,
    "records in one RECS": limits.RECORDS_PER_MESSAGE,
    "entries in one HAVE chunk": limits.HAVE_PER_CHUNK,
    "entries in one WANT": limits.WANTS_PER_MESSAGE,
    "links in all": MESH.links_most,
    "links per member": limits.LINKS_PER_ID,
    "read rate of a link, bytes/s": limits.LINK_BYTES_PER_S,
    "read burst of a link, bytes": limits.LINK_BYTES_BURST,
    "messages read from a link, per s": MESH.messages_per_s_m // 1_000,
    "burst of messages read": MESH.messages_burst,
    "messages without use, per s": MESH.useless_per_s_m // 1_000,
    "burst of messages without use": MESH.useless_burst,
    "contradicting records verified, per s": MESH.disputes_per_s_m // 1_000,
    "burst of contradicting records": MESH.disputes_burst,
    "records accepted of one origin, per s": MESH.accept_per_s_m // 1_000,
    "burst of records of one origin": MESH.accept_burst,
    "verifications in one step": limits.VERIFICATIONS_PER_STEP,
}

TIMES = {
    "shortest period": MESH.publish_min_ms,
    "longest period": MESH.publish_max_ms,
    "second V after": MESH.second_volatile_ms,
    "listen before the first V": MESH.listen_first_ms,
    "least gap between two S": MESH.static_gap_ms,
    "lost entry kept": MESH.lost_kept_ms,
    "floors stored every": MESH.floors_every_ms,
    "flush": MESH.flush_ms,
    "urgent flush": MESH.urgent_flush_ms,
    "opening": MESH.opening_ms,
    "greeting": MESH.greeting_ms,
    "syncing": MESH.syncing_ms,
    "PING after": MESH.ping_ms,
    "round trip measured every": MESH.measure_ms,
    "dead after": MESH.dead_ms,
    "slow after": MESH.slow_ms,
    "WANT of one slot every": MESH.want_every_ms,
    "penalty": MESH.penalty_ms,
    "longest penalty for floods": MESH.flood_penalty_most_ms,
    "shortest back-off": MESH.backoff_min_ms,
    "longest back-off": MESH.backoff_max_ms,
    "the larger id dials after": MESH.larger_dials_after_ms,
    "a GONE member dialled every": MESH.gone_redial_ms,
    "shortest quarantine": MESH.quarantine_min_ms,
    "longest quarantine": MESH.quarantine_max_ms,
    "observer gap from": MESH.gap_ms,
    "grace after a gap": MESH.gap_grace_ms,
    "FRESH slack": MESH.fresh_slack_ms,
    "SUSPECT slack": MESH.suspect_slack_ms,
    "broken link grace": MESH.broken_grace_ms,
    "lost must hold for": MESH.lost_hold_ms,
    "GONE not before": MESH.gone_min_ms,
    "records of a GONE member kept": MESH.gone_kept_ms,
    "lonely after": MESH.lonely_after_ms,
    "lonely until": MESH.lonely_until_ms,
}

BLOBS = {
    "link message": codec.LINK_MESSAGE,
    "record header": codec.RECORD_HEADER,
    "V body": codec.V_BODY,
    "S body": codec.S_BODY,
    "L body": codec.L_BODY,
    "statement": codec.STATEMENT,
    "statement body": codec.TRUST_BODY,
}


def number(cell: str) -> int:
    return int(plain(cell).replace(",", ""))


@pytest.mark.parametrize("name", STRUCTS)
def test_the_page_lists_every_field_of_a_struct_with_its_type(name: str) -> None:
    rows = [tuple(plain(cell) for cell in row[:3]) for row in table(PAGE, f"### {name}")]
    assert rows == [(str(at), *field) for at, field in enumerate(fields_of(STRUCTS[name]))]


@pytest.mark.parametrize(("struct", "field"), CODES)
def test_the_page_lists_every_code_of_a_field(struct: str, field: str) -> None:
    (meaning,) = [row[3] for row in table(PAGE, f"### {struct}") if plain(row[1]) == field]
    told = {int(code): name for code, name in re.findall(r"(\d+) ([a-z_]+)", meaning)}
    assert told == {code.value: code.name.lower() for code in CODES[struct, field]}


@pytest.mark.parametrize(
    ("heading", "codes"),
    [
        ("## Messages", messages.MessageType),
        ("### BYE codes", messages.ByeCode),
        ("### Kinds", state.Kind),
    ],
)
def test_the_page_lists_every_code_of_a_table(heading: str, codes: type[IntEnum]) -> None:
    told = {int(row[0]): row[1] for row in table(PAGE, heading)}
    assert told == {code.value: code.name for code in codes}


@pytest.mark.parametrize(
    ("heading", "flags"),
    [("### Dialect bits", state.Dialect), ("### Capability bits", state.Capability)],
)
def test_the_page_lists_every_bit_of_a_table(heading: str, flags: type[IntFlag]) -> None:
    told = {1 << int(row[0]): plain(row[1]).upper() for row in table(PAGE, heading)}
    assert told == {flag.value: flag.name for flag in flags}


def test_the_page_lists_the_flags_of_v() -> None:
    told = {int(row[0]): row[1] for row in table(PAGE, "### V flags")}
    assert told == {flag.value: flag.name for flag in state.Flag}


def test_the_page_tells_the_size_limit_of_each_kind() -> None:
    told = {row[1]: number(row[2]) for row in table(PAGE, "### Kinds")}
    assert told == {kind.name: cap for kind, cap in (envelope.CAPS | statements.CAPS).items()}


@pytest.mark.parametrize(
    ("heading", "wanted"), [("### Limits", LIMITS), ("### Times", TIMES)], ids=["limits", "times"]
)
def test_the_page_tells_limits_and_times_as_the_code_has_them(heading: str, wanted: dict[str, int]) -> None:
    assert {plain(row[0]): number(row[1]) for row in table(PAGE, heading)} == wanted


def test_the_page_tells_the_bounds_of_each_blob() -> None:
    told = {row[0]: [number(cell) for cell in row[1:]] for row in table(PAGE, "### Bounds of one blob")}
    assert told == {
        name: [bounds.size, bounds.array, bounds.text, bounds.binary] for name, bounds in BLOBS.items()
    }


def test_the_page_names_every_reason_of_the_receive_pipeline_and_what_follows() -> None:
    told = {plain(row[2]): row[3] for row in table(PAGE, "## Receiving a record")}
    reasons = {reason.value for reason in DropReason} - {DropReason.FLOODING.value}
    assert told.keys() == reasons
    assert {reason: code for reason, code in told.items() if code.isupper()} == {
        reason.value: code.name for reason, code in PENALTIES.items()
    }


def test_the_page_lists_every_state_of_liveness() -> None:
    told = [plain(row[0]) for row in table(PAGE, "## Liveness")]
    assert told == [verdict.value for verdict in Liveness]


def test_the_page_names_the_planned_ends_of_a_link() -> None:
    (told,) = re.findall(r"^(.*) are \*planned\* ends", PAGE, re.MULTILINE)
    assert set(re.findall(r"[A-Z_]+", told)) == {code.name for code in messages.PLANNED}


def test_the_page_names_ports_paths_and_signature_domains() -> None:
    rows = table(PAGE, "## Ports and paths")
    assert rows[0][0] == f"{MESH_PORT}/tcp"
    assert plain(rows[0][1]) == f"GET {LINK_PATH}"
    assert f"`{SUBPROTOCOL}`" in rows[0][3]
    assert f"`{SERVICE.removesuffix('.local.')}`" in PAGE
    for domain in (RECORD_DOMAIN, ENDORSE_DOMAIN, REMOVE_DOMAIN):
        assert domain.removesuffix(b"\0").decode() in PAGE


def test_the_worked_frame_decodes_to_what_the_page_says_and_verifies() -> None:
    cells = table(PAGE, "## A frame, byte by byte")
    frame = bytes.fromhex("".join(plain(row[0]) for row in cells))
    message = messages.decode(frame)
    assert isinstance(message, messages.Recs)
    assert messages.encode(message) == frame
    (heard,) = message.items
    assert heard.age_ms == 120
    key32 = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()
    id32 = id32_of_key(key32)
    assert key32.hex() in PAGE
    assert node_id_of(id32) in PAGE
    header = unseal(heard.sealed, bytes(range(8)), key32, Ed25519Verifier())
    assert header.id16 == id32[:16]
    assert (header.epoch, header.seq, header.mono_ms, header.due_ms) == (3, 42, 5_000_000, 2_000)
    assert header.sref is not None
    assert header.sref.seq == 1
    body = codec.decode_volatile(header.body)
    assert body == state.Volatile(
        level=state.Level.NONE,
        host=state.HostLoad(ram_available_mib=20_480, cpu_external_pct=7, age_ds=3),
        engines=(
            state.EngineLoad(
                state=state.EngineState.READY, running=1, queued=0, slots=4, ours=1, work_ds=35, age_ds=2
            ),
        ),
    )
