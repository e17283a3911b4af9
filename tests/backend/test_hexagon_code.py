"""Machine code of the kernels for Hexagon NPUs: no emulator is needed to read it."""

import pytest

from count_hexagon_packets import MACS, count_kernels, describe_shape
from pi2.backends.hexagon.specification import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_inner_loops_multiply_vectors_and_no_single_numbers(version: str) -> None:
    """A loop of 8 words, or of two groups of 8: a ``vrmpy`` for each word and token."""
    loops = count_kernels(describe_shape(4096, 64, (64,), version))
    assert len(loops) == 2
    for name, loop in loops.items():
        assert loop is not None, f"{name} has no hardware loop"
        words, together = (16 if "int4" in name else 8), int(name.rsplit("_", 1)[1])
        # The compiler may have taken several rounds together.
        assert loop.products % (words * together) == 0
        assert loop.products > 0 and loop.scalar_products == 0
        assert loop.macs_per_packet >= 0.75 * MACS
