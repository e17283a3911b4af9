"""Assembles neurons' bundles (`pi2.plan.weights.layout`) from packed vectors, and back."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from pi2.arrays import F32, I32, I64, U8, Raw, Scales
from pi2.formats import find_packing
from pi2.plan.weights.layout import GROUP, BundleLayout, scale_bytes, weight_bytes

Number = TypeVar("Number", np.float32, np.int32)


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
    columns: list[tuple[int | None, F32 | I32 | None]] = []
    if biases is not None:
        assert biases.dtype == np.float32 and np.isfinite(biases).all()
        columns += [(bias.offset, biases[:, n]) for n, bias in enumerate(layout.biases)]
    columns += [(layout.factor_offset, factors), (layout.expert_offset, experts)]
    for offset, values in columns:
        assert (values is None) == (offset is None), layout
        if values is not None and offset is not None:
            kind = "<i4" if values is experts else "<f4"
            raw = np.ascontiguousarray(values, kind).view(np.uint8)
            bundles[:, offset : offset + 4] = raw.reshape(-1, 4)
    return bundles


def unpack_part(bundles: U8, layout: BundleLayout, index: int) -> F32:
    """Vectors of part ``index`` of ``bundles`` uint8 [n, stride]: float32 [n, hidden]."""
    weights, scales = slice_part(bundles, layout, index)
    part = layout.parts[index]
    packing = find_packing(part.precision)
    return packing.dequantize(weights, scales, layout.hidden, spread=part.spread)


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
    for part in layout.parts:
        weights = weight_bytes(layout.hidden, part.precision)
        yield "bundle", slice(part.weights_offset, part.weights_offset + weights)
        size = layout.hidden if part.spread else scale_bytes(layout.hidden, part.precision)
        own = slice(part.scales_offset, part.scales_offset + size)
        kind: _Place = "scales" if part.resident else "bundle"
        yield "shared" if part.spread and part.resident else kind, own
    for bias in layout.biases:
        yield "bundle", slice(bias.offset, bias.offset + 4)
    for offset in (layout.factor_offset, layout.expert_offset):
        if offset is not None:
            yield "bundle", slice(offset, offset + 4)


def slice_bias(bundles: U8, layout: BundleLayout, index: int) -> F32:
    """Bias ``index`` (`BundleLayout.biases`) of ``bundles`` uint8 [n, stride]: float32 [n]."""
    return _slice_numbers(bundles, layout.biases[index].offset, np.float32)


def slice_factors(bundles: U8, layout: BundleLayout) -> F32:
    """Factors of the activations of ``bundles`` uint8 [n, stride]: float32 [n]."""
    assert layout.factor_offset is not None
    return _slice_numbers(bundles, layout.factor_offset, np.float32)


def slice_experts(bundles: U8, layout: BundleLayout) -> I32:
    """Numbers of the experts of ``bundles`` uint8 [n, stride]: int32 [n]."""
    assert layout.expert_offset is not None
    return _slice_numbers(bundles, layout.expert_offset, np.int32)


def _slice_numbers(bundles: U8, offset: int, kind: type[Number]) -> npt.NDArray[Number]:
    column = np.ascontiguousarray(bundles[:, offset : offset + 4])
    return column.view(np.dtype(kind).newbyteorder("<"))[:, 0].astype(kind, copy=False)


def slice_part(bundles: U8, layout: BundleLayout, index: int) -> tuple[U8, Scales | None]:
    """Return packed weights [n, weight bytes] (a view) and scales [n, .] (a copy) of part ``index``
    of ``bundles`` uint8 [n, stride] with inline scales."""
    packing = find_packing(layout.parts[index].precision)
    weights, scales = (own for _, own in list(_list_pieces(layout))[2 * index : 2 * index + 2])
    if not packing.has_scales:
        return bundles[:, weights], None
    raw = np.ascontiguousarray(bundles[:, scales])
    return bundles[:, weights], packing.view_scales(raw, len(bundles))
