"""Layout of neuron bundles of packed vectors (`pi2.formats.packing`) in bytes.

The store's writer, its reader, the kernels and the plan's memory arithmetic share this layout. Pure
arithmetic, without numpy: ``pi2 validate`` uses it.

A *bundle* is one FFN neuron: gate row, up row and down column, or up row and down column if neurons
have no gate; each is followed by its scales. Gate and up rows may be unchanged blocks of a GGUF
file, with their scales in them. Biases of the neuron (gate's, then up's) come next, float32, at a
multiple of 4 bytes. In models that normalise activations, the factor of its normalised activation
follows, float32, at a multiple of 4 bytes. In an MoE model, the number of the
neuron's expert comes last, int32, at a multiple of 4 bytes.

With *resident* scales a bundle has none: a separate table has a row for each neuron, with the
scales of its vectors one after the other; it is in memory wherever bundles are.

Neurons of mxfp4 are exact copies of checkpoints, in which 32 neurons share the scale of an element
of their down columns (`Packing.shares_down_scales`). So their gates and ups have scales in the
bundle, and the scales of their downs are resident. Of 32 neurons in stored order, they are one
vector of ``hidden`` bytes in the int8 layout, in the 32 rows of these neurons. Neurons of mxfp4
with all scales in them have such a vector each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pi2.formats import find_packing
from pi2.formats.packing import ALIGNMENT as ALIGNMENT
from pi2.formats.packing import GROUP as GROUP
from pi2.formats.packing import align_bytes as align_bytes
from pi2.formats.packing import fill_groups as fill_groups
from pi2.formats.packing import round_up as round_up
from pi2.formats.packing import split_lanes as split_lanes

if TYPE_CHECKING:
    from pi2.arrays import Raw, Scales

PartName = Literal["gate", "up", "down"]
Precision = str
"""Name of a format of packed vectors."""
ScalesPlace = Literal["inline", "resident"]


def weight_bytes(length: int, precision: Precision) -> int:
    """Bytes of the weights of one packed vector, scales not included."""
    return find_packing(precision).count_weight_bytes(length)


def scale_bytes(length: int, precision: Precision) -> int:
    return find_packing(precision).count_scale_bytes(length)


def vector_bytes(length: int, precision: Precision) -> int:
    return weight_bytes(length, precision) + scale_bytes(length, precision)


def matrix_bytes(rows: int, length: int, precision: Precision) -> int:
    """Bytes of ``rows`` packed vectors of ``length``."""
    return rows * vector_bytes(length, precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One vector of a bundle: first bytes of its weights and scales; resident scales are in the
    neuron's row of scales."""

    name: PartName
    precision: Precision
    weights_offset: int
    scales_offset: int
    resident: bool = False
    """Whether its scales are outside of the bundle."""
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
    """Of the down vector, and of the others unless they have blocks of GGUF files."""
    parts: tuple[Part, ...]
    used_bytes: int
    stride: int
    biases: tuple[Bias, ...] = ()
    factor_offset: int | None = None
    """Byte of the factor of the normalised activation; None where there is no such norm."""
    expert_offset: int | None = None
    """Byte of the expert's number; None without experts."""
    scales: ScalesPlace = "inline"
    """Place of the scales: inside or outside of the bundle."""

    @property
    def is_gated(self) -> bool:
        return self.parts[0].name == "gate"

    @property
    def gate_up(self) -> Precision:
        """The precision of all vectors but the down vector."""
        return self.parts[0].precision

    @property
    def gate_bytes(self) -> int:
        """Bytes of one of these with its scales, wherever they lie."""
        return vector_bytes(self.hidden, self.gate_up)

    @property
    def down_bytes(self) -> int:
        """Bytes of the down vector, likewise, if it shares none."""
        return vector_bytes(self.hidden, self.precision)

    @property
    def first_bytes(self) -> int:
        """Bytes of the first vector: the read for the gate, if there is one."""
        return self.parts[1].weights_offset

    @property
    def scales_stride(self) -> int:
        """Bytes from one neuron's scales to the next if they are next to bundles, else 0."""
        return sum(scale_bytes(self.hidden, own.precision) for own in self.parts if own.resident)

    @property
    def neuron_bytes(self) -> int:
        """Bytes of a neuron without padding, scales included wherever they lie."""
        return self.used_bytes + self.scales_stride

    @property
    def inline(self) -> BundleLayout:
        """The layout with scales in the bundle, a multiple of 512 bytes apart."""
        return lay_out_bundle(
            self.hidden,
            self.precision,
            gated=self.is_gated,
            bias=bool(self.biases),
            factor=self.factor_offset is not None,
            mixed=self.expert_offset is not None,
            gate_up=self.gate_up,
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
    gate_up: Precision | None = None,
) -> BundleLayout:
    """Lay out a neuron, ``mixed``: of an expert, ``factor``: with one of its activation; ``stride``
    defaults to the next multiple of 512 bytes, ``gate_up`` to ``precision``."""
    offset, row, parts = 0, 0, []
    names: tuple[PartName, ...] = ("gate", "up", "down") if gated else ("up", "down")
    for name in names:
        own = precision if name == "down" or gate_up is None else gate_up
        packing = find_packing(own)
        end = offset + packing.count_weight_bytes(hidden)
        spread = packing.shares_down_scales and name == "down"
        resident = scales == "resident" and packing.has_scales
        resident = resident and (spread or not packing.shares_down_scales)
        size = packing.count_scale_bytes(hidden)
        part = Part(
            name=name,
            precision=own,
            weights_offset=offset,
            scales_offset=row if resident else end,
            resident=resident,
            spread=spread,
        )
        parts.append(part)
        offset = end
        if resident:
            row += size
        else:
            offset += hidden if spread else size

    def place_number() -> int:
        """The next multiple of 4 bytes, for a number of 4 bytes."""
        nonlocal offset
        offset = round_up(offset, 4) + 4
        return offset - 4

    biases = tuple(Bias(name=name, offset=place_number()) for name in names[:-1] if bias)
    factor_offset = place_number() if factor else None
    expert_offset = place_number() if mixed else None
    if stride is None:
        stride = round_up(offset, 512)
    assert stride >= offset, (stride, offset)
    return BundleLayout(
        hidden=hidden,
        precision=precision,
        parts=tuple(parts),
        used_bytes=offset,
        stride=stride,
        biases=biases,
        factor_offset=factor_offset,
        expert_offset=expert_offset,
        scales=scales,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of the store, in memory, not copied.

    Quantised (`pi2.plan.weights.layout`): ``weights`` uint8 [rows, weight_bytes], ``scales``
    float16 [rows, length / 32], of ternary float32 [rows, 1].  fp16: ``weights`` uint8
    [rows, 2 length], no scales.  ``precision`` None is float32: ``weights`` float32 [rows, length].
    64-byte aligned."""

    name: str
    rows: int
    length: int
    precision: Precision | None
    weights: Raw
    scales: Scales | None = None
    format: str | None = None
    """The name of `pi2.formats` of what ``weights`` uint8 [rows, bytes] are then: whole blocks."""

    def take_rows(self, first: int, end: int | None = None) -> Tensor:
        """Return the rows from ``first`` to ``end``, by default the last, not copied."""
        rows = slice(first, self.rows if end is None else end)
        count = rows.stop - rows.start
        weights = self.weights.reshape(self.rows, -1)[rows]
        scales = None if self.scales is None else self.scales.reshape(self.rows, -1)[rows]
        return replace(self, rows=count, weights=weights, scales=scales)
