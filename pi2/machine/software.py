"""Software that pi2 can use on this machine: TVM, linkers, emulators, OpenCL.

Nothing is imported or started: versions come from package metadata, programs from ``PATH``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LINKERS = ("ld", "ld.lld", "gcc", "clang")
"""Programs that turn compiled kernels into libraries."""

EMULATORS = ("qemu-aarch64", "qemu-hexagon")
"""Programs that run kernels of other processors, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tvm:
    """The installed TVM packages; None for what is missing."""

    version: str | None
    """Version of ``apache-tvm``, the compiler and its runtime."""
    ffi_version: str | None
    """Version of ``apache-tvm-ffi``, which loads and calls kernels."""
    ffi_wanted: str | None
    """The version that this pi2 was released with; others crashed in tests."""
    runtime_library: Path | None
    """``libtvm_runtime``: all of TVM that a run needs."""


def detect_tvm() -> Tvm:
    """Find the TVM packages without importing them."""
    return Tvm(
        version=_read_version("apache-tvm"),
        ffi_version=_read_version("apache-tvm-ffi"),
        ffi_wanted=_find_pin("apache-tvm-ffi"),
        runtime_library=_find_runtime_library(),
    )


def find_programs(names: Sequence[str]) -> Mapping[str, str | None]:
    """Path of each program, None where it is missing; a ``-static`` build counts as well."""
    return {name: shutil.which(name) or shutil.which(f"{name}-static") for name in names}


def _read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_pin(package: str) -> str | None:
    """Version that the installed pi2 demands exactly."""
    try:
        requirements = importlib.metadata.requires("pi2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(rf"{re.escape(package)}\s*==\s*([^\s;,]+)", requirement)
        if match:
            return match[1]
    return None


def _find_runtime_library() -> Path | None:
    spec = importlib.util.find_spec("tvm")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    for folder in folders:
        library = Path(folder) / "lib" / f"libtvm_runtime.{suffix}"
        if library.is_file():
            return library
    return None
