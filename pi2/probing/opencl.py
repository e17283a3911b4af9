"""Rates of OpenCL devices: GPUs, and processors that play one (PoCL), which are labelled so.

Needs the extra `opencl` (pyopencl).  Runs in a process of its own: a driver that crashes takes
nothing else along.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pi2.plan.documents.device import KernelName
from pi2.probing.opencl_kernels import GROUP, find_family, write_kernel
from pi2.probing.series import Key
from pi2.progress import Progress

WIDTH = 4096
ROWS = (256, 16384)
"""Rows of matrices for one token: the small one shows what starting a kernel costs."""
DENSE_ROWS = 3 * 512
"""Gate, up and down of 512 neurons."""
TOKENS = 128
ROUND_S = 0.15
_LEAST_CALLS = 1
_SIMILAR = 1e-3
"""Relative error of a result at which the device's arithmetic counts as right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a driver says of an OpenCL device; sent between processes."""

    name: str
    platform: str
    is_processor: bool
    """Whether the processor's own cores do the work."""
    memory_bytes: int | None
    """Size of dedicated memory; None where the device uses main memory."""
    kind: str = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStep:
    """One product that was measured."""

    kernel: KernelName
    size: int
    read_bytes: int
    operations: float | None

    @property
    def key(self) -> Key:
        """Name of the step among the measurements."""
        return (self.kernel, str(self.size))


STEPS = (
    *(
        UnitStep(
            kernel="multiply",
            size=rows,
            read_bytes=rows * WIDTH // 2 + rows * WIDTH // GROUP * 4,
            operations=None,
        )
        for rows in ROWS
    ),
    UnitStep(
        kernel="dense",
        size=TOKENS,
        read_bytes=DENSE_ROWS * WIDTH // 2 + DENSE_ROWS * WIDTH // GROUP * 4,
        operations=2.0 * DENSE_ROWS * WIDTH * TOKENS,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenClRecipe:
    """Makes an `OpenClBench` in a process of its own."""

    def __call__(self, progress: Progress) -> OpenClBench:
        return OpenClBench()


class OpenClBench:
    """The OpenCL devices of this machine."""

    def __init__(self) -> None:
        import pyopencl

        self._cl: Any = pyopencl
        self._devices: list[Any] = []
        for platform in _list_platforms(pyopencl):
            self._devices += platform.get_devices()

    def list_devices(self) -> list[DeviceFacts]:
        """List the devices that the drivers report."""
        return [self._describe(device) for device in self._devices]

    def measure(self, number: int, rounds: int) -> dict[Key, list[float]]:
        """Seconds of a call of each step on a device, ``rounds`` medians of it.

        Raises `ArithmeticError` if the device computes something else.
        """
        context = self._cl.Context([self._devices[number]])
        bench = DeviceBench(self._cl, context, self._devices[number])
        calls = {step.key: bench.prepare(step) for step in STEPS}
        found: dict[Key, list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key, call in calls.items():
                found[key].append(_time_calls(call))
        return found

    def close(self) -> None:
        """Release nothing: nothing is held."""

    def _describe(self, device: Any) -> DeviceFacts:
        types = self._cl.device_type
        is_processor = bool(device.type & types.CPU)
        shared = is_processor or bool(device.host_unified_memory)
        return DeviceFacts(
            name=" ".join(device.name.split())[:120],
            platform=device.platform.name.strip(),
            is_processor=is_processor,
            memory_bytes=None if shared else int(device.global_mem_size),
        )


class DeviceBench:
    """Buffers and kernels of one device."""

    def __init__(self, cl: Any, context: Any, device: Any) -> None:
        self._cl, self._context = cl, context
        self._queue = cl.CommandQueue(context)
        self._kept: list[Any] = []
        """Buffers: kernels do not hold those that they were given."""
        self._family = find_family(device.name)
        self._items = min(int(device.max_work_group_size), 256)

    def prepare(self, step: UnitStep) -> Any:
        """A function that runs the step and waits for it; its result was compared with numpy's."""
        tokens, rows = (step.size, DENSE_ROWS) if step.kernel == "dense" else (1, step.size)
        source = write_kernel(tokens, rows, WIDTH, self._family, self._items)
        random = np.random.default_rng(5)
        arrays = {
            "weights": random.integers(0, 1 << 32, (rows, WIDTH // 8), dtype=np.uint32),
            "scales": random.random((rows, WIDTH // GROUP), dtype=np.float32),
            "inputs": random.standard_normal((tokens, WIDTH)).astype(np.float32),
            "outputs": np.zeros((tokens, rows), np.float32),
        }
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.COPY_HOST_PTR
        buffers = {
            name: self._cl.Buffer(self._context, flags, hostbuf=array)
            for name, array in arrays.items()
        }
        self._kept.append(buffers)
        program = self._cl.Program(self._context, source.text).build()
        kernel = self._cl.Kernel(program, source.name)
        kernel.set_args(*(buffers[name] for name in source.parameters))
        work = tuple(a * b for a, b in zip(source.groups, source.items, strict=True))

        def run() -> None:
            self._cl.enqueue_nd_range_kernel(self._queue, kernel, work, source.items)
            self._queue.finish()

        run()
        self._cl.enqueue_copy(self._queue, arrays["outputs"], buffers["outputs"])
        self._queue.finish()
        _check_product(arrays)
        return run


def _check_product(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Compare some rows with numpy's product."""
    some = slice(0, None, max(1, len(arrays["weights"]) // 64))
    weights, scales = arrays["weights"][some], arrays["scales"][some]
    shifts = np.arange(8, dtype=np.uint32) * np.uint32(4)
    codes = (weights[:, :, None] >> shifts) & np.uint32(15)
    unpacked = codes.reshape(len(weights), -1).astype(np.float32) - np.float32(8.0)
    unpacked *= np.repeat(scales, GROUP, axis=1)
    wanted = arrays["inputs"] @ unpacked.T
    error = float(np.abs(wanted - arrays["outputs"][:, some]).max() / np.abs(wanted).max())
    if not error < _SIMILAR:
        raise ArithmeticError(f"its results differ from the processor's by {error:.1%}")


def _time_calls(call: Any) -> float:
    times: list[float] = []
    end = time.perf_counter() + ROUND_S
    while len(times) < _LEAST_CALLS or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _list_platforms(cl: Any) -> list[Any]:
    """Platforms; none where the loader finds no driver."""
    try:
        return cast("list[Any]", cl.get_platforms())
    except cl.LogicError:
        return []
