"""Nominal bits per weight of a quantisation by its name. Only the order matters; an unknown name stays unknown.

Numbers are those of ggml's block layouts (bytes of a block over its weights), of mixes by their usual share of each; AWQ
and GPTQ add a quarter bit of scales for groups of 128. Of a family the least stands for members that are not named.
"""

import re
from functools import lru_cache
from typing import Final

_BITS: Final = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8": 8.5,
    "FP8": 8.0,
    "INT8": 8.0,
    "Q6": 6.6,
    "Q5_1": 6.0,
    "Q5_K_M": 5.7,
    "Q5": 5.5,
    "Q4_1": 5.0,
    "Q4_K_M": 4.9,
    "Q4_K_S": 4.7,
    "Q4": 4.5,
    "NVFP4": 4.5,
    "IQ4_NL": 4.5,
    "IQ4": 4.25,
    "MXFP4": 4.25,
    "Q3_K_L": 4.2,
    "Q3_K_M": 3.9,
    "Q3": 3.6,
    "IQ3": 3.4,
    "Q2": 3.0,
    "IQ2": 2.5,
    "IQ1": 1.8,
}
_LONGEST_FIRST: Final = sorted(_BITS, key=len, reverse=True)
_GROUPED: Final = re.compile(r"(?:AWQ|GPTQ)(?:[-_]?(?:INT)?([2-8])(?:[-_]?BIT)?)?")
_GROUPED_USUAL: Final = 4


@lru_cache(maxsize=256)
def nominal_bits(quant: str | None) -> float | None:
    """Bits per weight of ``quant``, in any letter case; None if the name is unknown."""
    if quant is None:
        return None
    upper = quant.upper()
    grouped = _GROUPED.fullmatch(upper)
    if grouped is not None:
        return int(grouped[1] or _GROUPED_USUAL) + 0.25
    return next((_BITS[prefix] for prefix in _LONGEST_FIRST if upper.startswith(prefix)), None)
