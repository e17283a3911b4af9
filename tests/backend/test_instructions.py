"""Every instruction of a program, by compiled kernels of each processor next to numpy's line."""

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pi2.backends.blocks.contract import (
    ATTENTION,
    COMMON,
    FIELDS,
    INDEX,
    ROUTING,
    STATES,
    BlockSpec,
)
from pi2.backends.blocks.program import Program
from pi2.backends.blocks.unpacking import list_unpackings
from tests.helpers.aarch64 import ARM_FEATURES, needs_emulator
from tests.helpers.blocks import ArmKernels, Kernels, Numpy, Runner
from tests.helpers.instruction_cases import (
    BOUNDS,
    KV_COUNTS,
    LIBRARIES,
    Case,
    Draw,
    list_attention,
    list_common,
    list_index,
    list_routing,
)
from tests.helpers.kernels import list_runnable_isas
from tests.helpers.product_cases import list_products
from tests.helpers.state_cases import list_states

CASES: Mapping[str, Callable[[Draw], Iterator[Case]]] = {
    **{f"{ATTENTION} {kind}": partial(list_attention, kind) for kind in KV_COUNTS},
    **{f"{INDEX} {kind}": partial(list_index, kind) for kind in KV_COUNTS},
    COMMON: list_common,
    ROUTING: list_routing,
    STATES: list_states,
}
"""Cases of each library of no format."""
FORMATS = sorted(list_unpackings())
WAYS = (*CASES, "f16", "q8_0", "q4_k", "q6_k", "iq4_nl", "iq2_s", "iq1_m", "nvfp4", "q1_0", "q2_0")
"""Each way of reading codes and scales: other formats add nothing that is one processor's."""
WIDE = (*CASES, "f16", "q4_k", "q8_0", "iq3_s", "nvfp4", "pq2_0")
"""For AVX-512 without VNNI: products are those of AVX2 there, in wider registers."""
OF_CACHES = (ATTENTION, INDEX)
OPTIMISED = tuple(way for way in WAYS if not way.endswith((" fp32", " int8")))
"""Of kernels that read KV caches, each push optimises those of fp16."""
PLAIN = (COMMON, "q4_k", "q8_0")
"""For processors without instructions for products of bytes."""
QUICK: Mapping[str, tuple[str, ...]] = {
    "avx512vnni": WAYS, "dotprod": ("q4_k", "q8_0"), "sse4.2": (),
    **dict.fromkeys(("avx512bw", "x86-64", "neon"), ("q4_k",)),
}  # fmt: skip
"""Libraries that each push compares on other processors than AVX2, where it compares all."""
RUNNABLE = list_runnable_isas()
COMPARED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("avx2", "avx512vnni"), (*CASES, *FORMATS)),
    "avx512bw": WIDE,
    "dotprod": WAYS,
    **dict.fromkeys(("sse4.2", "x86-64", "neon"), PLAIN),
}
"""Libraries that are compared on each processor; those of aarch64 are emulated."""


def list_levels(library: str, processor: str) -> Iterator[tuple[int, list[pytest.MarkDecorator]]]:
    """How much LLVM optimises, with marks: each push compiles quickly what adds no way."""
    is_usual = "avx2" not in RUNNABLE or library in QUICK.get(processor, (library,))
    if processor == "avx2" and library not in OPTIMISED:
        yield 0, []
        is_usual = False
    yield 3, [needs_emulator] * (processor in ARM_FEATURES) + [pytest.mark.slow] * (not is_usual)


def list_cases(library: str, lanes: int) -> list[Case]:
    draw = Draw(lanes)
    return list(CASES[library](draw) if library in CASES else list_products(library, draw))


@pytest.mark.parametrize(
    ("library", "processor", "level"),
    [
        pytest.param(library, name, level, marks=marks)
        for name, libraries in COMPARED.items()
        for library in libraries
        if name in (*RUNNABLE, *ARM_FEATURES)
        for level, marks in list_levels(library, name)
    ],
)
def test_kernels_compute_what_numpy_defines(
    library: str, processor: str, level: int, tmp_path: Path
) -> None:
    make = partial(Kernels, level) if processor in RUNNABLE else ArmKernels
    check(library, make(LIBRARIES.get(library, library), processor, tmp_path))


def check(library: str, runner: Runner) -> None:
    for number, case in enumerate(list_cases(library, runner.lanes)):
        expected, found = copy.deepcopy(case), copy.deepcopy(case)
        Numpy(runner.lanes).run(expected)
        runner.run(found)
        for name, value in expected.values.items():
            if isinstance(value, np.ndarray) and name not in case.unread:
                error = measure(name, found.values[name], value, case)
                assert error <= 0, f"{case.kernel}, case {number}: {name} is off by {error}"


def measure(name: str, found: np.ndarray, expected: np.ndarray, case: Case) -> float:
    """How much the largest error is above its bound."""
    if found.dtype.kind in "iu":
        return float(np.count_nonzero(found != expected))
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    is_number = ~np.isnan(expected)
    # A context that is one part may have left something.
    assert name == "partials" or np.array_equal(np.isnan(found), ~is_number)
    bound = BOUNDS[case.kernel] * (np.abs(expected) + case.sizes.get(name, 1.0))
    return float((np.abs(found - expected) - bound)[is_number].max(initial=-1.0))


def test_every_kernel_has_cases_of_every_format_and_kind_of_kv_cache() -> None:
    found = {
        (case.kernel, case.format or (case.kv if library.startswith(OF_CACHES) else ""))
        for library in [*CASES, *FORMATS]
        for case in list_cases(library, 4)
    }
    expected = set()
    for library in [*LIBRARIES.values(), *FORMATS]:
        spec = BlockSpec(library=library, architecture="x86-64", features=())
        kind = library.split("_")[1] if library.startswith(OF_CACHES) else ""
        expected |= {
            (kernel, library if library in FORMATS else kind)
            for kernel in Program(spec).list_kernels()
        }
    assert found == expected
    assert {kernel for kernel, _ in found} == set(FIELDS)
