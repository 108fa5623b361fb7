"""Claims about the status documents: what a view says, and null where it says nothing."""

import msgspec

from agent.admin.documents import LinkDoc, StatusDoc, member_doc, members_of, spelled, view_doc
from router_core.ids import Id16, Id32, NodeName, node_id_of
from router_core.record.membership import Liveness, Member
from router_core.record.state import (
    EngineFacts,
    EngineLoad,
    EngineState,
    Flag,
    Level,
    ModelFacts,
    ModelState,
    ProfileFacts,
    ResidentModel,
    ResourceCode,
    ResourceLevel,
    Role,
    Software,
    Static,
    Volatile,
)
from router_core.view.cluster import ClusterView, NodeView

ROLES = int(Role.NODE | Role.ROUTER)


def node(
    number: int,
    name: str,
    *,
    volatile: Volatile | None = None,
    static: Static | None = None,
    is_self: bool = False,
    liveness: Liveness = Liveness.FRESH,
) -> NodeView:
    id32 = Id32(bytes([number]) * 32)
    return NodeView(
        id16=Id16(id32[:16]),
        node_id=node_id_of(id32),
        name=NodeName(name),
        label=name,
        member=None,
        roles=ROLES,
        liveness=liveness,
        is_self=is_self,
        routable=volatile is not None,
        draining=False,
        lonely=False,
        conflict=False,
        quarantined=False,
        volatile=volatile,
        static=static,
        mono_ms=900,
        base_ms=50,
        due_ms=2_000,
        epoch=3,
        inst=7,
        seq=11,
    )


def view(*nodes: NodeView) -> ClusterView:
    me = nodes[0]
    return ClusterView(
        gen=4,
        me=me.id16,
        node_id=me.node_id,
        name=me.name,
        nodes={n.id16: n for n in nodes},
        members={},
        labels={n.node_id: n.label for n in nodes},
    )


STATIC = Static(
    software=Software(version="0.1.0"),
    engines=(EngineFacts(name="llama", kind="llamacpp", slots=4), EngineFacts(name="big", kind="vllm")),
    models=(
        ModelFacts(name="tiny", engine=0),
        ModelFacts(name="large", engine=1),
        ModelFacts(name="cold", engine=0),
    ),
    profiles=(
        ProfileFacts(model=0, engine=0, gen_dtps=421),
        ProfileFacts(model=2, engine=0, gen_dtps=9_999),
        ProfileFacts(model=1, engine=1),
    ),
)
VOLATILE = Volatile(
    flags=int(Flag.DRAINING | Flag.URGENT),
    level=int(Level.ELEVATED),
    engines=(
        EngineLoad(state=int(EngineState.READY), running=2, queued=1, ours=1, work_ds=34, age_ds=5),
        EngineLoad(state=int(EngineState.STARTING), ours=1),
    ),
    residents=(
        ResidentModel(model=0, engine=0, state=int(ModelState.RESIDENT), running=2, mem_mib=700),
        ResidentModel(model=1, engine=1, state=int(ModelState.LOADING)),
        ResidentModel(model=40, engine=9, state=int(ModelState.RESIDENT)),
    ),
)


def test_a_member_says_what_its_records_say() -> None:
    doc = member_doc(
        node(1, "atlas", volatile=VOLATILE, static=STATIC), LinkDoc(state="up", rtt_ms=0.4), 1_000
    )
    assert (doc.name, doc.liveness, doc.level, doc.age_ms, doc.version) == (
        "atlas",
        "fresh",
        "elevated",
        50,
        "0.1.0",
    )
    assert doc.flags == ("draining", "urgent")
    assert doc.roles == ("node", "router")
    llama, big = doc.engines
    assert (llama.state, llama.running, llama.queued, llama.slots, llama.age_ms) == ("ready", 2, 1, 4, 500)
    assert llama.models == ("tiny", "cold")
    assert (big.state, big.running, big.slots) == ("starting", None, None)
    assert [(r.model, r.engine, r.state) for r in doc.residents] == [
        ("tiny", "llama", "resident"),
        ("large", "big", "loading"),
    ]
    assert doc.in_flight == 3
    assert doc.work_s == 3.4
    assert doc.gen_tps == 42.1


def test_unknown_is_null_and_never_zero() -> None:
    doc = member_doc(node(1, "atlas"), None, 1_000)
    unknown = (
        doc.age_ms,
        doc.epoch,
        doc.link,
        doc.level,
        doc.version,
        doc.in_flight,
        doc.work_s,
        doc.gen_tps,
    )
    assert set(unknown) == {None}


def test_positions_without_a_matching_static_are_not_read() -> None:
    doc = member_doc(node(1, "atlas", volatile=VOLATILE), None, 1_000)
    assert doc.engines == ()
    assert doc.residents == ()
    assert doc.in_flight is None
    assert doc.level == "elevated"


def test_a_high_level_names_the_resources_behind_it() -> None:
    resources = (
        ResourceLevel(code=ResourceCode.MEMORY, level=Level.CRITICAL, score_c=90),
        ResourceLevel(code=ResourceCode.CPU, level=Level.HIGH, score_c=80),
        ResourceLevel(code=ResourceCode.GPU_TIME, level=Level.CRITICAL, score_c=90),
        ResourceLevel(code=ResourceCode.GPU_TIME, level=Level.CRITICAL, score_c=91),
    )
    pressed = Volatile(level=Level.CRITICAL, resources=resources)
    assert member_doc(node(1, "a", volatile=pressed), None, 1_000).pressed == ("memory", "gpu time")
    calm = Volatile(level=Level.ELEVATED, resources=resources)
    assert member_doc(node(1, "a", volatile=calm), None, 1_000).pressed == ()


def test_codes_of_a_later_version_read_as_unknown() -> None:
    volatile = Volatile(engines=(EngineLoad(state=77),), level=None)
    doc = member_doc(node(1, "atlas", volatile=volatile, static=STATIC), None, 1_000)
    assert doc.engines[0].state == "unknown"
    assert doc.level is None


def test_the_own_node_comes_first_and_unseen_members_are_listed() -> None:
    zeus = node(9, "zeus", volatile=VOLATILE, static=STATIC, is_self=True)
    borg = node(2, "borg")
    unseen = Member(id32=Id32(b"\x07" * 32), der=b"", roles=ROLES, admission=1, name=NodeName("atlas"))
    links = {unseen.id16: LinkDoc(state="backoff", fault="wrong_mesh")}
    docs = members_of(view(zeus, borg), [unseen], links, 1_000)
    assert [(d.name, d.me) for d in docs] == [("zeus", True), ("atlas", False), ("borg", False)]
    assert docs[1].link == LinkDoc(state="backoff", fault="wrong_mesh")
    assert docs[1].age_ms is None


def test_the_view_document_is_json_with_names_of_fields() -> None:
    doc = view_doc(view(node(1, "atlas", volatile=VOLATILE, static=STATIC, is_self=True)), 1_000)
    read = msgspec.json.decode(msgspec.json.encode(doc))
    assert read["nodes"][0]["volatile"]["engines"][0]["work_ds"] == 34
    assert read["nodes"][0]["static"]["models"][0]["name"] == "tiny"
    assert read["nodes"][0]["age_ms"] == 50


def test_bytes_are_spelled_as_hex() -> None:
    assert spelled(ModelFacts(name="m", engine=0, digest=b"\xab\xcd"))["digest"] == "abcd"


def test_a_status_document_survives_its_encoding() -> None:
    from tests.agent.admin.documents import status

    made = status()
    assert msgspec.json.decode(msgspec.json.encode(made), type=StatusDoc) == made
