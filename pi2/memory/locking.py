"""Keeping memory where it is: Linux's mlock, where the system allows it.

A phone compresses memory that a program does not touch for a while (zram), and ordinary users may
lock only a little (``ulimit -l``; 64 KiB to 8 MiB as a rule).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

_ON_FAULT = 1
"""MLOCK_ONFAULT: pages are locked when they are touched, and take no memory before."""


def lock_regions(regions: Sequence[tuple[int, int]]) -> str | None:
    """Lock regions, address and bytes each; return why that cannot be, and lock none then."""
    for number, (address, size) in enumerate(regions):
        problem = _lock(address, size)
        if problem is not None:
            for locked in regions[:number]:
                unlock_region(*locked)
            return problem
    return None


def unlock_region(address: int, size: int) -> None:
    """Let the system take the pages of a region; nothing happens to one that is not locked."""
    library = _load_library()
    if library is not None:
        library.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size))


def _load_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.mlock, library.munlock  # noqa: B018 - not every system has them
    except (OSError, AttributeError):
        return None
    return library


def _lock(address: int, size: int) -> str | None:
    library = _load_library()
    if library is None:
        return "this system has no mlock"
    place, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
    code = errno.ENOSYS
    if hasattr(library, "mlock2"):
        code = 0 if library.mlock2(place, length, _ON_FAULT) == 0 else ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        code = 0 if library.mlock(place, length) == 0 else ctypes.get_errno()
    if code == 0:
        return None
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        return f"{os.strerror(code)}: the limit of locked memory (ulimit -l) is lower"
    return os.strerror(code)
