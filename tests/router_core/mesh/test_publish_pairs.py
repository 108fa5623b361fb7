"""V speaks in the positions of its own S, whatever has to wait."""

from random import Random

from router_core.ids import Id16
from router_core.mesh.records.publisher import Me, Publisher
from router_core.policy.mesh import MeshPolicy
from router_core.record.codec import decode_volatile
from router_core.record.envelope import read_header
from router_core.record.state import EngineFacts, EngineLoad, Kind, ModelFacts, Static, Volatile

MESH8 = bytes(8)


class Unsigned:
    def sign(self, message: bytes) -> bytes:
        return bytes(64)


def publisher() -> Publisher:
    """One that may speak: its epoch is persisted, its listening over."""
    made = Publisher(
        Me(id16=Id16(bytes(16)), key32=bytes(32)), MESH8, 0, Unsigned(), MeshPolicy(), Random(1), 0
    )
    made.begin_epoch(0)
    made.persisted(True, 0)
    made.listened(0)
    return made


def static(*models: str, size_mib: int | None = None) -> Static:
    return Static(
        engines=(EngineFacts(name="llama", kind="llamacpp"),),
        models=tuple(ModelFacts(name=name, engine=0, size_mib=size_mib) for name in models),
    )


def volatile(work_ds: int) -> Volatile:
    return Volatile(engines=(EngineLoad(work_ds=work_ds),))


def said(publisher: Publisher, now: int) -> tuple[list[Kind], int | None]:
    """Kinds published at ``now``, and the work in the V among them."""
    held = publisher.publish(False, (), now)
    kinds, work = [], None
    for one in held:
        header = read_header(one.sealed.signed, MESH8)
        kinds.append(Kind(header.kind))
        if header.kind == Kind.V:
            work = decode_volatile(header.body).engines[0].work_ds
    return kinds, work


def test_the_first_records_are_s_then_v() -> None:
    node = publisher()
    node.set_bodies(volatile(1), static("a"), True, None)
    assert said(node, 10) == ([Kind.S, Kind.V], 1)


def test_a_v_of_a_moved_s_waits_with_it() -> None:
    node = publisher()
    node.set_bodies(volatile(1), static("a", "b"), True, None)
    said(node, 10)
    node.set_bodies(volatile(2), static("b"), True, None)
    assert said(node, 20) == ([Kind.V], 1), "positions of the new S must not be read against the old one"
    assert said(node, 1_100)[0] == [Kind.S, Kind.V]


def test_a_v_goes_out_at_once_if_only_facts_of_s_changed() -> None:
    node = publisher()
    node.set_bodies(volatile(1), static("a"), True, None)
    said(node, 10)
    node.set_bodies(volatile(2), static("a", size_mib=40), True, None)
    assert said(node, 20) == ([Kind.V], 2)
    node.set_bodies(volatile(3), static("a", size_mib=40), True, None)
    assert said(node, 1_100) == ([Kind.S, Kind.V], 3)


def test_going_back_to_the_s_in_force_waits_for_nothing() -> None:
    node = publisher()
    node.set_bodies(volatile(1), static("a"), True, None)
    said(node, 10)
    node.set_bodies(volatile(2), static("b"), True, None)
    node.set_bodies(volatile(3), static("a"), True, None)
    assert said(node, 20) == ([Kind.V], 3)
    assert said(node, 1_500)[0] == [Kind.V]
