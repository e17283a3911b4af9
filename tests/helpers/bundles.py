"""Neurons rounded into bundles, and taken out of them."""

from pi2.arrays import F32, U8
from pi2.formats import find_packing
from pi2.plan.weights.bundles import assemble_bundles, unpack_part
from pi2.plan.weights.layout import BundleLayout


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
        find_packing(part.precision).quantize(values, spread=part.spread)
        for values, part in zip(rows, layout.parts, strict=True)
    ]
    return assemble_bundles(packed, layout, biases)


def unpack_bundles(bundles: U8, layout: BundleLayout) -> tuple[F32, F32, F32]:
    """Undo `pack_bundles` of gated neurons: gate, up, down (columns as rows) [n, hidden]."""
    assert layout.is_gated, layout
    gate, up, down = (unpack_part(bundles, layout, index) for index in range(3))
    return gate, up, down
