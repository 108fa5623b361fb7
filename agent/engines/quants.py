"""Names of quantisations: llama.cpp's numbers and long descriptions of file types as the short names people use.

A name is never guessed from a model's name, only read from what the engine tells.
"""

import re
from typing import Final

_SIZES: Final = {"Small": "S", "Medium": "M", "Large": "L"}
_SPECIAL: Final = {
    "all F32": "F32",
    "MXFP4 MoE": "MXFP4",
    "Q2_K - Medium": "Q2_K",
    "IQ3_S mix - 3.66 bpw": "IQ3_M",
}
_FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""``enum llama_ftype`` of llama.cpp's ``llama.h``."""
_SHORT = re.compile(r"[A-Z][A-Z0-9_]{1,23}")


def quant_of(told: str | None) -> str | None:
    """``Q4_K_M`` for ``Q4_K - Medium``, ``IQ4_XS`` for ``IQ4_XS - 4.25 bpw``; None for what is no file type."""
    if told is None:
        return None
    plain = told.removeprefix("(guessed) ").strip()
    if plain in _SPECIAL:
        return _SPECIAL[plain]
    name, _, rest = plain.partition(" - ")
    if rest in _SIZES:
        name = f"{name}_{_SIZES[rest]}"
    return name if _SHORT.fullmatch(name) else None


def file_type(number: int) -> str | None:
    """The short name of a GGUF file's ``general.file_type``."""
    return _FILE_TYPES.get(number)
