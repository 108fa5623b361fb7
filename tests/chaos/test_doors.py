"""What chaos tests may do to the machine goes through one door; how they wait, through another."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos import namespaces
from tests.support.chaos.run import Run

HERE = Path(__file__).parent
FORBIDDEN = frozenset(
    {"subprocess.run", "subprocess.Popen", "os.system", "os.kill", "os.killpg", "time.sleep", "asyncio.sleep"}
)


def calls(source: str) -> Iterator[str]:
    """Dotted names of everything that is called."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield ast.unparse(node.func)


def test_no_chaos_test_sleeps_runs_tools_or_kills_by_number() -> None:
    for path in HERE.glob("*.py"):
        assert FORBIDDEN.isdisjoint(calls(path.read_text())), path.name
    assert "time.sleep" in set(calls("import time\ntime.sleep(1)"))


def test_the_door_opens_only_for_kernel_tools_and_firewalls_inside_a_namespace() -> None:
    with pytest.raises(ValueError, match="is not one of"):
        namespaces.sh("pkill", "python")
    with pytest.raises(ValueError, match="inside a namespace"):
        namespaces.sh("nft", "list", "ruleset")


def test_only_names_of_chaos_runs_have_an_owner() -> None:
    assert namespaces.owner_of("pmc-42-network-a") == 42
    for name in ("eth0", "pmc-x-a", "docker", "pmc-42"):
        with pytest.raises(ValueError, match="not a name"):
            namespaces.owner_of(name)


@pytest.mark.chaos
def test_what_a_dead_run_left_is_removed_and_what_a_living_one_uses_is_not(run: Run, tmp_path: Path) -> None:
    dead = next(pid for pid in range(4_194_303, 0, -1) if not namespaces.alive(pid))
    left = f"pmc-{dead}-left"
    namespaces.sh("ip", "netns", "add", left)
    namespaces.sh("mount", "-t", "tmpfs", left, str(tmp_path))
    used = namespaces.make_namespace("used")
    try:
        assert namespaces.reap() == [left]
        assert left not in namespaces.namespaces()
        assert used in namespaces.namespaces()
        assert str(tmp_path) not in {folder for _, folder in namespaces.mounts()}
        assert f"namespace {used}" in run.leftovers()
    finally:
        namespaces.remove_namespace(used)
