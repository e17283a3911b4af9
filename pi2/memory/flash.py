"""Reads of neurons from flash: scattered bundles into slots, long runs into buffers.

Direct reads (O_DIRECT) go past the page cache, so that the memory of a run is what the plan says.
Where a file system refuses them, buffered reads take their place and the reader says so.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi2.diagnostics import UserError
from pi2.machine import bind_calling_thread, list_allowed_cores

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

BundleRead = Callable[[int, U8, I32, I64, I64, int, int], None]
"""``Executor.read_bundles`` of `pi2.backends.protocol`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """A layer's neurons on flash."""

    path: Path
    bundles_offset: int
    stride: int
    count: int


@dataclass(frozen=True, slots=True)
class PendingRead:
    """Reads that are on their way, in clusters: what is read together is computed together."""

    layer: int
    indices: I32
    slots: I32
    results: I64
    clusters: tuple[slice, ...]
    """Stretches of ``indices``, in their order."""
    parts: tuple[Future[None], ...]
    """One for each cluster."""


def divide_clusters(count: int, size: int, most: int) -> tuple[slice, ...]:
    """Divide ``count`` neurons evenly into clusters of at least ``size``, ``most`` at most."""
    number = max(1, min(count // size, most))
    bounds = [count * step // number for step in range(number + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


class FlashReader:
    """Reads bundles with a plan's number of threads; one caller."""

    def __init__(
        self,
        files: Sequence[BundleFile],
        arena: U8,
        *,
        direct: bool,
        threads: int,
        cluster: int,
        read_bundles: BundleRead,
    ) -> None:
        """``cluster``: neurons that one thread reads before they are computed."""
        self._files = files
        self._arena = arena
        self._read_bundles = read_bundles
        self._threads = threads
        self._cluster = cluster
        self.fallback: str | None = None
        """Why direct reads were given up, if they were."""
        self.read_bytes = 0
        self._fds: list[int] = []
        try:
            self._open(direct)
        except BaseException:
            self.close()
            raise
        # Threads start when there is work: by then their starter may be bound to one core.
        cores = list_allowed_cores()
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="pi2-io", initializer=partial(_set_free, cores)
        )

    def _open(self, direct: bool) -> None:
        flag = getattr(os, "O_DIRECT", 0) if direct else 0
        if direct and flag == 0:
            self.fallback = "this system has no O_DIRECT"
        for file in self._files:
            try:
                fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | flag)
            except OSError as error:
                if not flag or error.errno != errno.EINVAL:
                    raise _describe_failure(file.path, error) from None
                fd = -1
            if fd >= 0 and flag and not self._accepts_bundle(fd, file):
                os.close(fd)
                fd = -1
            if fd < 0:
                flag = 0
                self.fallback = "the file system refuses O_DIRECT for reads of one bundle"
                fd = os.open(file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            self._fds.append(fd)

    def _accepts_bundle(self, fd: int, file: BundleFile) -> bool:
        """Try one read at the second bundle: only it shows whether the block size fits."""
        if len(self._arena) == 0 or file.count < 2:
            return True
        try:
            # The slot's content is overwritten before anybody uses it.
            os.preadv(fd, [self._arena[-1].data], file.bundles_offset + file.stride)
        except OSError:
            return False
        return True

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        """Begin to read bundle ``indices[i]`` of ``layer`` into slot ``slots[i]``."""
        file = self._files[layer]
        offsets = indices.astype(np.int64) * file.stride + file.bundles_offset
        results = np.zeros(len(indices), np.int64)
        clusters = divide_clusters(len(indices), self._cluster, 2 * self._threads)
        parts = tuple(
            self._pool.submit(
                self._read_bundles,
                self._fds[layer],
                self._arena,
                slots[cluster],
                offsets[cluster],
                results[cluster],
                0,
                1,
            )
            for cluster in clusters
        )
        return PendingRead(layer, indices, slots, results, clusters, parts)

    def finish(self, pending: PendingRead, number: int) -> I32:
        """Wait for a cluster and return its slots.

        A short or failed read is tried again, then UserError P620.
        """
        pending.parts[number].result()
        file, cluster = self._files[pending.layer], pending.clusters[number]
        bad = np.flatnonzero(pending.results[cluster] != file.stride) + cluster.start
        for i in bad:
            slot = self._arena[pending.slots[i]]
            offset = file.bundles_offset + int(pending.indices[i]) * file.stride
            self._read_fully(pending.layer, slot, offset)
        slots = pending.slots[cluster]
        self.read_bytes += len(slots) * file.stride
        return slots

    def abandon(self, pending: PendingRead) -> None:
        """Wait until nothing of it is under way: a late read would spoil a slot's next owner."""
        wait([part for part in pending.parts if not part.cancel()])

    def start_run(self, layer: int, first: int, buffer: U8) -> Future[None]:
        """Begin to read bundles ``first``, ``first + 1``, ... of ``layer`` into ``buffer``
        [n, stride], which must be aligned to a page."""
        file = self._files[layer]
        offset = file.bundles_offset + first * file.stride
        self.read_bytes += buffer.size
        return self._pool.submit(self._read_fully, layer, buffer.reshape(-1), offset)

    def _read_fully(self, layer: int, target: U8, offset: int) -> None:
        """Fill ``target`` from byte ``offset``; UserError P620 on failure or end of file."""
        path = self._files[layer].path
        done = 0
        while done < target.size:
            try:
                count = os.preadv(self._fds[layer], [target[done:].data], offset + done)
            except OSError as error:
                raise _describe_failure(path, error) from None
            if count == 0:
                raise UserError.of(
                    "P620",
                    f"the neuron store ends too early: no byte {offset + done} in {path}",
                    help="the file was cut or replaced; check it with `pi2 store verify`",
                )
            done += count

    def close(self) -> None:
        """Stop the threads and close the files."""
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.shutdown()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


def _set_free(cores: Sequence[int]) -> None:
    """Let the calling thread run on ``cores``, where the system binds threads at all."""
    if cores:
        bind_calling_thread(cores)


def _describe_failure(path: Path, error: OSError) -> UserError:
    return UserError.of(
        "P620",
        f"cannot read neurons from {path}: {error.strerror}",
        help="check the disk and the file with `pi2 store verify`",
    )


class NullReader:
    """Stands for a reader where nothing is to be read: counts bytes only."""

    fallback: str | None = None

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self.read_bytes = 0

    def start(self, layer: int, indices: I32, slots: I32) -> PendingRead:
        """Count the reads."""
        results = np.full(len(indices), self._stride)
        return PendingRead(layer, indices, slots, results, (slice(0, len(indices)),), ())

    def finish(self, pending: PendingRead, number: int) -> I32:
        """Add their bytes."""
        self.read_bytes += len(pending.indices) * self._stride
        return pending.slots

    def abandon(self, pending: PendingRead) -> None:
        """Nothing is under way."""

    def start_run(self, layer: int, first: int, buffer: U8) -> Future[None]:
        """Count a long read; done at once."""
        self.read_bytes += buffer.size
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Nothing is open."""
