"""Tables that kernels look codes up in: the grids of IQ types, as the `gguf` package has them.

A grid has 8 (or 4) bytes for each code; behind it are 128 bytes, the signs of 8 weights for each
code of 7 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pi2.arrays import U8

GRIDS: Mapping[str, int] = {
    "iq1_s": 2048 * 8,
    "iq1_m": 2048 * 8,
    "iq2_xxs": 256 * 8,
    "iq2_xs": 512 * 8,
    "iq2_s": 1024 * 8,
    "iq3_xxs": 256 * 4,
    "iq3_s": 512 * 4,
}
"""Bytes of each format's grid."""


def make_tables(name: str) -> U8:
    """Return the tables of a format; zeros where it has none."""
    if name not in GRIDS:
        return np.zeros(64, np.uint8)
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    values = np.asarray(kind.grid).reshape(-1)
    if name.startswith("iq1"):
        # -1, 0 and 1 in eighths, to which an eighth is added or not.
        values = values * 8
    grid: U8 = values.astype(np.int8).view(np.uint8)
    assert grid.size == GRIDS[name]
    signs: U8 = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
    return np.ascontiguousarray(np.concatenate([grid, signs]))
