"""How fast a device reads its memory."""

from __future__ import annotations

import statistics
import time

import numpy as np

from pi2.backends.gpu.kernels.specification import GpuSpec
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.launches import Kernels
from pi2.progress import Progress

_VECTOR_BYTES = 16
_GROUP_THREADS = 256
_GROUPS_PER_UNIT = 16
_UNKNOWN_UNITS = 32
_REPETITIONS = 20
_TOGETHER = 8
"""Reads that are waited for together, so that starting them does not count."""


def measure_read_rate(launcher: Launcher, size_bytes: int, progress: Progress) -> float:
    """Bytes per second at which about ``size_bytes`` are read once, the median of several rounds.

    Reads that fit into a device's cache show the cache: take much more than that.
    """
    facts = launcher.facts
    groups = _GROUPS_PER_UNIT * (facts.compute_units or _UNKNOWN_UNITS)
    row_bytes = groups * _GROUP_THREADS * _VECTOR_BYTES
    steps = max(1, min(size_bytes, facts.max_array_bytes) // row_bytes)
    kernels = Kernels(launcher)
    kernels.load(GpuSpec(target=facts.target, reads=True), progress)
    words = launcher.allocate(steps * row_bytes)
    sums = launcher.allocate(groups * _GROUP_THREADS * 4)
    queue = launcher.open_queue()
    # Memory that nobody has written may not be there yet.
    piece = np.random.default_rng(3).integers(0, 256, 1 << 22, np.uint8)
    for first in range(0, words.size, piece.nbytes):
        queue.upload(words, piece[: min(piece.nbytes, words.size - first)], first)
    launch = kernels.bind("read", {"words": words, "sums": sums})
    work = [(launch, {"groups": groups, "steps": steps})] * _TOGETHER
    recording = queue.record(work)
    rates = []
    for _ in range(_REPETITIONS):
        queue.submit().wait()
        begin_s = time.perf_counter()
        queue.replay(recording)
        queue.submit().wait()
        rates.append(_TOGETHER * words.size / (time.perf_counter() - begin_s))
    for array in (words, sums):
        launcher.release(array)
    return statistics.median(rates[1:])
