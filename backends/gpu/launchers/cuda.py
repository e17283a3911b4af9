"""NVIDIA GPUs through CUDA's driver API: the extra `cuda`. Kernels come as cubins: the machine
needs only the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver

from pi2.backends.gpu.kernels.specification import ENTRY_SUFFIX, KernelImage, Number
from pi2.backends.gpu.launchers.interface import DeviceArray, DeviceFacts, Launcher, LoadedKernel
from pi2.diagnostics import UserError

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.gpu.launchers.interface import Array

_NAME_BYTES = 120
_TYPES: Mapping[str, Any] = {"int32": ctypes.c_int32, "float32": ctypes.c_float}


def list_devices() -> list[DeviceFacts]:
    """Describe all devices; none where there is no driver."""
    try:
        status, *_ = driver.cuInit(0)
    except RuntimeError:
        return []
    if int(status):
        return []
    (count,) = _call(driver.cuDeviceGetCount())
    return [_describe(number) for number in range(count)]


def open_device(number: int) -> CudaLauncher:
    _call(driver.cuInit(0))
    return CudaLauncher(number)


def _describe(number: int) -> DeviceFacts:
    (device,) = _call(driver.cuDeviceGet(number))
    (name,) = _call(driver.cuDeviceGetName(_NAME_BYTES, device))
    (total_bytes,) = _call(driver.cuDeviceTotalMem(device))
    (version,) = _call(driver.cuDriverGetVersion())
    kinds = driver.CUdevice_attribute

    def ask(attribute: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        (value,) = _call(driver.cuDeviceGetAttribute(kind, device))
        return int(value)

    major, minor = ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")
    return DeviceFacts(
        api="cuda",
        number=number,
        name=name.split(b"\0")[0].decode(errors="replace"),
        driver=f"CUDA {version // 1000}.{version % 1000 // 10}",
        kind="integrated" if ask("INTEGRATED") else "discrete",
        memory_bytes=int(total_bytes),
        fp16=True,
        compute_units=ask("MULTIPROCESSOR_COUNT"),
        max_array_bytes=int(total_bytes),
        shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK"),
        arch=f"sm_{major}{minor}",
    )


class CudaLaunch:
    """A function and its parameters in the form that the driver takes."""

    def __init__(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> None:
        self.kernel = kernel
        signature = kernel.signature
        self._arrays = [ctypes.c_uint64(int(arrays[name].handle)) for name in signature.arrays]
        self._numbers = [(name, _TYPES[dtype]()) for name, dtype in signature.numbers]
        cells: list[Any] = [*self._arrays, *(cell for _, cell in self._numbers)]
        self._addresses = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))

    def set_numbers(self, numbers: Mapping[str, Number]) -> int:
        """Set the numbers; return the address of the list of parameters."""
        for name, cell in self._numbers:
            cell.value = numbers[name]
        return ctypes.addressof(self._addresses)


@dataclass(slots=True)
class _Context:
    """A device's primary context; with it goes all that belongs to it."""

    handle: Any
    is_open: bool = True


class CudaEvent:
    """An event, and what must live until it is reached."""

    def __init__(self, context: _Context, event: Any, kept: list[Array]) -> None:
        self._context = context
        self.event = event
        self._kept = kept

    def wait(self) -> None:
        _call(driver.cuEventSynchronize(self.event))
        self._kept = []

    def __del__(self) -> None:
        if self._context.is_open:
            driver.cuEventDestroy(self.event)


class CudaRecording:
    """A graph: one call of the driver starts all of its kernels."""

    def __init__(self, context: _Context, executable: Any) -> None:
        self._context = context
        self.executable = executable

    def __del__(self) -> None:
        if self._context.is_open:
            driver.cuGraphExecDestroy(self.executable)


class CudaQueue:
    """A stream."""

    def __init__(self, context: _Context) -> None:
        self._context = context
        (self._stream,) = _call(
            driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        )
        self._kept: list[Array] = []

    def upload(self, target: DeviceArray, source: Array, offset: int = 0) -> None:
        assert source.flags.c_contiguous and offset + source.nbytes <= target.size
        place, size = int(target.handle) + offset, source.nbytes
        _call(driver.cuMemcpyHtoDAsync(place, source.ctypes.data, size, self._stream))
        self._kept.append(source)

    def download(self, source: DeviceArray, target: Array, offset: int = 0) -> None:
        assert target.flags.c_contiguous and offset + target.nbytes <= source.size
        place, size = int(source.handle) + offset, target.nbytes
        _call(driver.cuMemcpyDtoHAsync(target.ctypes.data, place, size, self._stream))
        self._kept.append(target)

    def launch(self, launch: CudaLaunch, numbers: Mapping[str, Number]) -> None:
        parameters = launch.set_numbers(numbers)
        kernel, signature = launch.kernel.handle, launch.kernel.signature
        shape = *signature.count_groups(numbers), 1, *signature.block
        _call(driver.cuLaunchKernel(kernel, *shape, 0, self._stream, parameters, 0))

    def record(self, work: Sequence[tuple[CudaLaunch, Mapping[str, Number]]]) -> CudaRecording:
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _call(driver.cuStreamBeginCapture(self._stream, mode))
        try:
            # Parameters are copied into the graph: a launch may be in it with other numbers again.
            for launch, numbers in work:
                self.launch(launch, numbers)
        finally:
            (graph,) = _call(driver.cuStreamEndCapture(self._stream))
        try:
            (executable,) = _call(driver.cuGraphInstantiate(graph, 0))
        finally:
            _call(driver.cuGraphDestroy(graph))
        return CudaRecording(self._context, executable)

    def replay(self, recording: CudaRecording) -> None:
        _call(driver.cuGraphLaunch(recording.executable, self._stream))

    def wait_for(self, event: CudaEvent) -> None:
        _call(driver.cuStreamWaitEvent(self._stream, event.event, 0))

    def submit(self) -> CudaEvent:
        (event,) = _call(driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
        _call(driver.cuEventRecord(event, self._stream))
        kept, self._kept = self._kept, []
        return CudaEvent(self._context, event, kept)

    def close(self) -> None:
        _call(driver.cuStreamDestroy(self._stream))


class CudaLauncher(Launcher):
    """A CUDA device, in its primary context."""

    def __init__(self, number: int) -> None:
        self.facts = _describe(number)
        (self._device,) = _call(driver.cuDeviceGet(number))
        (handle,) = _call(driver.cuDevicePrimaryCtxRetain(self._device))
        self._context = _Context(handle)
        self.enter()
        self._queues: list[CudaQueue] = []
        self._modules: list[Any] = []
        self._host: list[Any] = []

    def _allocate(self, size: int) -> Any:
        (pointer,) = _call(driver.cuMemAlloc(size))
        return pointer

    def _release(self, handle: Any) -> None:
        _call(driver.cuMemFree(handle))

    def allocate_host(self, size: int) -> U8:
        (address,) = _call(driver.cuMemHostAlloc(size, 0))
        self._host.append(address)
        raw = (ctypes.c_uint8 * size).from_address(int(address))
        array: U8 = np.ctypeslib.as_array(raw)
        return array

    def load(self, image: KernelImage) -> Mapping[str, LoadedKernel]:
        assert image.api == "cuda", image.api
        modules = []
        for code in image.codes:
            cubin = np.frombuffer(code, np.uint8)
            (module,) = _call(driver.cuModuleLoadData(cubin.ctypes.data))
            modules.append(module)
        self._modules += modules
        loaded = {}
        for name, signature in image.kernels.items():
            entry = (name + ENTRY_SUFFIX).encode()
            (function,) = _call(driver.cuModuleGetFunction(modules[signature.code], entry))
            # The driver loads code when it is first launched, which may not happen in a capture.
            _call(driver.cuFuncLoad(function))
            loaded[name] = LoadedKernel(signature, function)
        return loaded

    def bind(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> CudaLaunch:
        return CudaLaunch(kernel, arrays)

    def open_queue(self) -> CudaQueue:
        self._queues.append(CudaQueue(self._context))
        return self._queues[-1]

    def enter(self) -> None:
        # A context is current for a thread.
        _call(driver.cuCtxSetCurrent(self._context.handle))

    def count_free(self) -> int | None:
        free, _ = _call(driver.cuMemGetInfo())
        return int(free)

    def close(self) -> None:
        self.enter()
        # What is left of events and recordings goes with the context.
        self._context.is_open = False
        for queue in self._queues:
            queue.close()
        for module in self._modules:
            _call(driver.cuModuleUnload(module))
        for address in self._host:
            _call(driver.cuMemFreeHost(address))
        _call(driver.cuDevicePrimaryCtxRelease(self._device))


def _call(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a call of the driver, without its status; raises P361 and P362."""
    status, *results = result
    if int(status) == 0:
        return tuple(results)
    if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise UserError.of(
            "P361",
            "the GPU has no memory left",
            help="give the unit less in the plan's `memory.units`, or end other programs",
        )
    raise UserError.of(
        "P362",
        f"CUDA refused a call: {status.name}",
        help="bring the driver up to date, or choose another unit or API in the plan",
    )
