"""WebGPU devices through wgpu (Vulkan, Metal, DX12): the extra `webgpu`."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import extras

from pi2.backends.gpu.kernels.specification import ENTRY_SUFFIX, KernelImage, Number
from pi2.backends.gpu.launchers.interface import (
    VECTOR_BYTES,
    DeviceArray,
    DeviceFacts,
    DeviceKind,
    Launcher,
    LoadedKernel,
    explain_driver,
)
from pi2.plan.weights.layout import round_up

if TYPE_CHECKING:
    from pi2.arrays import U8
    from pi2.backends.gpu.launchers.interface import Array

_KINDS: Mapping[str, DeviceKind] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "processor",
}
_LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroup-size-y",
)
"""Limits that are requested as far as the device has them: the standard's own are phones'."""
_MOST_GROUPS = 65535
"""The most work groups along the first axis: more go on along the third."""
_KEPT_NUMBERS = 64
"""Sets of numbers that a launch is kept ready for."""
_explain = partial(
    explain_driver,
    kinds=(wgpu.GPUError, RuntimeError, ValueError),
    is_full=lambda error: isinstance(error, wgpu.GPUOutOfMemoryError),
)


@cache
def _find_adapters() -> tuple[Any, ...]:
    # OpenGL adapters would be the same devices again, and not all of them compute.
    extras.set_instance_extras(backends=("Vulkan", "Metal", "DX12"))
    with _name_runtime_folder():
        return tuple(wgpu.gpu.enumerate_adapters_sync())


@contextmanager
def _name_runtime_folder() -> Iterator[None]:
    """Name the folder that drivers of displays look for: without one, each of them complains."""
    added = "XDG_RUNTIME_DIR" not in os.environ
    if added:
        os.environ["XDG_RUNTIME_DIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        if added:
            del os.environ["XDG_RUNTIME_DIR"]


def list_devices() -> list[DeviceFacts]:
    return [_describe(number, adapter) for number, adapter in enumerate(_find_adapters())]


def open_device(number: int) -> WebGpuLauncher:
    return WebGpuLauncher(number, _find_adapters()[number])


def _describe(number: int, adapter: Any) -> DeviceFacts:
    info, limits = adapter.info, adapter.limits
    return DeviceFacts(
        api="webgpu",
        number=number,
        name=str(info["device"])[:120],
        driver=f"{info['backend_type']} {info['description']}".strip(),
        kind=_KINDS.get(info["adapter_type"], "discrete"),
        memory_bytes=None,
        fp16="shader-f16" in adapter.features,
        compute_units=None,
        max_array_bytes=int(
            min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"])
        ),
        shared_bytes=int(limits["max-compute-workgroup-storage-size"]),
    )


class WebGpuLaunch:
    """A pipeline with its arrays, and a bind group for each set of numbers of late."""

    def __init__(
        self, device: Any, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]
    ) -> None:
        self.kernel = kernel
        self._device = device
        signature = kernel.signature
        self._entries = [
            {
                "binding": index,
                "resource": {"buffer": arrays[name].handle, "offset": 0, "size": arrays[name].size},
            }
            for index, name in enumerate(signature.arrays)
        ]
        kinds = {"int32": "i", "float32": "f"}
        self._format = "<" + "".join(kinds[dtype] for _, dtype in signature.numbers) + "I"
        self._find_group = lru_cache(_KEPT_NUMBERS)(self._make_group)

    def find_group(self, numbers: Mapping[str, Number], width: int) -> Any:
        """The bind group for ``numbers`` and ``width`` work groups along the first axis."""
        values = [numbers[name] for name, _ in self.kernel.signature.numbers]
        # The code ends threads of groups beyond this.
        return self._find_group(struct.pack(self._format, *values, width - 1))

    def _make_group(self, data: bytes) -> Any:
        uniform = self._device.create_buffer_with_data(
            data=data.ljust(round_up(len(data), VECTOR_BYTES), b"\0"),
            usage=wgpu.BufferUsage.UNIFORM,
        )
        entry = {
            "binding": len(self._entries),
            "resource": {"buffer": uniform, "offset": 0, "size": uniform.size},
        }
        layout = self.kernel.handle.get_bind_group_layout(0)
        return self._device.create_bind_group(layout=layout, entries=[*self._entries, entry])


_Recording = list[tuple[Any, Any, tuple[int, int, int]]]
"""Pipelines with their bind groups and work groups: sent commands cannot be sent again, and are
encoded anew each time."""


class WebGpuEvent:
    """The end of a submission: copies into arrays of main memory that are mapped when it is
    reached, whether or not anybody asked for them."""

    def __init__(self, copies: list[tuple[Any, Array | None]]) -> None:
        self._copies = copies
        self._promises = [staging.map_async(wgpu.MapMode.READ) for staging, _ in copies]

    def wait(self) -> None:
        copies, self._copies = self._copies, []
        with _explain("a kernel failed"):
            for (staging, target), promise in zip(copies, self._promises, strict=False):
                promise.sync_wait()
                if target is not None:
                    data = staging.read_mapped(copy=False)
                    flat = target.reshape(-1).view(np.uint8)
                    flat[:] = np.frombuffer(data, np.uint8, flat.size)
                staging.unmap()
                staging.destroy()


class WebGpuQueue:
    """Commands that are sent together: WebGPU has one queue, and sending costs more than running
    a small kernel."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._encoder: Any = None
        self._pass: Any = None
        self._copies: list[tuple[Any, Array | None]] = []
        self._mark = device.create_buffer(size=4, usage=wgpu.BufferUsage.COPY_SRC)
        """Copies at the end of a submission."""

    def upload(self, target: DeviceArray, source: Array, offset: int = 0) -> None:
        # Writes come before commands that are sent after them.
        self._send()
        with _explain("an upload failed"):
            self._device.queue.write_buffer(target.handle, offset, source)

    def download(self, source: DeviceArray, target: Array, offset: int = 0) -> None:
        assert target.flags.c_contiguous
        self._copy(source.handle, offset, target.nbytes, target)

    def launch(self, launch: WebGpuLaunch, numbers: Mapping[str, Number]) -> None:
        self.replay(self.record([(launch, numbers)]))

    def record(self, work: Sequence[tuple[WebGpuLaunch, Mapping[str, Number]]]) -> _Recording:
        steps = []
        for launch, numbers in work:
            width, height = launch.kernel.signature.count_groups(numbers)
            depth = -(-width // _MOST_GROUPS)
            with _explain(f"kernel {launch.kernel.signature.name!r} was not started"):
                group = launch.find_group(numbers, width)
            groups = (-(-width // depth), height, depth)
            steps.append((launch.kernel.handle, group, groups))
        return steps

    def replay(self, recording: _Recording) -> None:
        with _explain("a kernel was not started"):
            commands = self._begin_pass()
            for pipeline, group, groups in recording:
                commands.set_pipeline(pipeline)
                commands.set_bind_group(0, group)
                commands.dispatch_workgroups(*groups)

    def wait_for(self, event: WebGpuEvent) -> None:
        """All queues are one: earlier submissions run first."""

    def submit(self) -> WebGpuEvent:
        # on_submitted_work_done of wgpu 0.32 does not work with its own library.
        self._copy(self._mark, 0, 4, None)
        self._send()
        copies, self._copies = self._copies, []
        return WebGpuEvent(copies)

    def _copy(self, source: Any, offset: int, size: int, target: Array | None) -> None:
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        with _explain("a download failed"):
            staging = self._device.create_buffer(size=size, usage=usage)
            self._end_pass().copy_buffer_to_buffer(source, offset, staging, 0, size)
        self._copies.append((staging, target))

    def _begin_pass(self) -> Any:
        if self._encoder is None:
            self._encoder = self._device.create_command_encoder()
        if self._pass is None:
            self._pass = self._encoder.begin_compute_pass()
        return self._pass

    def _end_pass(self) -> Any:
        if self._encoder is None:
            self._encoder = self._device.create_command_encoder()
        if self._pass is not None:
            self._pass.end()
            self._pass = None
        return self._encoder

    def _send(self) -> None:
        if self._encoder is None:
            return
        encoder = self._end_pass()
        with _explain("commands were refused"):
            self._device.queue.submit([encoder.finish()])
        self._encoder = None


class WebGpuLauncher(Launcher):
    def __init__(self, number: int, adapter: Any) -> None:
        self.facts = _describe(number, adapter)
        limits = {name: adapter.limits[name] for name in _LIMITS if name in adapter.limits}
        with _explain(f"{self.facts.name} could not be opened"):
            self._device = adapter.request_device_sync(
                required_features=["shader-f16"] if self.facts.fp16 else [], required_limits=limits
            )

    def _allocate(self, size: int) -> Any:
        usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
        what = f"{self.facts.name} has no memory left for {size} bytes"
        with _explain(what, is_full=lambda error: True):
            return self._device.create_buffer(size=size, usage=usage)

    def _release(self, handle: Any) -> None:
        handle.destroy()

    def allocate_host(self, size: int) -> U8:
        return np.empty(size, np.uint8)

    def load(self, image: KernelImage) -> Mapping[str, LoadedKernel]:
        assert image.api == "webgpu", image.api
        loaded = {}
        for name, signature in image.kernels.items():
            with _explain(f"{self.facts.driver} does not compile kernel {name!r}"):
                module = self._device.create_shader_module(
                    code=image.codes[signature.code].decode()
                )
                pipeline = self._device.create_compute_pipeline(
                    layout="auto", compute={"module": module, "entry_point": name + ENTRY_SUFFIX}
                )
            loaded[name] = LoadedKernel(signature, pipeline)
        return loaded

    def bind(self, kernel: LoadedKernel, arrays: Mapping[str, DeviceArray]) -> WebGpuLaunch:
        return WebGpuLaunch(self._device, kernel, arrays)

    def open_queue(self) -> WebGpuQueue:
        return WebGpuQueue(self._device)

    def close(self) -> None:
        self._device.destroy()
