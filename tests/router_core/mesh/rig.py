"""One machine under test, scripted peers around it, and a clock that only moves when told to."""

from random import Random

from router_core.ids import Id16, MeshId, mesh8_of
from router_core.mesh.machine import Mesh
from router_core.mesh.protocol import messages as msg
from router_core.mesh.protocol.actions import Action, CloseLink, Dial, Notify, Persist, SendFrame, ViewChanged
from router_core.mesh.protocol.events import (
    BodyChanged,
    DialFailed,
    DialFailure,
    Event,
    FrameReceived,
    LinkId,
    LinkOpened,
    PersistDone,
    Resumed,
    SavedKey,
    Ticked,
)
from router_core.mesh.records.publisher import Me
from router_core.mesh.records.saved import Saved
from router_core.policy.mesh import MeshPolicy
from router_core.record.codec import encode as encode_plain
from router_core.record.envelope import Header, Sealed, Sref, read_header, seal, sref_of
from router_core.record.membership import Liveness, ViewChange
from router_core.record.state import Kind, Leave, LeaveReason, Role, Static, Volatile
from router_core.sim.mesh.crypto import FakeCrypto, Ledger, simulated_member
from router_core.sim.timeline import Timeline

MESH = MeshId(b"m" * 16)
OTHER_MESH = MeshId(b"o" * 16)
SPEAKER = Role.NODE | Role.ROUTER


class Peer:
    """Another node: seals what the test wants it to say. Its boot clock runs ``ahead_ms`` before ours."""

    def __init__(self, index: int, ledger: Ledger, roles: int = SPEAKER, ahead_ms: int = 5_000_000) -> None:
        self.member, key32 = simulated_member(index, roles)
        self.id16 = self.member.id16
        self.crypto = FakeCrypto(key32, ledger)
        self.ahead_ms = ahead_ms
        self.epoch, self.inst, self.seq = 7, 1_000 + index, 0
        self.sref: Sref | None = None

    def restart(self, epoch: int | None = None) -> None:
        self.epoch = epoch or self.epoch + 1
        self.inst += 100_000
        self.seq = 0
        self.sref = None

    def record(
        self,
        kind: Kind,
        body: bytes,
        now: int,
        *,
        seq: int | None = None,
        due_ms: int = 2_000,
        mesh_id: MeshId = MESH,
        sref: Sref | None = None,
    ) -> msg.Heard:
        if seq is None:
            self.seq += 1
        header = Header(
            kind=kind,
            mesh8=mesh8_of(mesh_id),
            id16=self.id16,
            epoch=self.epoch,
            inst=self.inst,
            seq=self.seq if seq is None else seq,
            mono_ms=now + self.ahead_ms,
            due_ms=due_ms if kind is Kind.V else 0,
            sref=sref,
            body=body,
        )
        sealed = seal(header, self.crypto)
        return msg.Heard(0, sealed.signed, sealed.sig)

    def v(self, now: int, body: Volatile | None = None, **how: object) -> msg.Heard:
        how.setdefault("sref", self.sref)
        return self.record(Kind.V, encode_plain(body or Volatile()), now, **how)  # type: ignore[arg-type]

    def s(self, now: int, body: Static | None = None, **how: object) -> msg.Heard:
        item = self.record(Kind.S, encode_plain(body or Static()), now, **how)  # type: ignore[arg-type]
        self.sref = sref_of(read_header(item.signed, mesh8_of(MESH)).seq, item.signed)
        return item

    def leave(self, now: int, **how: object) -> msg.Heard:
        return self.record(Kind.L, encode_plain(Leave(reason=LeaveReason.SHUTDOWN)), now, **how)  # type: ignore[arg-type]

    def hello(self, now: int, **changed: object) -> msg.Hello:
        fields: dict[str, object] = {
            "mesh8": mesh8_of(MESH),
            "id16": self.id16,
            "epoch": self.epoch,
            "inst": self.inst,
            "boot_ms": now + self.ahead_ms,
        }
        return msg.Hello(**{**fields, **changed})  # type: ignore[arg-type]


class Rig:
    """``rig.handle`` feeds one event and remembers its actions; ``rig.pass_ms`` ticks whenever the deadline says."""

    def __init__(
        self,
        peers: int = 2,
        *,
        epoch: int = 3,
        policy: MeshPolicy | None = None,
        start: bool = True,
        saved: Saved | None = None,
        roles: int = SPEAKER,
        seed: int = 1,
    ) -> None:
        self.ledger = Ledger(Timeline())
        self.me = Peer(0, self.ledger)
        self.peers = [Peer(index, self.ledger, roles) for index in range(1, peers + 1)]
        self.members = (self.me.member, *(peer.member for peer in self.peers))
        self.now = 1_000_000
        self.policy = policy or MeshPolicy()
        self.saved = saved or Saved(mesh_id=MESH, members=self.members, epoch=epoch)
        _, key32 = simulated_member(0)
        me = Me(id16=self.me.id16, key32=key32)
        self.mesh = Mesh(me, self.policy, self.me.crypto, Random(seed), self.saved, self.now)
        self.actions: list[Action] = []
        self.view: dict[Id16, ViewChange] = {}
        self._link = 0
        self._heard_at = self.now
        self._dialled: dict[Id16, None] = {}
        if start:
            self.bodies()
            self.handle(PersistDone(SavedKey.EPOCH, True))

    @property
    def parts(self):  # type: ignore[no-untyped-def]
        return self.mesh.parts

    def handle(self, event: Event) -> list[Action]:
        actions = self.mesh.handle(event, self.now)
        self._remember(actions)
        return actions

    def _remember(self, actions: list[Action]) -> None:
        self.actions += actions
        for action in actions:
            if isinstance(action, Dial):
                self._dialled[action.peer] = None
            elif isinstance(action, ViewChanged):
                self.view.update((change.origin, change) for change in action.changes)

    def bodies(
        self, volatile: Volatile | None = None, static: Static | None = None, urgent: bool = False
    ) -> list[Action]:
        return self.handle(
            BodyChanged(volatile=volatile or Volatile(), static=static or Static(), urgent=urgent)
        )

    def pass_ms(
        self, ms: int, *, alive: tuple[LinkId, ...] = (), answer: DialFailure | None = None
    ) -> list[Action]:
        """Let time pass. Links in ``alive`` deliver a PONG each half second; dials fail by ``answer``."""
        out: list[Action] = []
        end = self.now + ms
        while self.now < end:
            self.now = min(end, max(self.now + 1, self.mesh.deadline))
            if self.now - self._heard_at >= 500:
                self._heard_at = self.now
                for link in alive:
                    out += self.say(link, msg.Pong(nonce=0, boot_ms=self.now + 5_000_000))
            if self.now >= self.mesh.deadline:
                out += self.handle(Ticked())
            if answer is not None:
                for peer in list(self._dialled):
                    out += self._fail_dial(peer, answer)
        return out

    def _fail_dial(self, peer: Id16, why: DialFailure) -> list[Action]:
        del self._dialled[peer]
        return self.handle(DialFailed(peer, why))

    def sleep_ms(self, ms: int) -> None:
        """Time passes and nothing runs."""
        self.now += ms

    def say(self, link: LinkId, *messages: msg.Message) -> list[Action]:
        out: list[Action] = []
        for message in messages:
            out += self.handle(FrameReceived(link, msg.encode(message)))
            while self.mesh.backlog:
                out += self.handle(Resumed())
        return out

    def records(self, link: LinkId, *items: msg.Heard) -> list[Action]:
        return self.say(link, msg.Recs(items))

    def open(self, peer: Peer, *, dialled: bool = False) -> LinkId:
        if peer.id16 in self._dialled and not dialled:
            self._fail_dial(peer.id16, DialFailure.UNTRUSTED)
        self._dialled.pop(peer.id16, None)
        self._link += 1
        link = LinkId(self._link)
        self.handle(LinkOpened(link=link, peer=peer.id16, dialled=dialled))
        return link

    def link_up(self, peer: Peer, *, dialled: bool = False, states: tuple[msg.HaveState, ...] = ()) -> LinkId:
        link = self.open(peer, dialled=dialled)
        self.say(link, peer.hello(self.now), msg.Have(chunk=0, chunks=1, states=states))
        return link

    def fresh(self, peer: Peer) -> LinkId:
        """A linked peer whose S and V are held."""
        link = self.link_up(peer)
        self.records(link, peer.s(self.now), peer.v(self.now))
        return link

    # --- looking at actions ---

    def state(self, peer: Peer) -> Liveness | None:
        return self.mesh.parts.origins[peer.id16].state

    def reason(self, name: str) -> int:
        """How many records or messages got this verdict."""
        return sum(count for (_, reason), count in self.mesh.parts.receiver.counts.items() if reason == name)


def frames(actions: list[Action], link: LinkId | None = None) -> list[msg.Message]:
    """Messages sent, on one link or on all."""
    out = []
    for action in actions:
        if isinstance(action, SendFrame) and link in (None, action.link):
            message = msg.decode(action.data)
            assert message is not None
            out.append(message)
    return out


def headers(actions: list[Action], link: LinkId | None = None, mesh_id: MeshId = MESH) -> list[Header]:
    """Headers of all records sent."""
    return [
        read_header(item.signed, mesh8_of(mesh_id))
        for message in frames(actions, link)
        if isinstance(message, msg.Recs)
        for item in message.items
    ]


def byes(actions: list[Action], link: LinkId | None = None) -> list[msg.ByeCode]:
    return [msg.ByeCode(m.code) for m in frames(actions, link) if isinstance(m, msg.Bye)]


def closed(actions: list[Action]) -> list[LinkId]:
    return [action.link for action in actions if isinstance(action, CloseLink)]


def dials(actions: list[Action]) -> list[Id16]:
    return [action.peer for action in actions if isinstance(action, Dial)]


def alarms(actions: list[Action]) -> list[str]:
    return [action.code.value for action in actions if isinstance(action, Notify)]


def persists(actions: list[Action], key: SavedKey = SavedKey.EPOCH) -> list[Persist]:
    return [action for action in actions if isinstance(action, Persist) and action.key is key]


def forged(item: msg.Heard) -> msg.Heard:
    """The record with one bit of its signature flipped."""
    return msg.Heard(item.age_ms, item.signed, bytes([item.sig[0] ^ 1]) + item.sig[1:])


def resealed(sealed: Sealed) -> msg.Heard:
    return msg.Heard(0, sealed.signed, sealed.sig)
