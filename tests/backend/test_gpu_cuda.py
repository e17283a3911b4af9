"""CUDA without a GPU: kernels are compiled to cubins and inspected, not run."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import pytest

from pi2.backends.gpu.images import load_image
from pi2.backends.gpu.kernels.compile import build_image, generate_sources
from pi2.backends.gpu.kernels.nvrtc import MissingCompiler, find_nvrtc
from pi2.backends.gpu.kernels.program import list_kernels
from pi2.backends.gpu.kernels.specification import (
    AttentionKernels,
    EmbeddingKernels,
    FfnKernels,
    GpuSpec,
    NormKernels,
    ProductKernels,
    Target,
)
from pi2.diagnostics import UserError

FFN = FfnKernels(hidden=4096, precision="int4", activation="drelu", bias=True, experts=8)
_EM_CUDA = 190


def make_spec(arch: str) -> GpuSpec:
    """Everything that a mixture with 32 heads needs."""
    return GpuSpec(
        target=Target(api="cuda", fp16=True, arch=arch),
        ffn=FFN,
        gathered=dataclasses.replace(FFN, activation="silu", precision="int8"),
        products=(
            ProductKernels(length=4096, precision="int4", bias=True),
            ProductKernels(length=4096, precision="fp16", adds=True),
        ),
        embedding=EmbeddingKernels(length=4096, precision="int4"),
        norm=NormKernels(length=4096, width=4096, epsilon=1e-5, outputs=True),
        attention=AttentionKernels(
            heads=32, kv_heads=8, head_dim=128, scale=0.09, kv="fp16", window=4096, some_full=True
        ),
    )


@pytest.mark.parametrize(("arch", "number"), [("sm_80", 80), ("sm_89", 89), ("sm_90", 90)])
def test_cubins_hold_every_kernel_for_their_architecture(arch: str, number: int) -> None:
    try:
        find_nvrtc()
    except MissingCompiler as error:
        pytest.skip(f"{error}; pip install 'pi2[cuda]'")
    spec = make_spec(arch)
    image = build_image(list(list_kernels(spec)), spec.target)
    (cubin,) = image.codes
    assert cubin[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", cubin, 18)
    (flags,) = struct.unpack_from("<I", cubin, 48)
    assert (machine, flags >> 8 & 0xFF) == (_EM_CUDA, number)
    assert len(image.kernels) > 20
    for name in image.kernels:
        assert f".text.{name}_kernel\0".encode() in cubin


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
