"""CUDA without a GPU: kernels are compiled to cubins and inspected, not run."""

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from pi2.backends.compiler.compile import MissingTool
from pi2.backends.gpu.arrays import Memory
from pi2.backends.gpu.instructions import Translator
from pi2.backends.gpu.kernels.compile import build_image, find_nvrtc, generate_sources, list_kernels
from pi2.backends.gpu.kernels.specification import (
    FfnKernels,
    GpuSpec,
    ProductKernels,
    SelectKernels,
    StepKernel,
    Target,
)
from pi2.backends.gpu.launches import load_image
from pi2.backends.gpu.model_arrays import ModelArrays, describe_use
from pi2.diagnostics import UserError
from pi2.fitting.check import load_plan
from pi2.plan.documents.model_parts import Ffn
from tests.helpers.cubins import read_resources

FFN = FfnKernels(
    hidden=4096, precision="int4", experts=8, options=Ffn(activation="drelu", bias=True)
)
PLAN = Path(__file__).parents[2] / "plans/pc-rtx-4090/bamboo-7b.plan.toml"
_EM_CUDA = 190
_REGISTERS = 65536
"""Of a multiprocessor of all three architectures."""
_SHARED_BYTES = 100 << 10
"""Of a multiprocessor of sm_89, which has least."""


def make_spec(arch: str) -> GpuSpec:
    """Everything that a mixture with 32 heads needs."""
    return GpuSpec(
        target=Target(api="cuda", fp16=True, arch=arch),
        ffn=FFN,
        gathered=dataclasses.replace(
            FFN, options=Ffn(activation="silu", bias=True), precision="int8"
        ),
        gates=dataclasses.replace(FFN, precision="int8"),
        select=SelectKernels(experts=8, expert_neurons=14336),
        spreads=FFN,
        products=(
            ProductKernels(length=4096, precision="int4", bias=True),
            ProductKernels(length=4096, precision="fp16", adds=True),
            ProductKernels(length=256, precision="int8", bias=True, blocks=8),
        ),
        steps=(
            make_step("normalize", centred=0, added=1, has_weights=1, has_bias=0),
            make_step("take_rows", "int4", blocks=128, added=0),
            make_step("multiply", added=0, has_bias=0),
            make_step(
                *("route", ""),
                experts=8,
                active=2,
                kind=0,
                groups=1,
                best_two=0,
                normalise=0,
                has_choice_bias=0,
            ),
            make_step("spread", active=2, shared=0, has_scores=0),
            make_step("keep", "fp16", key_width=128, value_width=128),
            make_step("attend", "fp16", **HEADS, group=4, is_chunked=0),
            make_step("join", heads=32, value_width=128, has_sinks=0),
        ),
    )


HEADS = {"heads": 32, "key_width": 128, "value_width": 128, "value_stride": 128}


def make_step(kernel: str, format: str = "", **fixed: int) -> StepKernel:
    return StepKernel(kernel=kernel, format=format, fixed=tuple(fixed.items()))


def make_alone_spec(arch: str) -> GpuSpec:
    """Everything that a shipped plan needs whose GPU has the whole model."""
    use = describe_use(load_plan(PLAN))
    steps = Translator(use, ModelArrays(Memory(), use)).translate()
    return steps.describe(use, Target(api="cuda", fp16=True, arch=arch))


@pytest.mark.parametrize(
    ("arch", "number", "make"),
    [("sm_80", 80, make_spec), ("sm_89", 89, make_alone_spec), ("sm_90", 90, make_spec)],
)
def test_cubins_hold_every_kernel_for_their_architecture(
    arch: str, number: int, make: Callable[[str], GpuSpec]
) -> None:
    try:
        find_nvrtc()
    except MissingTool as error:
        pytest.skip(f"{error}; pip install 'pi2[cuda]'")
    spec = make(arch)
    image = build_image(list(list_kernels(spec)), spec.target)
    (cubin,) = image.codes
    assert cubin[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", cubin, 18)
    (flags,) = struct.unpack_from("<I", cubin, 48)
    assert (machine, flags >> 8 & 0xFF) == (_EM_CUDA, number)
    resources = read_resources(cubin)
    assert set(resources) == {f"{name}_kernel" for name in image.kernels}
    assert len(resources) > 20
    for name, taken in resources.items():
        threads = math.prod(image.kernels[name.removesuffix("_kernel")].block)
        # Nothing is spilled, and a multiprocessor holds at least 1024 threads of each.
        assert taken.frame_bytes == 0, name
        assert taken.registers * 1024 <= _REGISTERS, (name, taken)
        assert taken.shared_bytes * (1024 // threads) <= _SHARED_BYTES, (name, taken)


def test_sources_read_weights_in_vectors_and_wait_for_each_other() -> None:
    spec = make_spec("sm_80")
    source, parameters = generate_sources(list(list_kernels(spec)), spec.target)
    assert "uint4* __restrict__ gate_up_weights_ptr" in source
    assert "__syncthreads()" in source
    assert "tokens" in parameters["values_1_kernel"]


def test_without_the_compiler_a_diagnostic_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A package that hides the real one from the compiling process.
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('no CUDA today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PI2_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="no CUDA today") as caught:
        load_image(make_spec("sm_80"), lambda _label, _share: None)
    assert caught.value.diagnostics[0].code == "P363"
    assert "pi2[cuda]" in str(caught.value.diagnostics[0].help)
