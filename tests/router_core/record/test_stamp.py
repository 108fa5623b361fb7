import pytest
from hypothesis import given
from hypothesis import strategies as st

from router_core.record.stamp import ZERO, Stamp, StampVerdict, judge

stamps = st.builds(Stamp, st.integers(1, 4), st.integers(1, 4))
insts = st.integers(1, 2)


def told(
    stamp: Stamp,
    *,
    inst: int = 1,
    held: Stamp | None = None,
    held_inst: int = 1,
    same_bytes: bool = False,
    floor: Stamp = ZERO,
    named: bool = False,
    own: bool = False,
) -> StampVerdict:
    return judge(
        stamp, inst, own=own, held=held, held_inst=held_inst, same_bytes=same_bytes, floor=floor, named=named
    )


def test_the_first_record_is_newer() -> None:
    assert told(Stamp(1, 1)) is StampVerdict.NEWER


@pytest.mark.parametrize(
    ("stamp", "verdict"),
    [
        (Stamp(2, 6), StampVerdict.NEWER),
        (Stamp(3, 1), StampVerdict.NEWER),
        (Stamp(2, 4), StampVerdict.OLDER),
        (Stamp(1, 900), StampVerdict.OLDER),
        (Stamp(2**40, 1), StampVerdict.NEWER),
    ],
)
def test_epoch_comes_before_seq_and_no_jump_is_too_far(stamp: Stamp, verdict: StampVerdict) -> None:
    assert told(stamp, held=Stamp(2, 5)) is verdict


def test_the_same_stamp_and_bytes_are_a_duplicate() -> None:
    assert told(Stamp(2, 5), held=Stamp(2, 5), same_bytes=True) is StampVerdict.DUPLICATE


def test_the_same_stamp_with_other_bytes_is_an_equivocation() -> None:
    assert told(Stamp(2, 5), held=Stamp(2, 5)) is StampVerdict.EQUIVOCATION


def test_the_same_stamp_of_another_process_life_is_older() -> None:
    assert told(Stamp(2, 5), inst=2, held=Stamp(2, 5)) is StampVerdict.OLDER


def test_nothing_at_or_below_the_floor_comes_back_but_a_static_named_by_hash() -> None:
    assert told(Stamp(2, 5), floor=Stamp(2, 5)) is StampVerdict.BELOW_FLOOR
    assert told(Stamp(2, 6), floor=Stamp(2, 5)) is StampVerdict.NEWER
    assert told(Stamp(2, 5), floor=Stamp(2, 5), named=True) is StampVerdict.NEWER


def test_an_own_record_is_own_whatever_its_stamp() -> None:
    assert told(Stamp(9, 9), own=True, held=Stamp(1, 1)) is StampVerdict.OWN


@given(arriving=st.lists(st.tuples(stamps, insts), max_size=12), floor=stamps)
def test_a_slot_that_takes_only_newer_records_never_falls(
    arriving: list[tuple[Stamp, int]], floor: Stamp
) -> None:
    held: Stamp | None = None
    held_inst = 0
    for stamp, inst in arriving:
        if told(stamp, inst=inst, held=held, held_inst=held_inst, floor=floor) is StampVerdict.NEWER:
            assert held is None or stamp > held
            assert stamp > floor
            held, held_inst = stamp, inst
