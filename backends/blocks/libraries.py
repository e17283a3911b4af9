"""Compiled kernels, by format and name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

from pi2.backends.blocks.contract import FIELDS
from pi2.backends.blocks.spec import COMMON, STEPS, BlockSpec
from pi2.backends.compiler.cache import load_or_compile_several
from pi2.backends.compiler.functions import refuse_library
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

        names = (STEPS, COMMON, *sorted(formats))
        specs = [BlockSpec(library=name, architecture=architecture, features=own) for name in names]
        self.isa = specs[0].isa
        self.steps, *paths = load_or_compile_several(specs, progress)
        self._loaded = {
            name: open_library(path) for name, path in zip(names[1:], paths, strict=True)
        }

    def find(self, kernel: str, own: str | None = None) -> int:
        """Return the address of a kernel, of the format ``own`` if it belongs to one."""
        assert kernel in FIELDS
        library = self._loaded[COMMON if own is None else own]
        address = ctypes.cast(getattr(library, kernel), ctypes.c_void_p).value
        assert address is not None
        return address


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library; `UserError` P655 if that is not possible."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise refuse_library(path, error) from None
