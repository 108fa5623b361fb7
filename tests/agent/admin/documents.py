"""A status document as a daemon with three members answers it."""

from agent.admin.documents import EngineDoc, LinkDoc, MemberDoc, OwnDoc, PolicyDoc, ResidentDoc, StatusDoc


def engine(
    name: str = "llama", state: str = "ready", running: int | None = 1, models: tuple[str, ...] = ("tiny",)
) -> EngineDoc:
    return EngineDoc(
        name=name,
        kind="llamacpp",
        version=None,
        state=state,
        running=running,
        queued=None,
        slots=4,
        ours=running,
        work_s=1.5,
        age_ms=300,
        models=models,
    )


def member(
    name: str, letter: str, *, me: bool = False, link: LinkDoc | None = None, liveness: str = "fresh"
) -> MemberDoc:
    return MemberDoc(
        name=name,
        id=letter * 52,
        short_id="-".join([letter * 4] * 4),
        me=me,
        roles=("node", "router", "introducer"),
        liveness=liveness,
        routable=liveness == "fresh",
        flags=(),
        age_ms=400,
        epoch=2,
        link=link,
        version="0.1.0",
        level="none",
        engines=(engine(),),
        residents=(
            ResidentDoc(
                model="tiny", engine="llama", state="resident", running=1, waiting=0, mem_mib=700, ctx=4096
            ),
        ),
        in_flight=1,
        work_s=1.5,
        gen_tps=42.1,
    )


def unseen(name: str, letter: str, fault: str) -> MemberDoc:
    return MemberDoc(
        name=name,
        id=letter * 52,
        short_id="-".join([letter * 4] * 4),
        me=False,
        roles=("node",),
        liveness="gone",
        routable=False,
        flags=(),
        age_ms=None,
        epoch=None,
        link=LinkDoc(state="backoff", fault=fault),
        version=None,
        level=None,
        engines=(),
        residents=(),
        in_flight=None,
        work_s=None,
        gen_tps=None,
    )


def status() -> StatusDoc:
    """One node that answers, one up, one that refuses."""
    return StatusDoc(
        at_ms=1_700_000_000_000,
        own=OwnDoc(
            told=("192.168.1.5", "fd00::5"),
            name="atlas",
            id="a" * 52,
            mesh="00112233",
            version="0.1.0",
            pid=4_242,
            uptime_ms=3_661_000,
            epoch=2,
            roles=("node", "router", "introducer"),
            addresses={"api": "127.0.0.1:11433", "mesh": "0.0.0.0:7433"},
            policy=PolicyDoc(preset="balanced", hash="0011aabb"),
        ),
        members=(
            member("atlas", "a", me=True),
            member("borg", "b", link=LinkDoc(state="up", rtt_ms=0.42)),
            unseen("cyan", "c", "wrong_mesh"),
        ),
    )
