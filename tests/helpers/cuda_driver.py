"""A stand-in for CUDA's driver: memory is the machine's, and one kernel, ``join``, is computed by
numpy from the parameters as the driver would find them.

Where the extra `cuda` is installed and a driver is not, NVIDIA's bindings take every call first:
they refuse wrong numbers and types of arguments before they look for the driver.
"""

import ctypes
import enum
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOTAL_BYTES = 1 << 30
CONTEXT, STREAM, MODULE = 11, 12, 13
"""Handles."""
_ATTRIBUTES = {
    "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK": 49152,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": 0,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
}
_ENUMS: dict[str, Any] = {
    "CUresult": enum.IntEnum(
        "CUresult",
        {"CUDA_SUCCESS": 0, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_INVALID_IMAGE": 200},
    ),
    "CUdevice_attribute": enum.IntEnum("CUdevice_attribute", list(_ATTRIBUTES)),
    "CUstream_flags": enum.IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1}),
    "CUevent_flags": enum.IntEnum("CUevent_flags", {"CU_EVENT_DISABLE_TIMING": 2}),
    "CUstreamCaptureMode": enum.IntEnum(
        "CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1}
    ),
}
"""The launcher's enumerations where there are no bindings."""


def find_bindings() -> Any | None:
    """NVIDIA's bindings, where they are installed and no driver is: a driver would do something."""
    try:
        found = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    try:
        found.cuInit(0)
    except RuntimeError:
        return found
    return None


class Driver(ModuleType):
    """The functions that the launcher calls, with the bindings' way of returning results."""

    def __init__(self, bindings: Any | None) -> None:
        super().__init__("cuda.bindings.driver")
        self.bindings = bindings
        for name, stand_in in _ENUMS.items():
            setattr(self, name, stand_in if bindings is None else getattr(bindings, name))
        self._ok = getattr(self, "CUresult").CUDA_SUCCESS  # noqa: B009
        self._handles = count(1000)
        self._memory: dict[int, Any] = {}
        self._functions: dict[int, bytes] = {}
        self._events: dict[int, bool] = {}
        self._graphs: dict[int, list[Any]] = {}
        self.launches: list[tuple[int, ...]] = []
        self.contexts: list[int] = []
        self.streams = 0
        """Streams that are not given back."""
        self.checked = 0
        """Calls that the bindings have taken."""
        self._captured: list[Any] | None = None

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or self.bindings is None:
            return found
        return self._check(getattr(self.bindings, name), found)

    def _check(self, bound: Callable[..., Any], found: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            # The driver is missing: that is all that may be wrong.
            with pytest.raises(RuntimeError, match="driver"):
                bound(*arguments)
            self.checked += 1
            return found(*arguments)

        return call

    @property
    def graphs(self) -> int:
        """Graphs that there are, and those that can be launched."""
        return len(self._graphs)

    def _answer(self, *results: Any) -> Any:
        return (self._ok, *results)

    def _take(self, size: int) -> int:
        buffer = (ctypes.c_uint8 * size)()
        address = ctypes.addressof(buffer)
        self._memory[address] = buffer
        return address

    def cuInit(self, flags: int) -> Any:
        return self._answer()

    def cuDeviceGetCount(self) -> Any:
        return self._answer(1)

    def cuDeviceGet(self, number: int) -> Any:
        return self._answer(number)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return self._answer(b"a stand-in".ljust(length, b"\0"))

    def cuDeviceTotalMem(self, device: int) -> Any:
        return self._answer(TOTAL_BYTES)

    def cuDriverGetVersion(self) -> Any:
        return self._answer(13050)

    def cuDeviceGetAttribute(self, attribute: enum.IntEnum, device: int) -> Any:
        return self._answer(_ATTRIBUTES[attribute.name])

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._answer(CONTEXT)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        assert self.streams == 0, "streams go before their context"
        return self._answer()

    def cuCtxSetCurrent(self, context: int) -> Any:
        self.contexts.append(context)
        return self._answer()

    def cuMemAlloc(self, size: int) -> Any:
        if size > TOTAL_BYTES:
            return self.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return self._answer(self._take(size))

    def cuMemFree(self, pointer: int) -> Any:
        del self._memory[pointer]
        return self._answer()

    def cuMemHostAlloc(self, size: int, flags: int) -> Any:
        return self._answer(self._take(size))

    def cuMemFreeHost(self, pointer: int) -> Any:
        del self._memory[pointer]
        return self._answer()

    def cuMemGetInfo(self) -> Any:
        used = sum(len(buffer) for buffer in self._memory.values())
        return self._answer(TOTAL_BYTES - used, TOTAL_BYTES)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        ctypes.memmove(target, source, size)
        return self._answer()

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> Any:
        ctypes.memmove(target, source, size)
        return self._answer()

    def cuStreamCreate(self, flags: int) -> Any:
        self.streams += 1
        return self._answer(STREAM)

    def cuStreamDestroy(self, stream: int) -> Any:
        self.streams -= 1
        return self._answer()

    def cuStreamBeginCapture(self, stream: int, mode: enum.IntEnum) -> Any:
        assert self._captured is None
        self._captured = []
        return self._answer()

    def cuStreamEndCapture(self, stream: int) -> Any:
        captured, self._captured = self._captured, None
        assert captured is not None
        return self._answer(self._keep(captured))

    def _keep(self, launches: list[Any]) -> int:
        graph = next(self._handles)
        self._graphs[graph] = launches
        return graph

    def cuGraphInstantiate(self, graph: int, flags: int) -> Any:
        return self._answer(self._keep(list(self._graphs[graph])))

    def cuGraphDestroy(self, graph: int) -> Any:
        del self._graphs[graph]
        return self._answer()

    def cuGraphExecDestroy(self, executable: int) -> Any:
        del self._graphs[executable]
        return self._answer()

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:
        for shape, arrays, numbers in self._graphs[executable]:
            self._join(shape, arrays, numbers)
        return self._answer()

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        return self._answer()

    def cuEventCreate(self, flags: int) -> Any:
        event = next(self._handles)
        self._events[event] = False
        return self._answer(event)

    def cuEventRecord(self, event: int, stream: int) -> Any:
        return self._answer()

    def cuEventSynchronize(self, event: int) -> Any:
        self._events[event] = True
        return self._answer()

    def cuEventDestroy(self, event: int) -> Any:
        del self._events[event]
        return self._answer()

    def cuModuleLoadData(self, address: int) -> Any:
        if ctypes.string_at(address, 4) != b"\x7fELF":
            return self.CUresult.CUDA_ERROR_INVALID_IMAGE, None
        return self._answer(MODULE)

    def cuModuleUnload(self, module: int) -> Any:
        return self._answer()

    def cuModuleGetFunction(self, module: int, name: bytes) -> Any:
        function = next(self._handles)
        self._functions[function] = name
        return self._answer(function)

    def cuFuncLoad(self, function: int) -> Any:
        assert self._captured is None, "code is not loaded while launches are captured"
        return self._answer()

    def cuLaunchKernel(self, function: int, *shape_and_parameters: Any) -> Any:
        *shape, stream, parameters, extra = shape_and_parameters
        assert self._functions[function] == b"join_kernel" and stream == STREAM and extra == 0
        addresses = (ctypes.c_void_p * 5).from_address(parameters)
        arrays = [ctypes.c_uint64.from_address(int(a or 0)).value for a in addresses[:2]]
        numbers = [ctypes.c_int32.from_address(int(a or 0)).value for a in addresses[2:]]
        if self._captured is not None:
            # The driver copies parameters when a launch is captured.
            self._captured.append((tuple(shape), arrays, numbers))
        else:
            self._join(tuple(shape), arrays, numbers)
        return self._answer()

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
    driver = Driver(find_bindings())
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    package.__path__, bindings.__path__ = [], []
    bindings.driver = driver  # type: ignore[attr-defined]
    for module in (package, bindings, driver):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "pi2.backends.gpu.launchers.cuda", raising=False)
    return driver
