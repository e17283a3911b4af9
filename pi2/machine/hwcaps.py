"""What the kernel says of an aarch64 processor's features: the auxiliary vector's HWCAP.

It holds for every core, needs no ``/proc``, and is right where ``/proc/cpuinfo`` is another
machine's, as under qemu-user.  Source: arch/arm64/include/uapi/asm/hwcap.h of Linux.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pi2.plan.documents.device import IsaFeature

_HWCAP, _HWCAP2 = 16, 26
"""Entries of the vector (AT_HWCAP, AT_HWCAP2)."""
_BITS: Mapping[int, Mapping[int, IsaFeature]] = {
    _HWCAP: {1: "neon", 10: "fp16", 20: "dotprod", 22: "sve"},
    _HWCAP2: {13: "i8mm"},
}


def read_hwcaps() -> frozenset[IsaFeature] | None:
    """Features of every core; None where the C library does not tell."""
    try:
        ask = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return None
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    words = {entry: int(ask(entry)) for entry in _BITS}
    return name_features(words) if words[_HWCAP] else None


def name_features(words: Mapping[int, int]) -> frozenset[IsaFeature]:
    """Features by the entries of the vector."""
    return frozenset(
        name
        for entry, names in _BITS.items()
        for bit, name in names.items()
        if words.get(entry, 0) >> bit & 1
    )
