"""The bundle's stride is a multiple of the device's block.

Why: direct reads begin and end at blocks, so only then is a neuron one read into its place.

Example: ``stride = "448 B"`` for a device with blocks of 512 bytes.

Fix: round up to the next multiple.  Where a device states no block, it is 512 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import has_packable_shape
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.weights.layout import round_up

CODE = "P221"
SEVERITY = "error"
NEEDS = ("plan", "device", "model")


def check(facts: Facts) -> Iterator[Finding]:
    """Divide the stride by the block."""
    stride, block = facts.plan.bundle.stride, find_block_bytes(facts.device)
    model = facts.model
    if not has_packable_shape(model):
        return
    used = model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes
    if stride < used or stride % block == 0:  # P220 speaks of a stride that is too small
        return
    origins: tuple[Origin, ...] = ()
    if facts.device.storage.block_size is not None:
        path = ("storage", "block_size")
        origins = (
            Origin(document="device", path=path, text=f'block_size = "{format_bytes(block)}"'),
        )
    yield Finding(
        path=("bundle", "stride"),
        message=f"the stride of {stride} bytes is not a multiple of the device's block of "
        f"{block} bytes",
        help=f'write stride = "{format_bytes(round_up(stride, block))}"',
        origins=origins,
    )
