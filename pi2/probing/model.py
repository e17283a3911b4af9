"""A model with random weights for measuring kernels: a 7B's layers, few of them."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pi2.backends.protocol import BuildRequest, Tensor
from pi2.plan.layout import scale_bytes, weight_bytes
from pi2.plan.model import Attention, Ffn, Model, Predictor, Quantization, Shape
from pi2.plan.tensor_names import EMBEDDING
from pi2.store.tensors import DenseTensor, list_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

U8 = npt.NDArray[np.uint8]

LAYERS = 4
"""Enough for their weights to exceed the caches of most processors."""
NEURONS = 14336
RANK = 1024
CONTEXT = 2112
CHUNK = 128
ARENA_NEURONS = 40_000
"""Neurons in memory: 290 MB, more than any cache."""
_PATTERN_BYTES = 1 << 22


def make_model() -> Model:
    """The shape of a Llama-like 7B with grouped-query attention and ReLU on gate and up."""
    return Model(
        schema_version=1,
        id="probe",
        shape=Shape(
            layers=LAYERS,
            hidden=4096,
            ffn=NEURONS,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocab=32000,
            context=4096,
        ),
        attention=Attention(),
        ffn=Ffn(activation="drelu"),
        quantization=Quantization(predictor="int4"),
        predictor=Predictor(rank=RANK),
    )


def allocate(_segment: str, size: int, *, huge: bool = False) -> U8:
    """Zeroed bytes, page-aligned; in pages of 2 MiB only where asked for.

    Weights lie in those, keys and values and the workspace in small ones (`pi2.memory.budget`),
    and finding small ones takes time: what is measured has to lie in memory as what runs does.
    """
    room = mmap.mmap(-1, max(size, 1))
    if sys.platform == "linux":
        room.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(room, np.uint8, count=size)


def make_request(
    model: Model,
    *,
    threads: int,
    features: frozenset[str],
    architecture: str,
    progress: Callable[[str, float], None],
) -> BuildRequest:
    """Everything that a backend needs to run the model; weights are random."""
    return BuildRequest(
        model=model,
        tensors={item.name: _make_tensor(item) for item in list_tensors(model, [RANK] * LAYERS)},
        bundle=model.lay_out_bundle(),
        neurons=NEURONS,
        chunk=CHUNK,
        context=CONTEXT,
        gate_rows=None,
        threads=threads,
        features=features,
        architecture=architecture,
        allocate=allocate,
        progress=progress,
    )


def make_arena(model: Model) -> U8:
    """Neurons [n, stride] that all fire for an input of ones.

    Random nibbles are -0.5 on average: with negative scales, sums of thousands are positive.
    """
    layout = model.lay_out_bundle()
    arena = fill(ARENA_NEURONS * layout.stride).reshape(-1, layout.stride)
    size = scale_bytes(layout.hidden, layout.precision)
    scales = np.full(size // 2, -0.01, np.float16).view(np.uint8)
    for part in layout.parts:
        arena[:, part.scales_offset : part.scales_offset + size] = scales
    return arena


def fill(size: int) -> U8:
    """``size`` random bytes as weights lie in memory, a pattern of 4 MiB over and over."""
    pattern = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, np.uint8)
    room = allocate("", size, huge=True)
    for start in range(0, size, _PATTERN_BYTES):
        room[start : start + _PATTERN_BYTES] = pattern[: size - start]
    return room


def _make_tensor(item: DenseTensor) -> Tensor:
    if item.precision == "fp32":
        values: npt.NDArray[np.generic] = allocate("", 4 * item.rows * item.length).view(np.float32)
        values = values.reshape(item.rows, item.length)
        values[...] = np.float32(0.0 if "predictor_bias" in item.name else 1.0)
        return _wrap(item, values, None)
    weights = fill(item.rows * weight_bytes(item.length, item.precision))
    if item.name == EMBEDDING:
        weights[:] = 100  # what the layers get is then positive, and all neurons fire
    size = scale_bytes(item.length, item.precision)
    scales = None
    if size:
        scales = allocate("", item.rows * size, huge=True).view(np.float16).reshape(item.rows, -1)
        scales[:] = 0.002
    return _wrap(item, weights.reshape(item.rows, -1), scales)


def _wrap(
    item: DenseTensor,
    weights: npt.NDArray[np.generic],
    scales: npt.NDArray[np.float16] | None,
) -> Tensor:
    precision = None if item.precision == "fp32" else item.precision
    return Tensor(
        name=item.name,
        rows=item.rows,
        length=item.length,
        precision=precision,
        weights=weights,
        scales=scales,
    )


def choose_slots(count: int, variants: int) -> Sequence[npt.NDArray[np.int32]]:
    """Ascending slots of ``count`` neurons that lie apart, in several variants."""
    random = np.random.default_rng(1)
    return [
        np.sort(random.choice(ARENA_NEURONS, count, replace=False)).astype(np.int32)
        for _ in range(variants)
    ]
