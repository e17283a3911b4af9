"""Compiled kernels, by format and name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from pi2.backends.blocks.contract import FIELDS
from pi2.backends.blocks.spec import COMMON, STEPS, BlockSpec
from pi2.backends.compiler.cache import load_or_compile
from pi2.progress import Progress, ignore_progress


class Libraries:
    """The libraries of some formats, and what is common to all."""

    def __init__(
        self,
        formats: Iterable[str],
        *,
        architecture: str,
        features: Iterable[str],
        progress: Progress = ignore_progress,
    ) -> None:
        """Load them, compiled now unless they are cached."""
        own = tuple(sorted(features))

        def load(library: str) -> Path:
            spec = BlockSpec(library=library, architecture=architecture, features=own)
            return load_or_compile(spec, progress)

        self.isa = BlockSpec(library=COMMON, architecture=architecture, features=own).isa
        self.steps = load(STEPS)
        self._loaded = {name: ctypes.CDLL(str(load(name))) for name in (COMMON, *sorted(formats))}

    def find(self, kernel: str, own: str | None = None) -> int:
        """Return the address of a kernel, of the format ``own`` if it belongs to one."""
        assert kernel in FIELDS
        library = self._loaded[COMMON if own is None else own]
        address = ctypes.cast(getattr(library, kernel), ctypes.c_void_p).value
        assert address is not None
        return address
