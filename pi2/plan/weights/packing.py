"""Packs float32 vectors into the bytes that `pi2.plan.weights.layout` describes, and back.

numpy code, and therefore never imported by the plan language itself (``pi2 validate`` starts
without numpy); the store, the converter, the backends and tests import it.

Quantisers (round to nearest, one fp16 scale per group of 32 along the vector):

- int4: ``scale = fp16(max|w| / 7)``, ``q = clip(rint(w / scale), -8, 7)``
- int8: ``scale = fp16(max|w| / 127)``, ``q = clip(rint(w / scale), -127, 127)``
- int2: ``q`` = -3, -1, 1 or 3, the nearest to ``w / scale``; the scale is the best of a few for
  the squared error; int3: likewise of -7, -5, ..., 7
- ternary: ``q = clip(rint(w / mean|w|), -1, 1)`` over the vector, whose one float32 scale is the
  mean of |w| where q is not 0: vectors of -s, 0 and s keep their numbers exactly
- fp16: plain values, no scales
- mxfp4: `pi2.plan.weights.mxfp4`, with a function of its own (`quantize_exponents`)

A group whose scale is 0 has ``q = 0``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from pi2.arrays import F16, F32, I8, I32, I64, U8, U32, Raw, Scales
from pi2.plan.weights.gates import GateRecord
from pi2.plan.weights.layout import (
    GROUP,
    BundleLayout,
    Part,
    Precision,
    scale_bytes,
    split_lanes,
    weight_bytes,
)
from pi2.plan.weights.mxfp4 import find_codes, take_units, take_values

_TOP = {"int4": 7, "int8": 127}
_BOTTOM = {"int4": -8, "int8": -127}
_CHUNK_WEIGHTS = 2**18
"""Weights quantised together: their temporaries stay within a core's cache."""


def quantize(rows: F32, precision: Precision) -> tuple[U8, Scales | None]:
    """Quantise and pack ``rows`` float32 [n, length].

    Returns packed weights uint8 [n, weight_bytes] and scales float16 [n, length / 32] (None for
    fp16; float32 [n, 1] for ternary).  Raises `ValueError` if a weight is not finite or does not
    fit into fp16.
    """
    count, length = rows.shape
    assert rows.dtype == np.float32 and precision != "mxfp4", (rows.dtype, precision)
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = np.ascontiguousarray(rows, dtype="<f2")
        if not np.isfinite(halves).all():
            raise ValueError(_explain_overflow(rows))
        return halves.view(np.uint8).reshape(count, 2 * length), None
    weights = np.empty((count, weight_bytes(length, precision)), np.uint8)
    step = max(1, _CHUNK_WEIGHTS // length)
    if precision == "ternary":
        units = np.empty((count, 1), "<f4")
        for start in range(0, count, step):
            piece = slice(start, start + step)
            weights[piece] = pack_codes(_find_ternary(rows[piece], units[piece]), precision)
        return weights, units
    scales = np.empty((count, length // GROUP), "<f2")
    find_codes = _quantize_odd if precision in _ODD_TOPS else _quantize_groups
    for start in range(0, count, step):
        piece = slice(start, start + step)
        codes = find_codes(rows[piece], precision, scales[piece])
        weights[piece] = pack_codes(codes, precision)
    return weights, scales


def dequantize(weights: U8, scales: Scales | None, length: int, precision: Precision) -> F32:
    """Undo `quantize`: packed uint8 [n, weight_bytes] -> float32 [n, length]."""
    count = weights.shape[0]
    if precision == "fp16":
        assert scales is None
        return np.ascontiguousarray(weights).view("<f2").reshape(count, length).astype(np.float32)
    assert scales is not None and precision != "mxfp4"
    codes = unpack_codes(weights, length, precision).reshape(count, length // GROUP, GROUP)
    values = codes.astype(np.float32)
    values *= scales.astype(np.float32)[:, :, None]
    return values.reshape(count, length)


def quantize_exponents(rows: F32, *, spread: bool) -> tuple[U8, U8]:
    """Quantise and pack ``rows`` float32 [n, length] as mxfp4.

    Returns packed weights uint8 [n, length / 2] and exponents: uint8 [n, length / 32] of groups
    along the rows, or, where they are ``spread``, [n, length] in the int8 layout: every 32 rows, of
    which there is a multiple, share those of their elements.  Raises `ValueError` as `find_codes`
    does.
    """
    count, length = rows.shape
    if not spread:
        codes, exponents = find_codes(rows.reshape(count, length // GROUP, GROUP), axis=2)
        return pack_codes(codes.reshape(rows.shape), "mxfp4"), exponents
    codes, exponents = find_codes(rows.reshape(count // GROUP, GROUP, length), axis=1)
    packed = pack_codes(np.ascontiguousarray(exponents).view(np.int8), "int8")
    return pack_codes(codes.reshape(rows.shape), "mxfp4"), np.repeat(packed, GROUP, axis=0)


def dequantize_exponents(weights: U8, exponents: U8, length: int, *, spread: bool) -> F32:
    """Undo `quantize_exponents`: float32 [n, length]."""
    values = take_values(unpack_codes(weights, length, "mxfp4"))
    if spread:
        units = take_units(unpack_codes(exponents, length, "int8").view(np.uint8))
        return np.asarray(values * units)
    groups = values.reshape(len(values), length // GROUP, GROUP)
    groups *= take_units(exponents)[:, :, None]
    return values


def pack_codes(codes: I8, precision: Precision) -> U8:
    """Lay int8 [n, length] codes (int4: -8..7; mxfp4: 0..15; int3: -7, -5, ..., 7; int2: -3, -1, 1,
    3; ternary: -1, 0, 1) out as bytes uint8 [n, weight_bytes]."""
    count, length = codes.shape
    packed = np.empty((count, weight_bytes(length, precision)), np.uint8)
    group, byte = 0, 0
    # Blocks of the same number of lanes are laid out together.
    for lanes, blocks in Counter(split_lanes(length)).items():
        elements = blocks * lanes * GROUP
        size = weight_bytes(elements, precision)
        block = np.ascontiguousarray(codes[:, group * GROUP : group * GROUP + elements])
        # Four elements are a word; word w of all lanes comes before word w + 1.
        words = block.view("<u4").reshape(count, blocks, lanes, 8)
        ordered = np.ascontiguousarray(words.transpose(0, 1, 3, 2))
        if precision in ("int4", "mxfp4"):
            ordered = _join_nibbles(ordered[:, :, :4], ordered[:, :, 4:])
            if precision == "int4":
                # With 4 bits, adding 8 is turning the highest over.
                ordered ^= np.uint32(0x88888888)
        elif precision == "int2":
            ordered = _join_pairs(_number_odd(ordered, 3))
        elif precision == "ternary":
            ordered = _join_pairs((ordered.view(np.int8) + np.int8(1)).view(np.uint32))
        elif precision == "int3":
            ordered = _join_triples(_number_odd(ordered, 7))
        packed[:, byte : byte + size] = ordered.reshape(count, -1).view(np.uint8)
        group += blocks * lanes
        byte += size
    return packed


def _join_nibbles(low: U32, high: U32) -> U32:
    """Words of four bytes ``q | q' << 4``, of words of four codes q and q'."""
    joined = high << np.uint32(4)
    joined &= np.uint32(0xF0F0F0F0)
    joined |= low & np.uint32(0x0F0F0F0F)
    return joined


def _number_odd(words: U32, top: int) -> U32:
    """Words of four numbers ``(q + top) / 2``, of words of four odd codes q."""
    return ((words.view(np.int8) + np.int8(top)) >> np.int8(1)).view(np.uint32)


def _join_triples(fields: U32) -> U32:
    """Words [n, blocks, 3, lanes]: the lower two bits of the numbers in the ``fields`` [n, blocks,
    8, lanes], then the highest ones."""
    highest = np.zeros_like(fields[:, :, :1])
    for word in range(8):
        own = (fields[:, :, word : word + 1] >> np.uint32(2)) & np.uint32(0x01010101)
        highest |= own << np.uint32(word)
    return np.concatenate([_join_pairs(fields & np.uint32(0x03030303)), highest], axis=2)


def _join_pairs(fields: U32) -> U32:
    """Words [n, blocks, 2, lanes] of the numbers of two bits in the ``fields`` [n, blocks, 8,
    lanes], four in each."""
    joined = np.zeros_like(fields[:, :, :2])
    for turn in range(4):
        joined |= fields[:, :, 2 * turn : 2 * turn + 2] << np.uint32(2 * turn)
    return joined


def unpack_codes(weights: U8, length: int, precision: Precision) -> I8:
    """Undo `pack_codes`: bytes uint8 [n, weight_bytes] -> codes int8 [n, length]."""
    count = weights.shape[0]
    codes = np.empty((count, length), np.int8)
    group, byte = 0, 0
    for lanes in split_lanes(length):
        elements = lanes * GROUP
        size = weight_bytes(elements, precision)
        source = weights[:, byte : byte + size]
        block = np.empty((count, lanes, GROUP), np.int8)
        if precision in ("int4", "mxfp4"):
            ordered = source.reshape(count, 4, lanes, 4).transpose(0, 2, 1, 3)
            pairs = ordered.reshape(count, lanes, 16)
            block[:, :, :16] = pairs & np.uint8(15)
            block[:, :, 16:] = pairs >> np.uint8(4)
            if precision == "int4":
                block -= np.int8(8)
        elif precision == "ternary" or precision in _ODD_TOPS:
            ordered = source[:, : 8 * lanes].reshape(count, 2, lanes, 4).transpose(0, 2, 1, 3)
            fours = ordered.reshape(count, lanes, 8)
            for turn in range(4):
                fields = (fours >> np.uint8(2 * turn)) & np.uint8(3)
                block[:, :, 8 * turn : 8 * turn + 8] = fields
            if precision == "int3":
                highest = source[:, 8 * lanes :].reshape(count, lanes, 4)
                for word in range(8):
                    own = (highest >> np.uint8(word)) & np.uint8(1)
                    block[:, :, 4 * word : 4 * word + 4] += (own << np.uint8(2)).view(np.int8)
            if precision == "ternary":
                block -= np.int8(1)
            else:
                block *= np.int8(2)
                block -= np.int8(_ODD_TOPS[precision])
        else:
            ordered = source.reshape(count, 8, lanes, 4).transpose(0, 2, 1, 3)
            block[:] = ordered.reshape(count, lanes, GROUP).view(np.int8)
        codes[:, group * GROUP : group * GROUP + elements] = block.reshape(count, elements)
        group += lanes
        byte += size
    return codes


def order_words(weights: U8, length: int, precision: Precision) -> U32:
    """Put the words of packed vectors uint8 [n, weight_bytes] in the order of groups: uint32 [n,
    groups, words of a group]."""
    count = len(weights)
    words = weight_bytes(GROUP, precision) // 4
    if precision == "fp16":
        plain = np.ascontiguousarray(weights).view("<u4")
        return np.asarray(plain.reshape(count, length // GROUP, words), np.uint32)
    ordered = np.empty((count, length // GROUP, words), np.uint32)
    group, byte = 0, 0
    for lanes, blocks in Counter(split_lanes(length)).items():
        groups = blocks * lanes
        size = weight_bytes(groups * GROUP, precision)
        source = np.ascontiguousarray(weights[:, byte : byte + size]).view("<u4")
        block = source.reshape(count, blocks, words, lanes).transpose(0, 1, 3, 2)
        ordered[:, group : group + groups].reshape(count, blocks, lanes, words)[:] = block
        group += groups
        byte += size
    return ordered


def pack_bundles(
    gate: F32 | None, up: F32, down: F32, layout: BundleLayout, biases: F32 | None = None
) -> U8:
    """Quantise neurons to nearest into bundles uint8 [n, stride].

    ``gate`` (None where neurons have none) and ``up`` are float32 [n, hidden] rows, ``down``
    float32 [n, hidden] holds the columns of down_proj as rows; ``biases`` float32
    [n, len(layout.biases)].
    """
    assert (gate is not None) == layout.is_gated, layout
    rows = [up, down] if gate is None else [gate, up, down]
    packed = [
        quantize_part(values, part, layout.precision)
        for values, part in zip(rows, layout.parts, strict=True)
    ]
    return assemble_bundles(packed, layout, biases)


def quantize_part(rows: F32, part: Part, precision: Precision) -> tuple[U8, Raw | None]:
    """Quantise and pack ``rows`` [n, hidden] as vectors of ``part``: weights uint8 and what they
    have for scales."""
    if precision == "mxfp4":
        return quantize_exponents(rows, spread=part.spread)
    return quantize(rows, precision)


def assemble_bundles(
    parts: Sequence[tuple[Raw, Raw | None]],
    layout: BundleLayout,
    biases: F32 | None = None,
    experts: I32 | None = None,
    factors: F32 | None = None,
) -> U8:
    """Lay packed vectors out as bundles uint8 [n, stride].

    ``parts``: weights uint8 [n, weight bytes] and scales [n, .] of each of
    ``layout.parts``; ``biases`` float32 [n, len(layout.biases)]; ``experts`` int32 [n] in a
    mixture; ``factors`` float32 [n] where activations are normalised.  Bytes beyond ``used_bytes``
    are zero.
    """
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


def unpack_bundles(bundles: U8, layout: BundleLayout) -> tuple[F32, F32, F32]:
    """Undo `pack_bundles` of gated neurons: gate, up and down (columns as rows), float32
    [n, hidden] each."""
    assert layout.is_gated, layout
    gate, up, down = (unpack_part(bundles, layout, index) for index in range(3))
    return gate, up, down


def unpack_part(bundles: U8, layout: BundleLayout, index: int) -> F32:
    """Vectors of part ``index`` of ``bundles`` uint8 [n, stride]: float32 [n, hidden]."""
    if layout.precision == "mxfp4":
        part, place = layout.parts[index], _list_pieces(layout)
        pieces = [bundles[:, own] for _, own in list(place)[2 * index : 2 * index + 2]]
        weights, exponents = (np.ascontiguousarray(piece) for piece in pieces)
        return dequantize_exponents(weights, exponents, layout.hidden, spread=part.spread)
    weights, scales = slice_part(bundles, layout, index)
    return dequantize(weights, scales, layout.hidden, layout.precision)


def split_scales(bundles: U8, layout: BundleLayout) -> tuple[U8, U8]:
    """Take the scales out of ``bundles`` uint8 [n, .], laid out as ``layout.inline``.

    Returns bundles [n, layout.stride] as ``layout`` says and rows of scales [n,
    layout.scales_stride].  Of mxfp4, ``bundles`` are whole groups of 32.
    """
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


def view_scales(raw: U8, rows: int, precision: Precision) -> Scales:
    """The scales of ``rows`` packed vectors whose bytes are ``raw``, one after the other or
    [rows, .]: [rows, .]."""
    scales: Scales = raw.view("<f4") if precision == "ternary" else raw.view("<f2")
    # Of no rows, only what is in rows tells how long they are.
    return scales if scales.ndim == 2 else scales.reshape(rows, -1)


def unpack_gates(packed: U8, record: GateRecord) -> tuple[U8, Scales | None, F32 | None]:
    """Weights [neurons, row bytes], scales [neurons, groups] and biases [neurons] of an expert's
    gates uint8 [record.stride], views; None where there are none."""
    count = record.neurons
    weights = packed[: count * record.row_bytes].reshape(count, record.row_bytes)
    scales = biases = None
    if record.scale_bytes:
        raw = packed[record.scales_offset :][: count * record.scale_bytes]
        scales = view_scales(raw, count, record.precision)
    if record.has_biases:
        biases = packed[record.biases_offset :][: 4 * count].view("<f4")
    return weights, scales, biases


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
    """Return packed weights [n, weight_bytes] (a view) and scales [n, .] (a copy) of part
    ``index`` of ``bundles`` uint8 [n, stride]; not of mxfp4."""
    assert layout.precision != "mxfp4"
    part = layout.parts[index]
    size = weight_bytes(layout.hidden, layout.precision)
    weights = bundles[:, part.weights_offset : part.weights_offset + size]
    size = scale_bytes(layout.hidden, layout.precision)
    if size == 0:
        return weights, None
    scales = bundles[:, part.scales_offset : part.scales_offset + size]
    return weights, view_scales(np.ascontiguousarray(scales), len(bundles), layout.precision)


def _find_ternary(rows: F32, scales_out: F32) -> I8:
    """Fill ``scales_out`` [n, 1] and return codes int8 [n, length]."""
    if not np.isfinite(rows).all():
        raise ValueError(_explain_overflow(rows))
    sizes = np.abs(rows)
    means = sizes.mean(axis=1, keepdims=True, dtype=np.float64)
    means[means == 0.0] = 1.0
    fires = sizes > 0.5 * means
    # In float64 the mean of equal numbers is that number.
    total = np.where(fires, sizes, 0).sum(axis=1, keepdims=True, dtype=np.float64)
    scales_out[:] = total / np.maximum(fires.sum(axis=1, keepdims=True), 1)
    return np.where(fires, np.sign(rows), 0).astype(np.int8)


def _quantize_groups(rows: F32, precision: Precision, scales_out: F16) -> I8:
    """Fill ``scales_out`` [n, groups] and return codes int8 [n, length]."""
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    peaks = _find_peaks(rows).reshape(scales_out.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        scales_out[:] = peaks / np.float32(_TOP[precision])
    if not np.isfinite(scales_out).all():
        raise ValueError(_explain_overflow(rows))
    scales = scales_out.astype(np.float32)
    scales[scales == 0.0] = 1.0
    quotients = groups / scales[:, :, None]
    np.rint(quotients, out=quotients)
    np.clip(quotients, _BOTTOM[precision], _TOP[precision], out=quotients)
    codes = quotients.astype(np.int8)
    # A scale that underflowed to 0 stands for zeros whatever the tiny weights were.
    codes[scales_out == 0.0] = 0
    return codes.reshape(count, length)


_ODD_TOPS = {"int2": 3, "int3": 7}
"""Largest codes of precisions whose codes are odd."""
_ODD_SCALES = {"int2": (0.42, 0.5, 0.58), "int3": (0.24, 0.29, 0.34)}
"""Scales that are tried, as parts of a group's root mean square: the second is best for normal
ones."""


def _quantize_odd(rows: F32, precision: Precision, scales_out: F16) -> I8:
    """Fill ``scales_out`` [n, groups] and return odd codes int8 [n, length]."""
    top = _ODD_TOPS[precision]
    count, length = rows.shape
    groups = rows.reshape(count, length // GROUP, GROUP)
    if not np.isfinite(groups).all():
        raise ValueError(_explain_overflow(rows))
    spread = np.sqrt(np.square(groups).mean(axis=2, keepdims=True))
    spread[spread == 0.0] = 1.0
    best = np.full(spread.shape, np.inf, np.float32)
    scales = np.zeros_like(spread)
    for part in _ODD_SCALES[precision]:
        codes = _find_odd(groups, spread * np.float32(part), top)
        # The best scale for these codes.
        found = (groups * codes).sum(axis=2, keepdims=True)
        found = np.maximum(found / np.square(codes).sum(axis=2, keepdims=True), 0)
        error = np.square(groups - codes * found).sum(axis=2, keepdims=True)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, found, scales)
    with np.errstate(over="ignore"):
        scales_out[:] = scales[:, :, 0]
    if not np.isfinite(scales_out).all():
        raise ValueError(_explain_overflow(rows))
    rounded = scales_out.astype(np.float32)[:, :, None]
    rounded[rounded == 0.0] = 1.0
    return _find_odd(groups, rounded, top).astype(np.int8).reshape(rows.shape)


def _find_odd(groups: F32, scales: F32, top: int) -> F32:
    """The nearest odd numbers from ``-top`` to ``top`` to ``groups`` over ``scales``."""
    half = top // 2
    return np.asarray(2 * np.clip(np.floor(groups / (2 * scales)), -half - 1, half) + 1, np.float32)


def _find_peaks(rows: F32) -> F32:
    """Largest magnitude of every group, float32 [n * groups]."""
    # Without their signs, floats are in the order of their bits, which are compared twice as fast;
    # halving one long vector is four times as fast as a reduction over rows of 32.
    peaks = (np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)).reshape(-1)
    while len(peaks) > rows.size // GROUP:
        peaks = np.maximum(peaks[::2], peaks[1::2])
    return peaks.view(np.float32)


def _explain_overflow(rows: F32) -> str:
    if not np.isfinite(rows).all():
        return "a weight is not a finite number"
    return f"a weight of magnitude {float(np.abs(rows).max()):.4g} does not fit into fp16"
