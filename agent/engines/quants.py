"""Names of quantisations: llama.cpp's long descriptions of file types as the short names people use.

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
