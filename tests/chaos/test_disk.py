"""Disks that are full and state files in ruins, under real daemons."""

import shutil
from pathlib import Path

import pytest

from tests.support.chaos.mesh import Mesh, lines_of, meshed
from tests.support.chaos.node import NodeProc
from tests.support.chaos.run import Run
from tests.support.chaos.waiting import hold, until

pytestmark = [pytest.mark.chaos, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

FULL_S = 3.0
STORED_S = 15.0
RPS = 5.0
REFUSED = 78
LINES_MOST = 20
"""Log lines about a disk that fails, requests aside."""


def fill(folder: Path) -> Path:
    """Take every free block of ``folder``'s disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return filler


def complaints(node: NodeProc) -> list[str]:
    """Its log without requests and the operator's own acts."""
    aside = ('"event":"request"', '"event":"admin.', '"event":"trust.', '"event":"ready"')
    return [line for line in node.log.read_text().splitlines() if not any(word in line for word in aside)]


async def test_a_full_disk_stops_no_request(whole: Mesh) -> None:
    b = whole["b"]
    before = len(complaints(b))
    async with whole.loaded("b", rps=RPS) as load:
        filler = fill(b.state)
        await hold(FULL_S)
        (line,) = await whole.burst("a", 1, headers={"x-pairmesh-require": "node=@b"})
        assert (line["outcome"], line["node"]) == ("whole", "@b/fake")
        filler.unlink()
        await hold(FULL_S)
    assert {line["outcome"] for line in lines_of(load)} == {"whole"}
    assert len(complaints(b)) - before <= LINES_MOST, complaints(b)[before:]


async def test_a_removal_made_on_a_full_disk_holds_and_is_stored_when_there_is_room(run: Run) -> None:
    async with meshed(run.base, "removal", ("a", "b")) as mesh:
        a, b = mesh["a"], mesh["b"]
        entry = b.state / "roster" / a.node_id
        kept = entry.read_bytes()
        filler = fill(b.state)
        await b.do("trust-remove", ref="@a")
        assert "a" not in await b.members()
        assert entry.read_bytes() == kept
        filler.unlink()

        async def stored() -> bool:
            return entry.read_bytes() != kept

        await until(stored, STORED_S, "the removal is on disk")
        await b.kill()
        await b.start()
        assert "a" not in await b.members()


def ruin(path: Path, how: str) -> None:
    """Damage one file and what was kept of the one before."""
    for each in (path, path.with_name(path.name + ".last")):
        if not each.exists():
            continue
        content = each.read_bytes()
        if how == "truncated":
            each.write_bytes(content[: len(content) // 2])
        elif how == "flipped":
            each.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))
        elif how == "empty":
            each.write_bytes(b"")
        else:
            each.unlink()
            each.mkdir()


async def refused(node: NodeProc) -> str:
    """Start a daemon that must not start; what it said."""
    with pytest.raises(RuntimeError, match="did not become ready"):
        await node.start()
    assert node.process is not None
    assert node.process.returncode == REFUSED
    return node.log_tail(3)


async def test_files_that_can_be_made_anew_cost_nothing_but_what_was_in_them(whole: Mesh) -> None:
    b = whole["b"]
    for hows in (("truncated", "flipped", "empty"), ("empty", "folder", "folder")):
        before = await b.epoch()
        await b.kill()
        for name, how in zip(("epoch", "floors", f"peers/{whole['a'].node_id}"), hows, strict=True):
            ruin(b.state / name, how)
        for name in ("profiles.sqlite", "journal.sqlite"):
            for path in b.state.glob(f"{name}*"):
                path.write_bytes(b"no database " * 512)
        (b.state / "identity" / "cert.pem").write_bytes(b"")
        await b.start()
        assert (await b.get("/v1/status"))["own"]["id"] == b.node_id
        await whole.full_view()

        async def above(before: int = before) -> bool:
            return await b.epoch() > before

        await until(above, 5.0, "its epoch is above all it ever had")
        lines = await whole.burst("b", 6)
        assert {line["outcome"] for line in lines} == {"whole"}


async def test_a_roster_entry_in_ruins_is_set_aside_and_the_rest_stays(run: Run) -> None:
    async with meshed(run.base, "entry", ("a", "b", "c")) as mesh:
        a, b = mesh["a"], mesh["b"]
        await b.kill()
        ruin(b.state / "roster" / a.node_id, "truncated")
        await b.start()
        assert set(await b.members()) == {"b", "c"}
        assert any(a.node_id in fault for fault in await b.faults())
        own = await a.do("trust-export")
        await b.do("trust-add", file=own["file"], id=own["id"])
        await mesh.full_view()


async def test_an_identity_in_ruins_is_refused_and_never_replaced(run: Run) -> None:
    async with meshed(run.base, "identity", ("a", "b")) as mesh:
        b = mesh["b"]
        await b.kill()
        for name in ("identity/key.pem", "identity/mesh"):
            for how in ("truncated", "empty"):
                path = b.state / name
                saved = b.base / "saved"
                shutil.copytree(path.parent, saved)
                ruin(path, how)
                assert path.name in await refused(b)
                shutil.rmtree(path.parent)
                shutil.copytree(saved, path.parent)
                shutil.rmtree(saved)
        await b.start()
        assert (await b.get("/v1/status"))["own"]["id"] == b.node_id
        await mesh.full_view()
