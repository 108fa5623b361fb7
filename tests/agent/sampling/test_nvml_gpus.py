"""What replies of the driver's process come to: identities, readings, and what errors mean."""

from collections import Counter
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.sampling.nvml_gpus import DROP_MS, LIST_MS, GpuBook
from agent.sampling.nvml_states import Absence
from agent.sampling.nvml_wire import IMPLAUSIBLE, NvmlRefusal, NvmlReply
from router_core.policy.pressure import GIB
from router_core.pressure.samples import GpuSample, ReadingStatus, measured
from router_core.record.state import GpuState
from tests.support.host_samples import host

FIELDS: dict[str, Any] = {
    "name": "NVIDIA RTX", "bus": "00000000:01:00.0", "cc10": 89, "display": 1, "persistence": 0, "addressing": 0,
    "bus_bits": 384, "mem_mhz": 10_501, "vram_total": 24 * GIB, "vram_free": 20 * GIB, "vram_used": 3 * GIB,
}  # fmt: skip
FAST: dict[str, Any] = {"util": 40, "vram_total": 24 * GIB, "vram_free": 18 * GIB, "vram_used": 5 * GIB}


class Desk:
    """A book that is fed replies by hand."""

    def __init__(self, *uuids: str, **fields: Any) -> None:
        self.now = 1_000
        self.errors: Counter[int] = Counter()
        self.lost: list[tuple[str, int]] = []
        self.back: list[str] = []
        self.book = GpuBook(
            count=lambda code: self.errors.update([code]),
            lost=lambda key, code: self.lost.append((key, code)),
            back=self.back.append,
        )
        self.fields = {uuid: FIELDS | {"bus": f"0:{n}"} | fields for n, uuid in enumerate(uuids or ("a",))}
        self.list()

    def list(self, *uuids: str) -> None:
        listed = {uuid: self.fields[uuid] for uuid in (uuids or self.fields)}
        self.book.listed(NvmlReply(id=1, ok=True, t=self.now, gpu=listed), self.now)

    def read(self, **gpus: dict[str, Any]) -> Absence | None:
        self.now += 1_000
        told = {uuid: FAST | changes for uuid, changes in gpus.items()}
        self.book.read(NvmlReply(id=1, ok=True, t=self.now, gpu=told), self.now)
        return self.book.verdict

    def samples(self, absence: GpuState | None = None) -> tuple[GpuSample, ...]:
        return self.book.samples(absence, host(self.now))

    @property
    def one(self) -> GpuSample:
        (sample,) = self.samples()
        return sample


def every(code: int) -> dict[str, NvmlRefusal]:
    return dict.fromkeys(FAST, NvmlRefusal(code))


def test_a_gpu_is_known_by_the_hash_of_its_uuid_and_listed_by_bus_id() -> None:
    desk = Desk("b", "a")
    assert [sample.identity.bus_id for sample in desk.samples()] == ["0:0", "0:1"]
    first = desk.samples()[0].identity
    assert (first.key, len(first.key)) == ("3e23e8160039594a", 16)
    assert (first.cc10, first.display, first.persistence, first.mem_bw_gbs) == (89, True, False, 1_008)
    assert first.vram_total_bytes == 24 * GIB


def test_readings_have_the_time_they_were_taken() -> None:
    desk = Desk()
    assert desk.read(a={}) is None
    assert desk.one.util_pct == measured(40, 2_000)
    assert desk.one.vram_free_bytes == measured(18 * GIB, 2_000)
    assert desk.one.state is GpuState.OK


def test_one_field_that_fails_leaves_the_others_alone() -> None:
    desk = Desk()
    desk.read(a={"util": NvmlRefusal(21)})
    assert (desk.one.util_pct.value, desk.one.util_pct.status) == (None, ReadingStatus.UNKNOWN)
    assert desk.one.vram_free_bytes.value == 18 * GIB
    assert desk.one.state is GpuState.OK
    assert desk.errors == {21: 1}


@pytest.mark.parametrize("code", [3, 13, 25, 26, 1001])
def test_what_the_platform_cannot_tell_is_unsupported_and_used_once_it_appears(code: int) -> None:
    desk = Desk()
    desk.read(a={"util": NvmlRefusal(code)})
    assert desk.one.util_pct.status is ReadingStatus.UNSUPPORTED
    assert desk.read(a={}) is None
    assert desk.one.util_pct.value == 40


@pytest.mark.parametrize("value", [101, -1, 2**32 - 1, 2**63 - 1, 2**64 - 3, "40", None])
def test_an_implausible_value_is_no_value(value: object) -> None:
    desk = Desk()
    desk.read(a={"util": value, "vram_used": 25 * GIB})
    assert (desk.one.util_pct.value, desk.one.util_pct.code) == (None, IMPLAUSIBLE)
    assert desk.one.vram_free_bytes.value is None
    assert desk.errors[IMPLAUSIBLE] == 2


@pytest.mark.parametrize("code", [8, 15, 16, 28])
def test_a_lost_gpu_is_asked_no_more_and_the_other_goes_on(code: int) -> None:
    desk = Desk("a", "b")
    assert desk.read(a={}, b=every(code)) is None
    assert [sample.state for sample in desk.samples()] == [GpuState.OK, GpuState.LOST]
    assert desk.samples()[1].vram_free_bytes.value is None
    assert desk.book.wanted == ("a",)
    assert [lost[1] for lost in desk.lost] == [code]
    assert not desk.book.list_due(desk.now)
    desk.now += LIST_MS
    assert desk.book.list_due(desk.now)
    desk.list("a", "b")
    assert [sample.state for sample in desk.samples()] == [GpuState.OK, GpuState.OK]
    assert len(desk.back) == 1


def test_a_gpu_that_is_not_listed_any_more_is_lost_and_forgotten_ten_minutes_later() -> None:
    desk = Desk("a", "b")
    desk.list("a")
    assert [sample.state for sample in desk.samples()] == [GpuState.OK, GpuState.LOST]
    desk.now += DROP_MS
    desk.list("a")
    assert len(desk.samples()) == 1


def test_a_handle_that_is_not_found_means_a_lost_gpu() -> None:
    desk = Desk()
    desk.read(a={"handle": NvmlRefusal(6)})
    assert desk.one.state is GpuState.LOST


@pytest.mark.parametrize("code", [1, 2, 5])
def test_our_own_misuse_of_the_library_recycles_the_process_once_in_ten_minutes(code: int) -> None:
    desk = Desk()
    assert desk.read(a={"util": NvmlRefusal(code)}) is Absence.RECYCLE
    assert desk.read(a={"util": NvmlRefusal(code)}) is None
    desk.now += 600_000
    assert desk.read(a={"util": NvmlRefusal(code)}) is Absence.RECYCLE


@pytest.mark.parametrize("code", [10, 17, 20, 23, 27, 29, 77])
def test_a_field_that_fails_three_times_in_a_row_recycles_the_process(code: int) -> None:
    desk = Desk()
    desk.read(a={})
    assert [desk.read(a={"util": NvmlRefusal(code)}) for _ in range(3)] == [None, None, Absence.RECYCLE]
    assert desk.errors[code] == 3


@pytest.mark.parametrize("code", [6, 7, 21])
def test_nothing_to_tell_at_the_moment_never_recycles_the_process(code: int) -> None:
    desk = Desk()
    assert [desk.read(a={"util": NvmlRefusal(code)}) for _ in range(10)] == [None] * 10


@pytest.mark.parametrize("code", [9, 12, 18])
def test_a_driver_that_goes_away_ends_the_process(code: int) -> None:
    desk = Desk()
    assert desk.read(a=every(code)) is Absence.INIT


def test_unknown_errors_of_all_gpus_after_success_mean_that_access_was_revoked() -> None:
    desk = Desk("a", "b")
    desk.read(a={}, b={})
    assert [desk.read(a=every(999), b=every(999)) for _ in range(3)] == [None, None, Absence.DENIED]


def test_unknown_errors_of_one_gpu_are_its_own() -> None:
    desk = Desk("a", "b")
    desk.read(a={}, b={})
    assert Absence.DENIED not in [desk.read(a={}, b=every(999)) for _ in range(5)]


def test_no_permission_is_said_as_such() -> None:
    desk = Desk()
    desk.read(a=every(4))
    assert desk.one.state is GpuState.DENIED


@pytest.mark.parametrize("absence", [GpuState.UNKNOWN, GpuState.UNRESPONSIVE, GpuState.DENIED])
def test_while_nobody_answers_the_gpus_are_in_that_state_but_a_lost_one_stays_lost(absence: GpuState) -> None:
    desk = Desk("a", "b")
    desk.read(a={}, b=every(15))
    assert [sample.state for sample in desk.samples(absence)] == [absence, GpuState.LOST]


@pytest.mark.parametrize(
    ("fields", "unified"),
    [
        (
            {
                "name": "NVIDIA GB10",
                "vram_total": NvmlRefusal(3),
                "vram_free": NvmlRefusal(3),
                "vram_used": NvmlRefusal(3),
            },
            True,
        ),
        (
            {
                "name": "Orin (nvgpu)",
                "vram_total": NvmlRefusal(3),
                "vram_free": NvmlRefusal(3),
                "vram_used": NvmlRefusal(3),
            },
            True,
        ),
        ({"name": "NVIDIA GB10", "vram_total": 62 * GIB}, True),
        (
            {
                "addressing": 2,
                "vram_total": NvmlRefusal(3),
                "vram_free": NvmlRefusal(3),
                "vram_used": NvmlRefusal(3),
            },
            True,
        ),
        ({"addressing": 2, "vram_total": 24 * GIB}, False),
        ({"vram_total": 62 * GIB}, False),
        ({"vram_total": NvmlRefusal(3), "vram_free": NvmlRefusal(3), "vram_used": NvmlRefusal(3)}, False),
    ],
)
def test_memory_is_the_hosts_only_where_size_and_name_say_so(fields: dict[str, Any], unified: bool) -> None:
    desk = Desk(**fields)
    sample = desk.one
    assert sample.identity.unified is unified
    if unified:
        assert sample.vram_free_bytes.value == 40 * GIB
        assert sample.identity.vram_total_bytes == 64 * GIB
        assert sample.state is GpuState.OK


NONE_TOLD = {"vram_total": NvmlRefusal(3), "vram_free": NvmlRefusal(3), "vram_used": NvmlRefusal(3)}
ZERO = {"vram_total": 0, "vram_free": 0, "vram_used": 0}
ALL_THE_HOSTS = {"vram_total": 62 * GIB, "vram_free": 62 * GIB, "vram_used": 0}


@pytest.mark.parametrize("changes", list(permutations([NONE_TOLD, ZERO, ALL_THE_HOSTS])), ids=str)
@pytest.mark.parametrize(
    "built_in", [{"addressing": 2, "name": "NVIDIA N1X"}, {"name": "NVIDIA GB10"}], ids=str
)
def test_a_gpu_built_into_the_processor_stays_one_however_its_driver_tells_of_memory(
    built_in: dict[str, Any], changes: tuple[dict[str, Any], ...]
) -> None:
    desk = Desk(**built_in, **changes[0])
    for change in changes:
        desk.read(a=change)
        sample = desk.one
        assert (sample.state, sample.identity.unified) == (GpuState.OK, True)
        assert sample.vram_free_bytes.value == 40 * GIB
        assert sample.identity.vram_total_bytes == 64 * GIB


def test_a_card_that_once_told_of_memory_of_its_own_never_shares_the_hosts() -> None:
    desk = Desk(addressing=2)
    for change in (FAST, ZERO, NONE_TOLD):
        desk.read(a=change)
        assert not desk.one.identity.unified


@pytest.mark.parametrize(
    "reply",
    [
        ZERO,
        {"vram_used": 25 * GIB},
        {"vram_free": 25 * GIB},
        {"vram_free": 2**64 - 1, "vram_used": 0},
        {"vram_used": -1},
        {"vram_total": 2**50},
        {"vram_total": "24"},
    ],
    ids=str,
)
def test_of_a_reply_about_memory_with_one_impossible_figure_nothing_is_believed(
    reply: dict[str, Any],
) -> None:
    desk = Desk()
    desk.read(a=reply)
    sample = desk.one
    assert (sample.vram_free_bytes.status, sample.vram_free_bytes.code) == (
        ReadingStatus.UNKNOWN,
        IMPLAUSIBLE,
    )
    assert sample.util_pct.value == 40
    assert desk.errors == {IMPLAUSIBLE: 1}
    assert desk.book.unread() == {sample.identity.key: (f"memory ({IMPLAUSIBLE})",)}


@pytest.mark.parametrize(
    "reply", [{"util": 101}, {"util_memory": 4_000}, {"util": 0, "util_memory": 101}], ids=str
)
def test_of_a_reply_about_use_with_one_impossible_figure_nothing_is_believed(reply: dict[str, Any]) -> None:
    desk = Desk()
    desk.read(a={"util_memory": 7} | reply)
    assert desk.one.util_pct.code == IMPLAUSIBLE
    assert desk.one.vram_free_bytes.value == 18 * GIB


def test_a_card_as_large_as_the_host_memory_stays_a_card() -> None:
    desk = Desk(vram_total=64 * GIB, vram_free=60 * GIB)
    assert not desk.one.identity.unified


def test_memory_that_cannot_be_told_makes_the_gpu_unsupported() -> None:
    desk = Desk()
    desk.read(a={name: NvmlRefusal(3) for name in ("vram_total", "vram_free", "vram_used")})
    assert desk.one.state is GpuState.UNSUPPORTED
    assert desk.one.usable


VALUE = st.one_of(
    st.integers(0, 100),
    st.integers(0, 2**64),
    st.builds(NvmlRefusal, st.sampled_from([0, 1, 3, 4, 6, 9, 13, 15, 21, 25, 999, 1001])),
    st.none(),
    st.text(max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(
    reads=st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "z"]),
            st.dictionaries(st.sampled_from([*FAST, "handle"]), VALUE, max_size=5),
        ),
        max_size=12,
    )
)
def test_whatever_is_answered_values_are_plausible_or_none(reads: list[dict[str, dict[str, Any]]]) -> None:
    desk = Desk("a", "b")
    for gpus in reads:
        desk.now += 1_000
        desk.book.read(NvmlReply(id=1, ok=True, t=desk.now, gpu=gpus), desk.now)
        for sample in desk.samples():
            assert sample.util_pct.value is None or 0 <= sample.util_pct.value <= 100
            free = sample.vram_free_bytes
            assert free.value is None or 0 <= free.value <= 2**44
            assert (free.value is None) == (free.status not in (ReadingStatus.OK, ReadingStatus.STALE))
            if sample.state is GpuState.LOST:
                assert free.value is None
