"""How the gates of a mixture's experts lie apart from their neurons, an expert's in one stretch.

An expert's *record* has the gate rows of all of its neurons in stored order, then their scales,
then the gates' float32 biases where neurons have biases; zeros fill it up to a whole page, so that
a record is one direct read.  Pure arithmetic, as `pi2.plan.weights.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pi2.plan.weights.layout import (
    ALIGNMENT,
    BundleLayout,
    Precision,
    round_up,
    scale_bytes,
    weight_bytes,
)

PAGE = 4096
"""Bytes; records are a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRecord:
    """The gates of one expert: places in bytes from the record's beginning."""

    neurons: int
    """Neurons of an expert."""
    precision: Precision
    row_bytes: int
    """Bytes of a gate row's weights."""
    scale_bytes: int
    """Bytes of a gate row's scales; 0 where there are none."""
    scales_offset: int
    biases_offset: int
    has_biases: bool
    stride: int
    """Bytes of a record."""


def lay_out_gates(bundle: BundleLayout, neurons: int) -> GateRecord:
    """Lay out the gates of an expert of ``neurons`` that lie as ``bundle`` says."""
    assert bundle.is_gated, bundle
    row = weight_bytes(bundle.hidden, bundle.precision)
    scales = scale_bytes(bundle.hidden, bundle.precision)
    scales_offset = round_up(neurons * row, ALIGNMENT)
    biases_offset = round_up(scales_offset + neurons * scales, ALIGNMENT)
    has_biases = bool(bundle.biases)
    end = biases_offset + 4 * neurons * has_biases
    return GateRecord(
        neurons=neurons,
        precision=bundle.precision,
        row_bytes=row,
        scale_bytes=scales,
        scales_offset=scales_offset,
        biases_offset=biases_offset,
        has_biases=has_biases,
        stride=round_up(end, PAGE),
    )
