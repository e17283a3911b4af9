"""The storage behind a path: block size, and whether reads may go past the page cache."""

import errno
import importlib.util
import mmap
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pi2.machine.memory import read_int
from pi2.reads import find_mount

EMULATORS = ("qemu-aarch64", "qemu-hexagon")
"""Programs that run kernels of other processors, for tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tvm:
    """Versions of TVM packages; None for missing ones."""

    version: str | None
    """Version of ``apache-tvm``, the compiler and its runtime."""
    ffi_version: str | None
    """Version of ``apache-tvm-ffi``, which loads and calls kernels."""
    ffi_wanted: str | None
    """Versions that this pi2 works with, such as ``0.1.14.*``; others crashed in tests."""
    runtime_library: Path | None
    """``libtvm_runtime``: all of TVM that a run needs."""


def detect_tvm() -> Tvm:
    """Find the TVM packages without importing them."""
    return Tvm(
        version=read_version("apache-tvm"),
        ffi_version=read_version("apache-tvm-ffi"),
        ffi_wanted=_find_pin("apache-tvm-ffi"),
        runtime_library=_find_runtime_library(),
    )


def find_programs(names: Sequence[str]) -> Mapping[str, str | None]:
    """Path of each program, None where it is missing; a ``-static`` build counts as well."""
    return {name: shutil.which(name) or shutil.which(f"{name}-static") for name in names}


def read_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _find_pin(package: str) -> str | None:
    from importlib import metadata

    try:
        requirements = metadata.requires("pi2") or []
    except metadata.PackageNotFoundError:
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


_PROBE_BLOCKS = (512, 4096)
"""Alignments of direct reads that are tried, smallest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectReads:
    """Whether a file system reads directly (O_DIRECT), tried on a real file."""

    works: bool
    align_bytes: int | None = None
    """Smallest offset and length that worked."""
    obstacle: str | None = None
    """Why it does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What holds a path."""

    path: Path
    filesystem: str | None
    """Type of the file system, such as ``ext4``."""
    device: str | None
    """Name of the block device, such as ``nvme0n1``; None where there is none to see."""
    block_bytes: int | None
    """Logical block of the device."""
    free_bytes: int | None
    """Space left for this user."""
    direct: DirectReads


def inspect_storage(path: Path, root: Path = Path("/")) -> Storage:
    """Look at the storage that holds ``path``, which need not exist: its nearest parent counts."""
    whole = path.absolute()
    existing = next(place for place in (whole, *whole.parents) if place.exists())
    number = os.stat(existing).st_dev
    node = (root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    queue = next((f for f in (node, node.parent) if (f / "queue").is_dir()), None)
    mount, free = find_mount(existing, root), None
    with suppress(OSError):
        usage = os.statvfs(existing)
        free = usage.f_bavail * usage.f_frsize
    return Storage(
        path=path,
        filesystem=mount and mount[0],
        device=queue.name if queue else None,
        block_bytes=read_int(queue / "queue/logical_block_size") if queue else None,
        free_bytes=free,
        direct=probe_direct_reads(existing),
    )


def probe_direct_reads(path: Path) -> DirectReads:
    """Read a block of ``path``, a file or folder, past the page cache: some fail only then."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return DirectReads(works=False, obstacle="this system has no O_DIRECT")
    try:
        with _open_sample(path) as sample:
            return _try_blocks(sample, flag)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return DirectReads(works=False, obstacle="the file system refuses O_DIRECT")
        return DirectReads(works=False, obstacle=error.strerror or str(error))


def _try_blocks(sample: Path, flag: int) -> DirectReads:
    """Find the smallest block that reads; raises ``OSError`` where none does."""
    fd = os.open(sample, os.O_RDONLY | flag)
    try:
        # An anonymous map begins at a page: aligned for every device.
        with mmap.mmap(-1, _PROBE_BLOCKS[-1]) as page, memoryview(page) as view:
            for block in _PROBE_BLOCKS:
                with view[:block] as target:
                    try:
                        os.preadv(fd, [target], block)
                    except OSError as error:
                        if error.errno != errno.EINVAL or block == _PROBE_BLOCKS[-1]:
                            raise
                    else:
                        return DirectReads(works=True, align_bytes=block)
    finally:
        os.close(fd)
    raise AssertionError("the last block either reads or raises")


@contextmanager
def _open_sample(path: Path) -> Iterator[Path]:
    """A file of two of the largest blocks at least, made for the purpose if there is none."""
    size = 2 * _PROBE_BLOCKS[-1]
    folder = path if path.is_dir() else path.parent
    for candidate in sorted(folder.iterdir()) if folder == path else [path]:
        if (
            candidate.is_file()
            and candidate.stat().st_size >= size
            and os.access(candidate, os.R_OK)
        ):
            yield candidate
            return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".pi2-probe-") as made:
        made.write(bytes(size))
        made.flush()
        os.fsync(made.fileno())
        yield Path(made.name)
