"""AMX's tiles: Linux saves their contents only for processes that have asked for them."""

import ctypes
import platform
import sys

_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18


def permit_tiles() -> bool:
    """Ask Linux for AMX tiles for all threads (``ARCH_REQ_XCOMP_PERM``); whether it permits."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    library = ctypes.CDLL(None)
    return bool(library.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)
