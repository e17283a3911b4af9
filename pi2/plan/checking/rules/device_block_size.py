"""A storage block is a multiple of 512 bytes.

Why: it is the smallest block of any drive; another number is a slip, often bits or kilobytes.

Example: ``block_size = "500 B"``.

Fix: the logical block that the system reports: 512 or 4096 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pi2.plan.arithmetic.sizes import DEFAULT_BLOCK_BYTES
from pi2.plan.checking.findings import Facts, Finding

CODE = "P251"
SEVERITY = "error"
NEEDS = ("device",)


def check(facts: Facts) -> Iterator[Finding]:
    """Divide the block by 512."""
    block = facts.device.storage.block_size
    if block is None or (block > 0 and block % DEFAULT_BLOCK_BYTES == 0):
        return
    yield Finding(
        document="device",
        path=("storage", "block_size"),
        message=f"a block of {block} bytes, expected a multiple of {DEFAULT_BLOCK_BYTES}",
        help='write "512 B" or "4 KiB"',
    )
