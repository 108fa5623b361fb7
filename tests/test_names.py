"""Every public class and function says what it is, and no public class name stands for two classes."""

from collections.abc import Sequence

import pytest

from scripts.census import Module, modules, shared_names, undocumented

SHARED_YET = frozenset(
    {
        "Action",
        "Attempt",
        "Cause",
        "Choosing",
        "Dial",
        "DryRuns",
        "Event",
        "Gate",
        "NoArguments",
        "Outcome",
        "Phase",
        "Question",
        "Queued",
        "Reading",
        "Result",
        "Target",
    }
)
"""Names of several classes, until all but one of each are renamed. It only ever gets shorter."""


@pytest.fixture(scope="module")
def product() -> Sequence[Module]:
    """The modules of both packages, but for the simulator."""
    return [
        module
        for package in ("agent", "router_core")
        for module in modules(package)
        if not module.is_simulator
    ]


def test_every_public_class_and_function_has_a_docstring(product: Sequence[Module]) -> None:
    assert undocumented(product) == []


def test_no_public_class_name_stands_for_two_classes(product: Sequence[Module]) -> None:
    found = {each.partition(":")[0]: each for each in shared_names(product)}

    assert [found[name] for name in sorted(found.keys() - SHARED_YET)] == []


def test_names_that_may_stand_for_two_classes_still_do(product: Sequence[Module]) -> None:
    found = {each.partition(":")[0] for each in shared_names(product)}

    assert SHARED_YET - found == set(), "renamed by now: take it off SHARED_YET"
