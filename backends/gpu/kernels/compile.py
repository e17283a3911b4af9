"""The compiler of GPU kernels: sources of all APIs, and cubins for CUDA."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from pi2.backends.compiler.compile import MissingTool, Report
from pi2.backends.gpu.kernels import attention, elements, routing, states
from pi2.backends.gpu.kernels.arguments import Arguments
from pi2.backends.gpu.kernels.code import Kernel
from pi2.backends.gpu.kernels.ffn import list_ffn_kernels, make_join
from pi2.backends.gpu.kernels.gathered import list_gathered_kernels, make_gates, make_select
from pi2.backends.gpu.kernels.products import list_product_kernels
from pi2.backends.gpu.kernels.specification import (
    ENTRY_SUFFIX,
    GpuSpec,
    KernelImage,
    Signature,
    StepKernel,
    Target,
)

_MODULES = (attention, elements, routing, states)
_THREADS = 256
"""Of a work group, unless a kernel has others."""


def list_kernels(spec: GpuSpec) -> Iterator[Kernel]:
    if spec.ffn is not None:
        yield from list_ffn_kernels(spec.ffn, spec.target.fp16)
    if spec.gathered is not None:
        yield from list_gathered_kernels(spec.gathered, spec.target.fp16)
        if spec.ffn is None:
            yield make_join(spec.gathered)
    if spec.gates is not None:
        yield make_gates(spec.gates, spec.target.fp16)
    if spec.select is not None:
        yield make_select(spec.select)
    if spec.spreads is not None:
        yield routing.make_spread_biases(spec.spreads)
    for product in spec.products:
        yield from list_product_kernels(product, spec.target.fp16)
    for step in spec.steps:
        yield make_step(step, spec.target.fp16)
    if spec.reads:
        yield routing.make_read()


def make_step(step: StepKernel, fp16: bool) -> Kernel:
    """Make the kernel of an instruction: functions ``emit_NAME`` of modules."""
    name = f"emit_{step.kernel}"
    emit = next(found for module in _MODULES if (found := getattr(module, name, None)))
    with Kernel.declare(step.name, (_THREADS, 1, 1)) as kernel:
        emit(Arguments(kernel, step, fp16))
    return kernel


_HEADER = "cuda_fp16.h"
_TOOLKIT = Path("/usr/local/cuda/include")

# What the generated sources take of the C++ library of CUDA, whose wheel is not needed for it.
_CSTDINT = """
namespace cuda { namespace std {
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
} }
"""
_TYPE_TRAITS = """
namespace cuda { namespace std {
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class A> struct is_integral; template <class A> struct is_signed;
template <class A> struct is_unsigned; template <class A> struct is_floating_point;
template <bool B, class A = void> struct enable_if {};
template <class A> struct enable_if<true, A> { typedef A type; };
template <bool B, class X, class Y> struct conditional { typedef X type; };
template <class X, class Y> struct conditional<false, X, Y> { typedef Y type; };
} }
"""
_HEADERS = {"cuda/std/cstdint": _CSTDINT, "cuda/std/type_traits": _TYPE_TRAITS}


def compile_cubin(source: str, arch: str) -> bytes:
    """The cubin of ``source`` for ``arch`` (``sm_80``); raises `MissingTool`, or RuntimeError
    with NVRTC's log."""
    nvrtc, headers = find_nvrtc()
    _, program = _check(
        nvrtc.nvrtcCreateProgram(
            source.encode(),
            b"kernels.cu",
            len(_HEADERS),
            [text.encode() for text in _HEADERS.values()],
            [name.encode() for name in _HEADERS],
        )
    )
    options = [f"--gpu-architecture={arch}", f"-I{headers}", "--std=c++17", "-default-device"]
    status, *_ = nvrtc.nvrtcCompileProgram(
        program, len(options), [option.encode() for option in options]
    )
    if int(status):
        _, size = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode(errors="replace"))
    _, size = _check(nvrtc.nvrtcGetCUBINSize(program))
    cubin: bytes = b"\0" * size
    _check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def find_nvrtc() -> tuple[Any, Path]:
    """Return the bindings of NVRTC and the folder of CUDA's headers; raises `MissingTool`."""
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingTool(f"NVRTC, CUDA's compiler, cannot be used ({error})") from error
    package = importlib.util.find_spec("nvidia")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    places = [path.parent for folder in folders for path in Path(folder).glob(f"*/*/{_HEADER}")]
    for place in (*places, _TOOLKIT):
        if (place / _HEADER).exists():
            return nvrtc, place
    raise MissingTool(f"CUDA's headers ({_HEADER}) are not installed")


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result


def make_target(target: Target) -> tvm.target.Target:
    options: dict[str, object] = {"kind": target.api, "max_num_threads": 256}
    if target.arch is not None:
        options["arch"] = target.arch
    return tvm.target.Target(options, host="llvm")


def generate_sources(kernels: Sequence[Kernel], target: Target) -> tuple[str, dict[str, list[str]]]:
    """Return the source of ``kernels``, and the names of its parameters by kernel."""
    wanted = make_target(target)
    functions = {kernel.name: kernel.function for kernel in kernels}
    with wanted:
        module = tirx.transform.BindTarget(wanted)(tvm.IRModule(functions))
        pipeline, _, finish = tirx.get_tir_pipeline("s_tir")
        # The attribute of the same name is a function.
        split: Any = importlib.import_module("tvm.tirx.build").split_host_device_mods
        _, devices = split(pipeline(module))
        ((device_target, device),) = devices.items()
        device = finish()(device)
        code = tvm.get_global_func(f"target.build.{target.api}")(device, device_target)
    parameters = {
        str(function.attrs["global_symbol"]): [str(item.name) for item in function.params]
        for function in device.functions.values()
    }
    return str(code.inspect_source()), parameters


def describe_kernel(kernel: Kernel, parameters: Sequence[str], code: int) -> Signature:
    """Return the launch of ``kernel``; ``parameters`` are its code's, in order."""
    names = [name.removesuffix("_ptr") for name in parameters]
    arrays = tuple(name for name in names if name in kernel.arrays)
    numbers = tuple((name, kernel.numbers[name]) for name in names if name in kernel.numbers)
    assert list(arrays) + [name for name, _ in numbers] == names, (kernel.name, names)
    return Signature(
        name=kernel.name,
        arrays=arrays,
        numbers=numbers,
        block=kernel.block,
        grid=kernel.grid,
        code=code,
    )


def build_image(
    kernels: Sequence[Kernel], target: Target, report: Report = lambda label, share: None
) -> KernelImage:
    """Compile ``kernels``; raises `MissingTool`."""
    # A WGSL source holds one kernel: the numbers of all would have the same name.
    together = [[kernel] for kernel in kernels] if target.api == "webgpu" else [list(kernels)]
    codes: list[bytes] = []
    signatures: dict[str, Signature] = {}
    for number, some in enumerate(together):
        source, parameters = generate_sources(some, target)
        for kernel in some:
            symbol = kernel.name + ENTRY_SUFFIX
            signatures[kernel.name] = describe_kernel(kernel, parameters[symbol], number)
        if target.arch is None:
            codes.append(source.encode())
        else:
            codes.append(compile_cubin(source, target.arch))
        report("compiled", (number + 1) / len(together))
    return KernelImage(api=target.api, codes=tuple(codes), kernels=signatures)


def read_program(text: str) -> Program:
    return Program(GpuSpec.from_json(text))


class Program:
    """Kernels for a device."""

    def __init__(self, spec: GpuSpec) -> None:
        self._spec = spec

    def write_file(self, output: Path, report: Report) -> None:
        """Write the image; raises `MissingTool`."""
        image = build_image(list(list_kernels(self._spec)), self._spec.target, report)
        output.write_text(image.to_json())
