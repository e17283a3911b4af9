"""AMX's tiles, whose contents Linux saves for those processes alone that have asked for them."""

from __future__ import annotations

import ctypes
import platform
import sys

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


def permit_tiles() -> bool:
    """Ask the system for tiles, for all threads of this process; return whether it may use them.

    Source: Linux, Documentation/arch/x86/xstate.rst (``ARCH_REQ_XCOMP_PERM``).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    library = ctypes.CDLL(None)
    return bool(library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
