"""Assembles neurons' bundles (`pi2.plan.weights.layout`) from packed vectors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from pi2.arrays import F32, I32, I64, U8, Raw, Scales
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, BundleLayout, scale_bytes, weight_bytes


def assemble_bundles(
    parts: Sequence[tuple[Raw, Raw | None]],
    layout: BundleLayout,
    biases: F32 | None = None,
    experts: I32 | None = None,
    factors: F32 | None = None,
) -> U8:
    """Lay packed vectors out as bundles uint8 [n, stride].

    ``parts``: weights uint8 [n, weight bytes] and scales [n, .] of each of ``layout.parts``;
    ``biases`` float32 [n, len(layout.biases)]; ``experts`` int32 [n] in an MoE model; ``factors``
    float32 [n] where activations are normalised.  Bytes beyond ``used_bytes`` are zero."""
    bundles = np.zeros((len(parts[0][0]), layout.stride), np.uint8)
    for part, (weights, scales) in zip(layout.parts, parts, strict=True):
        end = part.weights_offset + weights.shape[1]
        bundles[:, part.weights_offset : end] = weights
        if scales is not None:
            packed = scales.view(np.uint8)
            bundles[:, part.scales_offset : part.scales_offset + packed.shape[1]] = packed
    assert (biases is not None) == bool(layout.biases), layout
    if biases is not None:
        assert biases.dtype == np.float32 and np.isfinite(biases).all()
        for column, bias in enumerate(layout.biases):
            values = np.ascontiguousarray(biases[:, column], "<f4").view(np.uint8)
            bundles[:, bias.offset : bias.offset + 4] = values.reshape(-1, 4)
    assert (factors is not None) == (layout.factor_offset is not None), layout
    if factors is not None and layout.factor_offset is not None:
        raw = np.ascontiguousarray(factors, "<f4").view(np.uint8)
        bundles[:, layout.factor_offset : layout.factor_offset + 4] = raw.reshape(-1, 4)
    assert (experts is not None) == (layout.expert_offset is not None), layout
    if experts is not None and layout.expert_offset is not None:
        numbers = np.ascontiguousarray(experts, "<i4").view(np.uint8)
        bundles[:, layout.expert_offset : layout.expert_offset + 4] = numbers.reshape(-1, 4)
    return bundles


def unpack_part(bundles: U8, layout: BundleLayout, index: int) -> F32:
    """Vectors of part ``index`` of ``bundles`` uint8 [n, stride]: float32 [n, hidden]."""
    weights, scales = slice_part(bundles, layout, index)
    packing, spread = find_packing(layout.precision), layout.parts[index].spread
    return packing.dequantize(weights, scales, layout.hidden, spread=spread)


def split_scales(bundles: U8, layout: BundleLayout) -> tuple[U8, U8]:
    """Take the scales out of ``bundles`` uint8 [n, .], laid out as ``layout.inline``.

    Returns bundles [n, layout.stride] as ``layout`` says and rows of scales [n,
    layout.scales_stride].  Of mxfp4, ``bundles`` are whole groups of 32."""
    assert layout.scales == "resident", layout
    result = np.zeros((len(bundles), layout.stride), np.uint8)
    scales = np.empty((len(bundles), layout.scales_stride), np.uint8)
    for (_, from_place), (kind, to_place) in zip(
        _list_pieces(layout.inline), _list_pieces(layout), strict=True
    ):
        if kind == "shared":
            shared = bundles[:, from_place].reshape(-1, GROUP, layout.hidden)
            assert (shared == shared[:, :1]).all(), "neurons of a group have other exponents"
            scales[:] = shared[:, 0].reshape(scales.shape)
        else:
            (scales if kind == "scales" else result)[:, to_place] = bundles[:, from_place]
    return result, scales


def join_scales(bundles: U8, scales: U8, layout: BundleLayout, rows: slice | I32 | I64) -> U8:
    """Undo `split_scales`: bundles uint8 [n, layout.inline.stride], of ``bundles`` [n, .] of the
    neurons ``rows`` and the ``scales`` [neurons, layout.scales_stride] of their whole layer."""
    assert layout.scales == "resident", layout
    inline = layout.inline
    result = np.zeros((len(bundles), inline.stride), np.uint8)
    for (kind, from_place), (_, to_place) in zip(
        _list_pieces(layout), _list_pieces(inline), strict=True
    ):
        if kind == "shared":
            wanted = np.arange(len(scales))[rows]
            found = scales.reshape(-1, layout.hidden)[wanted // GROUP]
        elif kind == "scales":
            found = scales[rows][:, from_place]
        else:
            found = bundles[:, from_place]
        result[:, to_place] = found
    return result


_Place = Literal["bundle", "scales", "shared"]
"""A neuron's bundle, its row of scales, or what the rows of 32 neurons have for all of them."""


def _list_pieces(layout: BundleLayout) -> Iterator[tuple[_Place, slice]]:
    """What a neuron is made of, in one order for all layouts: in which array, and where."""
    weights = weight_bytes(layout.hidden, layout.precision)
    for part in layout.parts:
        yield "bundle", slice(part.weights_offset, part.weights_offset + weights)
        size = layout.hidden if part.spread else scale_bytes(layout.hidden, layout.precision)
        own = slice(part.scales_offset, part.scales_offset + size)
        kind: _Place = "scales" if part.resident else "bundle"
        yield "shared" if part.spread and part.resident else kind, own
    for bias in layout.biases:
        yield "bundle", slice(bias.offset, bias.offset + 4)
    if layout.factor_offset is not None:
        yield "bundle", slice(layout.factor_offset, layout.factor_offset + 4)
    if layout.expert_offset is not None:
        yield "bundle", slice(layout.expert_offset, layout.expert_offset + 4)


def slice_bias(bundles: U8, layout: BundleLayout, index: int) -> F32:
    """Bias ``index`` (`BundleLayout.biases`) of ``bundles`` uint8 [n, stride]: float32 [n]."""
    offset = layout.biases[index].offset
    column = np.ascontiguousarray(bundles[:, offset : offset + 4])
    return np.asarray(column.view("<f4")[:, 0], np.float32)


def slice_factors(bundles: U8, layout: BundleLayout) -> F32:
    """Factors of the activations of ``bundles`` uint8 [n, stride]: float32 [n]."""
    assert layout.factor_offset is not None
    column = bundles[:, layout.factor_offset : layout.factor_offset + 4]
    return np.asarray(np.ascontiguousarray(column).view("<f4")[:, 0], np.float32)


def slice_experts(bundles: U8, layout: BundleLayout) -> I32:
    """Numbers of the experts of ``bundles`` uint8 [n, stride]: int32 [n]."""
    assert layout.expert_offset is not None
    column = bundles[:, layout.expert_offset : layout.expert_offset + 4]
    return np.asarray(np.ascontiguousarray(column).view("<i4")[:, 0], np.int32)


def slice_part(bundles: U8, layout: BundleLayout, index: int) -> tuple[U8, Scales | None]:
    """Return packed weights [n, weight bytes] (a view) and scales [n, .] (a copy) of part
    ``index`` of ``bundles`` uint8 [n, stride], which have all scales in them."""
    packing = find_packing(layout.precision)
    weights, scales = (own for _, own in list(_list_pieces(layout))[2 * index : 2 * index + 2])
    if not packing.has_scales:
        return bundles[:, weights], None
    raw = np.ascontiguousarray(bundles[:, scales])
    return bundles[:, weights], packing.view_scales(raw, len(bundles))
