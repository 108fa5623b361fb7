"""The figures of a calm mesh keep to their formulas."""

from router_core.sim.mesh.report import measure


def test_ten_calm_nodes_send_what_the_formula_says_and_notice_a_crash() -> None:
    figures = measure(10, calm_ms=10_000)
    assert figures.formula_bytes_per_s // 2 <= figures.bytes_per_s <= figures.formula_bytes_per_s * 3 // 2
    assert figures.age_p99_ms <= 1_600
    assert figures.crash_suspect_ms <= 2_000
