"""How weights lie in bytes: packed vectors, matrices and neuron bundles.

The one description of the layout that the store's writer, its reader, the kernels and the plan's
memory arithmetic share.  Pure arithmetic: no numpy, so that ``pi2 validate`` may use it.

A *packed vector* holds ``length`` quantised weights, a multiple of 32 (zeros fill up those of other
widths), in groups of 32 that share one fp16 scale.  Groups are taken together in *blocks* of 16
lanes, then a tail of 8, 4, 2, 1 lanes (the binary digits of what is left), so that no lane is left
empty.  Within a block of L lanes, lane ``j`` belongs to group ``j``:

- int4: 4 chunks of 4 L bytes.  Byte ``b`` of lane ``j`` in chunk ``c`` holds element ``4c + b`` of
  group ``j`` in its low nibble and element ``16 + 4c + b`` in its high nibble, as ``q + 8`` with q
  in -8..7.
- int2: 2 chunks of 4 L bytes.  Byte ``b`` of lane ``j`` in chunk ``c`` holds
  elements ``4c + b + 8k`` of group ``j`` in its bits 2k and 2k + 1, as ``(q + 3) / 2`` with q one
  of -3, -1, 1 and 3.
- ternary: as int2, but a field is ``q + 1`` with q one of -1, 0 and 1; the whole vector shares one
  scale, float32.
- mxfp4, for neurons alone: as int4, but a nibble's low three bits are the place of the code's
  magnitude in 0, 1, 2, 3, 4, 6, 8, 12 (twice what E2M1 says), and its highest bit is its sign.
- int3: the two chunks of int2 with the lower bits of ``(q + 7) / 2``, q one of -7,
  -5, ..., 7, then one of 4 L bytes with the highest.  Its byte ``b`` of lane ``j`` holds that of
  element ``4w + b`` of group ``j`` in bit w.
- int8: 8 chunks of 4 L bytes.  Byte ``b`` of lane ``j`` in chunk ``c`` holds element ``4c + b`` of
  group ``j``, signed.

So one vector instruction multiplies 4 elements of 16 groups, the integer sum of a whole group ends
up in its lane, and the lane-wise multiplication with 16 consecutive scales needs no shuffle.  int8
activations use the int8 layout.  fp16 vectors are plain.  Scales follow in the order of groups.
A scale of mxfp4 is one byte e that stands for 2^(e - 127), and for nothing but zeros where e is 0.

A *bundle* is one FFN neuron: gate row, up row and down column, or up row and down column where
neurons have no gate; each is followed by its scales.  Biases of the neuron (gate's, then up's)
come next, float32, at a multiple of 4 bytes; then, in models that normalise activations, the factor
of its normalised activation, float32, at a multiple of 4 bytes; in a mixture of experts, the number
of the neuron's expert comes last, int32, at a multiple of 4 bytes.

With *resident* scales a bundle has none: those of all neurons lie beside the bundles, one row for a
neuron with the scales of its vectors one after the other, and are in memory wherever bundles are.

Neurons of mxfp4 are exact copies of checkpoints, where 32 neurons share the scale of an element of
their down columns.  So their gates and ups have scales in the bundle, and the scales of their downs
are resident: for 32 neurons that follow each other, in stored order, one vector of ``hidden`` bytes
in the int8 layout, in the 32 rows of these neurons.  Neurons of mxfp4 with all scales in them have
such a vector each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GROUP = 32
"""Weights that share a scale."""

ALIGNMENT = 64
"""Alignment in bytes: every allocation begins at a multiple of it."""

PartName = Literal["gate", "up", "down"]
Precision = Literal["ternary", "int4", "int8", "fp16", "mxfp4", "int2", "int3"]
ScalesPlace = Literal["inline", "resident"]


_BITS: Mapping[Precision, int] = {
    "ternary": 2,
    "int2": 2,
    "int3": 3,
    "int4": 4,
    "mxfp4": 4,
    "int8": 8,
    "fp16": 16,
}


def split_lanes(length: int) -> list[int]:
    """Return the lanes of each block of a packed vector, ``[16, 16, ..., 8, 4, 2, 1]``."""
    assert length > 0 and length % GROUP == 0, length
    groups = length // GROUP
    lanes = [16] * (groups // 16)
    rest = groups % 16
    lanes += [size for size in (8, 4, 2, 1) if rest & size]
    return lanes


def weight_bytes(length: int, precision: Precision) -> int:
    """Bytes of the weights of one packed vector, scales not included."""
    return length * _BITS[precision] // 8


def count_chunks(precision: Precision) -> int:
    """Chunks of a block of quantised weights, that of the highest bits of int3 left out."""
    return 2 if precision == "int3" else _BITS[precision]


def scale_bytes(length: int, precision: Precision) -> int:
    """Bytes of the scales of one packed vector: fp16, of mxfp4 one byte each; of ternary a
    float32."""
    if precision == "ternary":
        return 4
    return length // GROUP * {"fp16": 0, "mxfp4": 1}.get(precision, 2)


def vector_bytes(length: int, precision: Precision) -> int:
    """Bytes of one packed vector: weights and scales."""
    return weight_bytes(length, precision) + scale_bytes(length, precision)


def matrix_bytes(rows: int, length: int, precision: Precision) -> int:
    """Bytes of ``rows`` packed vectors of ``length``."""
    return rows * vector_bytes(length, precision)


def fill_groups(width: int) -> int:
    """Length of the packed vector that holds ``width`` elements: zeros fill its last group."""
    return round_up(width, GROUP)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def align_bytes(size: int) -> int:
    """Round up to a cache line, where every tensor begins."""
    return round_up(size, ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One vector of a bundle: where its weights and scales begin, in bytes; resident scales, in the
    neuron's row of scales."""

    name: PartName
    weights_offset: int
    scales_offset: int
    resident: bool = False
    """Whether its scales lie beside the bundle."""
    spread: bool = False
    """Whether every element has a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """A neuron's float32 bias: of which part, and its byte in the bundle."""

    name: PartName
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLayout:
    """One neuron in the store: the vectors, with or without their scales, and its biases."""

    hidden: int
    precision: Precision
    parts: tuple[Part, ...]
    used_bytes: int
    stride: int
    biases: tuple[Bias, ...] = ()
    factor_offset: int | None = None
    """Byte of the factor of the normalised activation; None where there is no such norm."""
    expert_offset: int | None = None
    """Byte of the expert's number; None without experts."""
    scales: ScalesPlace = "inline"
    """Where scales lie: in the bundle, or beside it."""

    @property
    def is_gated(self) -> bool:
        """Whether neurons have a gate."""
        return self.parts[0].name == "gate"

    @property
    def first_bytes(self) -> int:
        """Bytes of the first vector: what has to be read for the gate, where there is one."""
        return self.parts[1].weights_offset

    @property
    def scales_stride(self) -> int:
        """Bytes from one neuron's scales to the next, where they lie beside bundles, else 0."""
        resident = sum(part.resident for part in self.parts)
        return resident * scale_bytes(self.hidden, self.precision)

    @property
    def neuron_bytes(self) -> int:
        """Bytes of a neuron without padding, scales included wherever they lie."""
        return self.used_bytes + self.scales_stride

    @property
    def inline(self) -> BundleLayout:
        """The layout of the same neuron with its scales in the bundle, a multiple of 512 bytes
        apart."""
        return lay_out_bundle(
            self.hidden,
            self.precision,
            gated=self.is_gated,
            bias=bool(self.biases),
            factor=self.factor_offset is not None,
            mixed=self.expert_offset is not None,
        )


def lay_out_bundle(
    hidden: int,
    precision: Precision,
    stride: int | None = None,
    *,
    gated: bool = True,
    bias: bool = False,
    factor: bool = False,
    mixed: bool = False,
    scales: ScalesPlace = "inline",
) -> BundleLayout:
    """Lay out a neuron, ``mixed``: of an expert, ``factor``: with one of its activation; ``stride``
    defaults to the next multiple of 512 bytes."""
    offset, row, parts = 0, 0, []
    names: tuple[PartName, ...] = ("gate", "up", "down") if gated else ("up", "down")
    for name in names:
        end = offset + weight_bytes(hidden, precision)
        spread = precision == "mxfp4" and name == "down"
        resident = scales == "resident" and (spread or precision != "mxfp4")
        part = Part(
            name=name,
            weights_offset=offset,
            scales_offset=row if resident else end,
            resident=resident,
            spread=spread,
        )
        parts.append(part)
        offset = end
        if resident:
            row += scale_bytes(hidden, precision)
        else:
            offset += hidden if spread else scale_bytes(hidden, precision)
    biases: list[Bias] = []
    for name in names[:-1] if bias else ():
        offset = round_up(offset, 4)
        biases.append(Bias(name=name, offset=offset))
        offset += 4
    factor_offset = None
    if factor:
        factor_offset = round_up(offset, 4)
        offset = factor_offset + 4
    expert_offset = None
    if mixed:
        expert_offset = round_up(offset, 4)
        offset = expert_offset + 4
    if stride is None:
        stride = round_up(offset, 512)
    assert stride >= offset, (stride, offset)
    return BundleLayout(
        hidden=hidden,
        precision=precision,
        parts=tuple(parts),
        used_bytes=offset,
        stride=stride,
        biases=tuple(biases),
        factor_offset=factor_offset,
        expert_offset=expert_offset,
        scales=scales,
    )
