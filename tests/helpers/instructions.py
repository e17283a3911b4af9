"""Instructions that aarch64 kernels execute for a multiply-accumulate, counted under qemu-aarch64.

    python -m tests.helpers.instructions

Prints a Markdown table of a packed matrix times several tokens, by the schedules for ``dotprod``
and ``i8mm``.  A count, not a time: processors differ in how many of which instructions they do at
once.
"""

import tempfile
from pathlib import Path

from pi2.backends.kernels.isa import choose_isa
from pi2.plan.weights.layout import Precision, scale_bytes, weight_bytes
from tests.helpers.aarch64 import ARM_FEATURES, Emulated, generate
from tests.helpers.kernels import allocate, allocate_activations, allocate_tiles, make_multiply

ROWS, LENGTH, THREADS = 32, 1024, 2
TOKENS = (2, 4, 5, 16, 128)
PRECISIONS: tuple[Precision, ...] = ("int4", "int8")


def count_multiply(features: str, precision: Precision, planes: int) -> dict[int, int]:
    """Return the instructions of ROWS x LENGTH times x, by the number of tokens."""
    isa = choose_isa(set(ARM_FEATURES[features]), "aarch64")
    emit = make_multiply(isa, LENGTH, precision, planes, THREADS)
    weights = allocate("uint8", ROWS * weight_bytes(LENGTH, precision))
    scales = allocate("uint8", ROWS * scale_bytes(LENGTH, precision))
    tiles = [allocate_tiles(THREADS, LENGTH)] if isa.pairs else []
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        kernel = Emulated(generate(isa, "aarch64", "multiply", emit), "multiply", Path(folder))
        for tokens in TOKENS:
            arrays = allocate_activations(tokens + tokens % 2, LENGTH, planes)
            y = allocate("float32", tokens, ROWS)
            counts[tokens] = kernel.count_instructions(
                ROWS, tokens, weights, scales, *arrays, *tiles, y
            )
    return counts


def main() -> None:
    print("| weights, activations | tokens | dotprod | i8mm | ratio |")
    print("|---|---|---|---|---|")
    for precision in PRECISIONS:
        for planes in (1, 2):
            old, new = (
                count_multiply(name, precision, planes) for name in ("dotprod, fp16", "i8mm")
            )
            for tokens in TOKENS:
                products = ROWS * LENGTH * tokens
                print(
                    f"| {precision}, {8 * planes} bits | {tokens} | {old[tokens] / products:.3f} "
                    f"| {new[tokens] / products:.3f} | {old[tokens] / new[tokens]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
