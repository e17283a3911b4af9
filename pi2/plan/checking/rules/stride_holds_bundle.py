"""The bundle's stride holds a bundle.

Why: a bundle is the gate row, the up row and the down column of a neuron, each with its scales;
its size follows from the model's width and the precision of its FFN.  A stride that is too small
would let neurons overlap, one that is far too large would fill memory and reads with nothing.

Example: ``stride = "256 B"`` for neurons of 432 bytes.

Fix: the smallest multiple of the device's block that is not below the size.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.resolved import has_packable_shape
from pi2.plan.arithmetic.sizes import find_block_bytes
from pi2.plan.checking.findings import Facts, Finding, Origin
from pi2.plan.documents.quantities import format_bytes
from pi2.plan.weights.layout import round_up

CODE = "P220"
SEVERITY = "error"
NEEDS = ("plan", "device", "model")

MOST_WASTE = 2
"""A stride may be this many times what blocks of 4 KiB make of the bundle."""
LARGE_BLOCK_BYTES = 4096


def check(facts: Facts) -> Iterator[Finding]:
    """Compare the stride with the bytes of a bundle."""
    model = facts.model
    if not has_packable_shape(model):
        return
    used = model.lay_out_bundle(scales=facts.plan.bundle.scales).used_bytes
    block = find_block_bytes(facts.device)
    stride = facts.plan.bundle.stride
    fitting = round_up(used, block)
    origins = (
        Origin(document="model", path=("shape", "hidden"), text=f"hidden = {model.shape.hidden}"),
        Origin(
            document="model",
            path=("quantization", "ffn"),
            text=f'ffn weights are "{model.quantization.ffn}"',
        ),
    )
    if stride < used:
        yield Finding(
            path=("bundle", "stride"),
            message=f"a neuron takes {used} bytes, the stride is {stride}",
            help=f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )
    elif stride > MOST_WASTE * round_up(used, max(block, LARGE_BLOCK_BYTES)):
        yield Finding(
            path=("bundle", "stride"),
            message=f"a neuron takes {used} bytes, the stride is {stride}: "
            f"{1 - used / stride:.0%} of memory and reads would be empty",
            help=f'write stride = "{format_bytes(fitting)}"',
            origins=origins,
        )
