"""CUDA C++ sources to cubins with NVRTC: neither a GPU nor a driver is needed.

Needs the extra `cuda` (NVRTC's library, its bindings and the runtime's headers).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

EXTRA = "pip install 'pi2[cuda]'"
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


class MissingCompiler(Exception):
    """A compiler is not installed; the text says which and how to get it."""


def compile_cubin(source: str, arch: str) -> bytes:
    """Return the cubin of ``source`` for ``arch`` (``sm_80``).

    Raises `MissingCompiler` without NVRTC, `RuntimeError` with its log where it refuses the source.
    """
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
    """Return the bindings of NVRTC and the folder of CUDA's headers; raises `MissingCompiler`."""
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingCompiler(f"NVRTC, CUDA's compiler, cannot be used ({error})") from error
    package = importlib.util.find_spec("nvidia")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    places = [path.parent for folder in folders for path in Path(folder).glob(f"*/*/{_HEADER}")]
    for place in (*places, _TOOLKIT):
        if (place / _HEADER).exists():
            return nvrtc, place
    raise MissingCompiler(f"CUDA's headers ({_HEADER}) are not installed")


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]):
        raise RuntimeError(str(result[0]))
    return result
