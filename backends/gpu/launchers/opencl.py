"""OpenCL devices through pyopencl: the extra `opencl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyopencl as cl

from pi2.backends.gpu.kernels.specification import ENTRY_SUFFIX, KernelImage, Number, Signature
from pi2.backends.gpu.launchers.interface import (
    DeviceArray,
    DeviceFacts,
    DeviceKind,
    Launcher,
    LoadedKernel,
    explain_driver,
)

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.gpu.launchers.interface import Array

_TYPES: Mapping[str, Any] = {"int32": np.int32, "float32": np.float32}


def _is_full(error: Exception) -> bool:
    return "OUT_OF_RESOURCES" in str(error) or "ALLOCATION" in str(error)


_explain = partial(explain_driver, kinds=(cl.Error,), is_full=_is_full)


def list_devices() -> list[DeviceFacts]:
    """Describe all devices; none where the loader finds no driver."""
    return [_describe(number, device) for number, device in enumerate(_find_devices())]


def open_device(number: int) -> OpenClLauncher:
    return OpenClLauncher(number, _find_devices()[number])


def _find_devices() -> list[Any]:
    try:
        platforms = cl.get_platforms()
    except cl.LogicError:
        return []
    found: list[Any] = []
    for platform in platforms:
        try:
            found += platform.get_devices()
        except cl.Error:
            # A driver without a device.
            continue
    return found


def _describe(number: int, device: Any) -> DeviceFacts:
    is_processor = bool(device.type & cl.device_type.CPU)
    unified = bool(device.host_unified_memory)
    kind: DeviceKind = "integrated" if unified else "discrete"
    return DeviceFacts(
        api="opencl",
        number=number,
        name=" ".join(device.name.split())[:120],
        driver=f"{device.platform.name.strip()} {device.driver_version.strip()}",
        kind="processor" if is_processor else kind,
        memory_bytes=None if is_processor or unified else int(device.global_mem_size),
        fp16="cl_khr_fp16" in device.extensions.split(),
        compute_units=int(device.max_compute_units),
        max_array_bytes=int(device.max_mem_alloc_size),
        shared_bytes=int(device.local_mem_size),
    )


class OpenClLaunch:
    """A kernel object of its own, with its arrays set."""

    def __init__(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> None:
        self.kernel = kernel
        self._arrays = arrays
        signature = kernel.signature
        self.object = cl.Kernel(kernel.handle, signature.name + ENTRY_SUFFIX)
        self._kept = [arrays[name] for name in signature.arrays]
        for index, array in enumerate(self._kept):
            self.object.set_arg(index, array.handle)
        first = len(self._kept)
        self._numbers = [
            (first + index, name, _TYPES[dtype])
            for index, (name, dtype) in enumerate(signature.numbers)
        ]

    def copy(self) -> OpenClLaunch:
        return OpenClLaunch(self.kernel, self._arrays)

    def set_numbers(self, numbers: Mapping[str, Number]) -> None:
        for index, name, dtype in self._numbers:
            self.object.set_arg(index, dtype(numbers[name]))


_Threads = tuple[int, int, int]
_Recording = list[tuple[OpenClLaunch, _Threads, _Threads]]
"""Launches whose numbers are set, the threads of each, and its work group's."""


class OpenClEvent:
    """A marker in a queue, and what must live until it is reached."""

    def __init__(self, event: Any, kept: list[Array]) -> None:
        self.event = event
        self._kept = kept

    def wait(self) -> None:
        with _explain("a kernel failed"):
            self.event.wait()
        self._kept = []


class OpenClQueue:
    def __init__(self, context: Any) -> None:
        self._queue = cl.CommandQueue(context)
        self._copy = partial(cl.enqueue_copy, self._queue, is_blocking=False)
        self._kept: list[Array] = []

    def upload(self, target: DeviceArray, source: Array, offset: int = 0) -> None:
        with _explain("an upload failed"):
            self._copy(target.handle, source, dst_offset=offset)
        self._kept.append(source)

    def download(self, source: DeviceArray, target: Array, offset: int = 0) -> None:
        with _explain("a download failed"):
            self._copy(target, source.handle, src_offset=offset)
        self._kept.append(target)

    def launch(self, launch: OpenClLaunch, numbers: Mapping[str, Number]) -> None:
        signature = launch.kernel.signature
        launch.set_numbers(numbers)
        with _explain(f"kernel {signature.name!r} was not started"):
            cl.enqueue_nd_range_kernel(
                self._queue, launch.object, _count_threads(signature, numbers), signature.block
            )

    def record(self, work: Sequence[tuple[OpenClLaunch, Mapping[str, Number]]]) -> _Recording:
        steps = []
        for launch, numbers in work:
            # A kernel object keeps its numbers: each step has one of its own.
            own = launch.copy()
            own.set_numbers(numbers)
            signature = launch.kernel.signature
            steps.append((own, _count_threads(signature, numbers), signature.block))
        return steps

    def replay(self, recording: _Recording) -> None:
        with _explain("a recorded kernel was not started"):
            for launch, threads, block in recording:
                cl.enqueue_nd_range_kernel(self._queue, launch.object, threads, block)

    def wait_for(self, event: OpenClEvent) -> None:
        with _explain("a queue did not wait"):
            cl.enqueue_barrier(self._queue, wait_for=[event.event])

    def submit(self) -> OpenClEvent:
        with _explain("commands were refused"):
            event = cl.enqueue_marker(self._queue)
            self._queue.flush()
        kept, self._kept = self._kept, []
        return OpenClEvent(event, kept)


class OpenClLauncher(Launcher):
    def __init__(self, number: int, device: Any) -> None:
        self.facts = _describe(number, device)
        with _explain(f"{self.facts.name} could not be opened"):
            self._context = cl.Context([device])

    def _allocate(self, size: int) -> Any:
        what = f"{self.facts.name} has no memory left for {size} bytes"
        with _explain(what, is_full=lambda error: True):
            return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, size)

    def _release(self, handle: Any) -> None:
        handle.release()

    def allocate_host(self, size: int) -> U8:
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
        access = cl.map_flags.READ | cl.map_flags.WRITE
        with _explain("main memory was refused"):
            buffer = cl.Buffer(self._context, flags, size)
            queue = cl.CommandQueue(self._context)
            # The array holds the mapping, and that the buffer.
            array, _ = cl.enqueue_map_buffer(queue, buffer, access, 0, (size,), np.uint8)
            queue.finish()
        return np.asarray(array)

    def load(self, image: KernelImage) -> Mapping[str, LoadedKernel]:
        assert image.api == "opencl", image.api
        programs = []
        for code in image.codes:
            with _explain(f"{self.facts.driver} does not compile pi2's kernels"):
                programs.append(cl.Program(self._context, code.decode()).build())
        return {
            name: LoadedKernel(signature, programs[signature.code])
            for name, signature in image.kernels.items()
        }

    def bind(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> OpenClLaunch:
        return OpenClLaunch(kernel, arrays)

    def open_queue(self) -> OpenClQueue:
        return OpenClQueue(self._context)


def _count_threads(signature: Signature, numbers: Mapping[str, Number]) -> _Threads:
    x, y = signature.count_groups(numbers)
    width, height, depth = signature.block
    return x * width, y * height, depth
