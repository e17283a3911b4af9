"""A stand-in for CUDA's driver and its bindings: memory is the machine's, and one kernel, ``join``,
is computed by numpy from the parameters as the driver would find them."""

from __future__ import annotations

import ctypes
import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOTAL_BYTES = 1 << 30


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NOT_READY = 600


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1024
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 49152
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 132
    CU_DEVICE_ATTRIBUTE_INTEGRATED = 0
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 9
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 90


class CUstream_flags(enum.IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(enum.IntEnum):
    CU_EVENT_DISABLE_TIMING = 2


class CUstreamCaptureMode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class Driver(ModuleType):
    """The functions that the launcher calls, with the bindings' way of returning results."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUstream_flags = CUstream_flags
    CUevent_flags = CUevent_flags
    CUstreamCaptureMode = CUstreamCaptureMode

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self._memory: dict[int, Any] = {}
        self._names: dict[int, bytes] = {}
        self.launches: list[tuple[int, ...]] = []
        self.graphs = 0
        """Graphs that there are, and those that can be launched."""
        self.contexts: list[str] = []
        self._captured: list[Any] | None = None

    def _take(self, size: int) -> int:
        buffer = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(buffer)
        self._memory[address] = buffer
        return address

    def cuInit(self, flags: int) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> Any:
        return CUresult.CUDA_SUCCESS, 1

    def cuDeviceGet(self, number: int) -> Any:
        return CUresult.CUDA_SUCCESS, number

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return CUresult.CUDA_SUCCESS, b"a stand-in".ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: int) -> Any:
        return CUresult.CUDA_SUCCESS, TOTAL_BYTES

    def cuDriverGetVersion(self) -> Any:
        return CUresult.CUDA_SUCCESS, 13050

    def cuDeviceGetAttribute(self, attribute: enum.IntEnum, device: int) -> Any:
        minor = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        return CUresult.CUDA_SUCCESS, 0 if attribute is minor else int(attribute)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return CUresult.CUDA_SUCCESS, "context"

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context: str) -> Any:
        self.contexts.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAlloc(self, size: int) -> Any:
        if size > TOTAL_BYTES:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return CUresult.CUDA_SUCCESS, self._take(size)

    def cuMemFree(self, pointer: int) -> Any:
        del self._memory[pointer]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS, self._take(size)

    cuMemFreeHost = cuMemFree

    def cuMemGetInfo(self) -> Any:
        used = sum(len(buffer) for buffer in self._memory.values())
        return CUresult.CUDA_SUCCESS, TOTAL_BYTES - used, TOTAL_BYTES

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: str) -> Any:
        ctypes.memmove(target, source, size)
        return (CUresult.CUDA_SUCCESS,)

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def cuStreamCreate(self, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS, "stream"

    def cuStreamBeginCapture(self, stream: str, mode: enum.IntEnum) -> Any:
        assert self._captured is None
        self._captured = []
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: str) -> Any:
        graph, self._captured = self._captured, None
        assert graph is not None
        self.graphs += 1
        return CUresult.CUDA_SUCCESS, graph

    def cuGraphInstantiate(self, graph: list[Any], flags: int) -> Any:
        self.graphs += 1
        return CUresult.CUDA_SUCCESS, tuple(graph)

    def cuGraphDestroy(self, graph: list[Any]) -> Any:
        graph.clear()
        self.graphs -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, executable: tuple[Any, ...]) -> Any:
        self.graphs -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphLaunch(self, executable: tuple[Any, ...], stream: str) -> Any:
        for shape, arrays, numbers in executable:
            self._join(shape, arrays, numbers)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWaitEvent(self, stream: str, event: list[bool], flags: int) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS, [False]

    def cuEventRecord(self, event: list[bool], stream: str) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuEventQuery(self, event: list[bool]) -> Any:
        return (CUresult.CUDA_SUCCESS if event[0] else CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: list[bool]) -> Any:
        event[0] = True
        return (CUresult.CUDA_SUCCESS,)

    def cuEventDestroy(self, event: list[bool]) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleLoadData(self, address: int) -> Any:
        if ctypes.string_at(address, 4) != b"\x7fELF":
            return CUresult.CUDA_ERROR_INVALID_IMAGE, None
        return CUresult.CUDA_SUCCESS, "module"

    def cuModuleUnload(self, module: str) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return CUresult.CUDA_SUCCESS, name

    def cuLaunchKernel(self, function: bytes, *shape_and_parameters: Any) -> Any:
        *shape, stream, parameters, extra = shape_and_parameters
        assert function == b"join_kernel" and stream == "stream" and extra == 0, function
        addresses = (ctypes.c_void_p * 5).from_address(parameters)
        arrays = [ctypes.c_uint64.from_address(int(a or 0)).value for a in addresses[:2]]
        numbers = [ctypes.c_int32.from_address(int(a or 0)).value for a in addresses[2:]]
        if self._captured is not None:
            # The driver copies parameters when a launch is captured.
            self._captured.append((tuple(shape), arrays, numbers))
        else:
            self._join(tuple(shape), arrays, numbers)
        return (CUresult.CUDA_SUCCESS,)

    def _join(self, shape: tuple[int, ...], arrays: list[int], numbers: list[int]) -> None:
        self.launches.append(shape)
        partials, sums = arrays
        adds, parts, tokens = numbers
        size = tokens * 64
        read = np.ctypeslib.as_array((ctypes.c_float * (parts * size)).from_address(partials))
        written = np.ctypeslib.as_array((ctypes.c_float * size).from_address(sums))
        written[:] = read.reshape(parts, size).sum(0) + (written if adds else 0)


def install_driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put the stand-in where the launcher imports its driver from, and forget the launcher."""
    driver = Driver()
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    package.__path__, bindings.__path__ = [], []
    bindings.driver = driver  # type: ignore[attr-defined]
    for module in (package, bindings, driver):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "pi2.backends.gpu.launchers.cuda", raising=False)
    return driver
