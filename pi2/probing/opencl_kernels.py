"""The two steps of a dense unit as OpenCL sources: a matrix for one token, and for many.

Weights have four bits with a float32 scale for 32 of them: half precision is an extension that not
every driver has.  TVM schedules and writes the source; a driver compiles it.  Importing this module
raises `ImportError` where there is no TVM.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import te, tirx
from tvm.s_tir import dlight

GROUP = 32
"""Number of weights that share a scale."""
_PER_WORD = 8
Family = Literal["adreno", "mali", "generic"]
"""GPUs that TVM has schedules of their own for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """OpenCL source of one kernel, and how it is started."""

    name: str
    text: str
    parameters: tuple[str, ...]
    """Which of ``weights``, ``scales``, ``inputs`` and ``outputs`` the kernel takes, in its
    order."""
    groups: tuple[int, int, int]
    """Number of work groups by axis."""
    items: tuple[int, int, int]
    """Work items of a group by axis."""


def find_family(device_name: str) -> Family:
    """The family of a device by the name that its driver gives it."""
    name = device_name.lower()
    return "adreno" if "adreno" in name else "mali" if "mali" in name else "generic"


def write_kernel(tokens: int, rows: int, width: int, family: Family, items: int) -> KernelSource:
    """``outputs`` float32 [tokens, rows] = ``inputs`` float32 [tokens, width] x weights.

    ``weights`` uint32 [rows, width / 8], the first of eight in the lowest bits, each less 8;
    ``scales`` float32 [rows, width / 32].  ``items``: most work items of a group.
    """
    assert width % GROUP == 0, width
    target = tvm.target.Target(
        {"kind": "opencl", "max_num_threads": items}
        | ({} if family == "generic" else {"device": family}),
        host="llvm",
    )
    module = tvm.IRModule({"product": _describe_product(tokens, rows, width)})
    rules = (dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.Fallback())
    with target:
        module = dlight.ApplyDefaultSchedule(*rules)(module)
    module = tirx.transform.BindTarget(target)(module)
    passes, _, device_passes = tirx.get_tir_pipeline("s_tir")
    # `tvm.tirx.build` is a function and hides the module of the same name.
    splitter = importlib.import_module("tvm.tirx.build")
    _, devices = splitter.split_host_device_mods(passes(module))
    ((device_target, device_module),) = devices.items()
    device_module = device_passes()(device_module)
    text = tvm.get_global_func("target.build.opencl")(device_module, device_target)
    ((_, function),) = device_module.functions.items()
    return _describe_kernel(function, text.inspect_source())


def _describe_product(tokens: int, rows: int, width: int) -> Any:
    weights = te.placeholder((rows, width // _PER_WORD), "uint32", "weights")
    scales = te.placeholder((rows, width // GROUP), "float32", "scales")
    inputs = te.placeholder((tokens, width), "float32", "inputs")

    def unpack(row: Any, column: Any) -> Any:
        shift = (column % _PER_WORD * 4).astype("uint32")
        code = (weights[row, column // _PER_WORD] >> shift) & tirx.const(15, "uint32")
        return (code.astype("float32") - 8.0) * scales[row, column // GROUP]

    unpacked = te.compute((rows, width), unpack, "unpacked")
    k = te.reduce_axis((0, width), "k")
    outputs = te.compute(
        (tokens, rows),
        lambda token, row: te.sum(inputs[token, k] * unpacked[row, k], axis=k),
        "outputs",
    )
    return te.create_prim_func([weights, scales, inputs, outputs])


def _describe_kernel(function: Any, text: str) -> KernelSource:
    extents: dict[str, int] = {}

    def note(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, note))

    def read(kind: str) -> tuple[int, int, int]:
        x, y, z = (extents.get(f"{kind}.{axis}", 1) for axis in "xyz")
        return x, y, z

    return KernelSource(
        name=str(function.attrs["global_symbol"]),
        text=text,
        parameters=tuple(str(item).strip("_").removesuffix("_ptr") for item in function.params),
        groups=read("blockIdx"),
        items=read("threadIdx"),
    )
