"""File types by the names llama.cpp tells."""

import pytest

from agent.engines.quants import quant_of


@pytest.mark.parametrize(
    ("told", "short"),
    [
        ("F16", "F16"),
        ("BF16", "BF16"),
        ("all F32", "F32"),
        ("Q8_0", "Q8_0"),
        ("Q2_K - Medium", "Q2_K"),
        ("Q2_K - Small", "Q2_K_S"),
        ("Q3_K - Large", "Q3_K_L"),
        ("Q4_K - Medium", "Q4_K_M"),
        ("(guessed) Q5_K - Small", "Q5_K_S"),
        ("Q6_K", "Q6_K"),
        ("IQ4_XS - 4.25 bpw", "IQ4_XS"),
        ("IQ3_S mix - 3.66 bpw", "IQ3_M"),
        ("TQ1_0 - 1.69 bpw ternary", "TQ1_0"),
        ("MXFP4 MoE", "MXFP4"),
        ("NVFP4", "NVFP4"),
        ("Q4_K_M", "Q4_K_M"),
        ("unknown, may not work", None),
        ("Q" * 40, None),
        ("", None),
        (None, None),
    ],
)
def test_long_names_become_short_ones(told: str | None, short: str | None) -> None:
    assert quant_of(told) == short
