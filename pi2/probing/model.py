"""Models with random weights for measuring kernels: a few layers of a 7B, and a small model.

What a step takes beside reading weights shows in the small one; lines between both widths tell
what other models take.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi2.arrays import F16, I32, U8, Raw, Scales
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_attention import Attention
from pi2.plan.documents.model_ffn import Ffn, Predictor
from pi2.plan.documents.model_shape import Shape
from pi2.plan.documents.model_storage import Precision, Quantization
from pi2.plan.weights.layout import scale_bytes, weight_bytes
from pi2.plan.weights.tensor_names import EMBEDDING
from pi2.progress import Progress
from pi2.store.tensors import DenseTensor, list_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence


CHUNK = 128
_PATTERN_BYTES = 1 << 22
_PAGE_BYTES = 4096
_LOW_NIBBLES = 0x77
"""Mask that clears the highest bit of every four, so that all weights are below zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShape:
    """Sizes of a model that kernels are measured with, and what they are called with."""

    width: int
    neurons: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rank: int
    """Rank of the predictors."""
    predictor: Precision
    layers: int
    context: int
    """Tokens that attention is measured with, beside none."""
    arena_neurons: int
    """Number of neurons in memory."""
    gathered: tuple[int, ...]
    """Numbers of neurons of a call."""
    dense_neurons: int
    """Neurons of a call for many tokens."""
    named: int
    """Neurons that are looked for in the cache."""
    missing: tuple[int, ...]
    """Numbers of those neurons that are not in memory."""


LARGE = ProbeShape(
    width=4096,
    neurons=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32000,
    rank=1024,
    predictor="int4",
    layers=4,
    context=2048,
    arena_neurons=40_000,
    gathered=(64, 256, 1024, 2048),
    dense_neurons=512,
    named=1500,
    missing=(0, 1, 512),
)
"""A Llama-like 7B: more weights and neurons than caches hold."""
SMALL = ProbeShape(
    width=256,
    neurons=1024,
    heads=8,
    kv_heads=4,
    head_dim=32,
    vocab=4096,
    rank=96,
    predictor="int8",
    layers=8,
    context=256,
    arena_neurons=8192,
    gathered=(16, 64, 256),
    dense_neurons=512,
    named=160,
    missing=(0, 1, 128),
)
"""A model of ten million weights, such as the one that comes with pi2."""


def make_model(sizes: ProbeShape = LARGE) -> Model:
    """A Llama-like model with grouped-query attention and ReLU on gate and up."""
    return Model(
        schema_version=2,
        id="probe",
        shape=Shape(
            layers=sizes.layers,
            hidden=sizes.width,
            ffn=sizes.neurons,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            vocab=sizes.vocab,
            context=2 * sizes.context,
        ),
        attention=Attention(),
        ffn=Ffn(activation="drelu"),
        quantization=Quantization(predictor=sizes.predictor),
        predictor=Predictor(rank=sizes.rank),
    )


def allocate(segment: str, size: int, *, huge: bool = False) -> U8:
    """Zeroed bytes, page-aligned; in pages of 2 MiB only where asked for.

    Weights lie in those, keys and values and the workspace in small ones (`pi2.memory.budget`),
    and finding small ones takes time: what is measured has to lie in memory as what runs does.
    """
    room = mmap.mmap(-1, max(size, 1))
    if sys.platform == "linux":
        room.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    found = np.frombuffer(room, np.uint8, count=size)
    # What was never written is one page of zeros, which would stay in the nearest cache.
    found[::_PAGE_BYTES] = 0
    if segment == "kv":
        # Numbers: zeros take less time. 0.06 to 0.08 as fp16, small ones as fp32, any as int8.
        found[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        found[1::2] = 0x2C
    return found


def make_request(
    model: Model,
    *,
    threads: int,
    features: frozenset[str],
    architecture: str,
    progress: Progress,
    filled: bool = True,
) -> BuildRequest:
    """Everything that a backend needs to run the model; weights are random, or not there unless
    ``filled``, for who asks what would be compiled."""
    assert model.predictor is not None
    shape = model.shape
    ranks = [model.predictor.rank] * shape.layers
    return BuildRequest(
        model=model,
        tensors={
            item.name: _make_tensor(item) if filled else _wrap(item, np.zeros(0, np.uint8), None)
            for item in list_tensors(model, ranks)
        },
        bundle=model.lay_out_bundle(),
        neurons=shape.ffn,
        chunk=CHUNK,
        context=shape.context // 2 + 64,
        gate_rows=None,
        threads=threads,
        features=features,
        architecture=architecture,
        allocate=allocate,
        progress=progress,
    )


def make_arena(model: Model, neurons: int) -> U8:
    """Neurons [n, stride] that all fire for an input of ones: weights and scales are negative."""
    layout = model.lay_out_bundle()
    arena = fill(neurons * layout.stride, _LOW_NIBBLES).reshape(-1, layout.stride)
    size = scale_bytes(layout.hidden, layout.precision)
    scales = np.full(size // 2, -0.01, np.float16).view(np.uint8)
    for part in layout.parts:
        arena[:, part.scales_offset : part.scales_offset + size] = scales
    return arena


def make_gate_rows(model: Model, layers: int) -> list[tuple[U8, F16]]:
    """Gates of ``layers`` layers, weights [neurons, weight_bytes] and scales [neurons, width / 32],
    all of them open for an input of ones."""
    width, precision = model.stored_neuron_width, model.quantization.ffn
    size = scale_bytes(width, precision) // 2
    found = []
    for _ in range(layers):
        rows = fill(model.shape.ffn * weight_bytes(width, precision), _LOW_NIBBLES)
        scales = allocate("", model.shape.ffn * size * 2, huge=True).view(np.float16)
        scales[:] = -0.01
        found.append((rows.reshape(model.shape.ffn, -1), scales.reshape(model.shape.ffn, -1)))
    return found


def fill(size: int, mask: int = 0xFF) -> U8:
    """``size`` random bytes as weights lie in memory, a pattern of 4 MiB over and over; bits that
    ``mask`` lacks are zero."""
    pattern = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, np.uint8) & np.uint8(mask)
    room = allocate("", size, huge=True)
    for start in range(0, size, _PATTERN_BYTES):
        room[start : start + _PATTERN_BYTES] = pattern[: size - start]
    return room


def _make_tensor(item: DenseTensor) -> Tensor:
    if item.precision == "fp32":
        values: Raw = allocate("", 4 * item.rows * item.length).view(np.float32)
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
    weights: Raw,
    scales: Scales | None,
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


def choose_slots(count: int, among: int, variants: int) -> Sequence[I32]:
    """Ascending slots of ``count`` of ``among`` neurons that lie apart, in several variants."""
    random = np.random.default_rng(1)
    return [
        np.sort(random.choice(among, count, replace=False)).astype(np.int32)
        for _ in range(variants)
    ]
