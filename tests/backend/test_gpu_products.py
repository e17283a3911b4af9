"""Packed matrices on GPUs, against numpy in double precision, over odd shapes."""

import numpy as np
import pytest

from pi2.arrays import Raw
from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.code import narrow_half, widen_half
from pi2.backends.gpu.kernels.compile import make_step
from pi2.backends.gpu.kernels.products import list_product_kernels
from pi2.backends.gpu.kernels.routing import make_read
from pi2.backends.gpu.kernels.specification import Axis, ProductKernels, StepKernel
from pi2.backends.gpu.launchers.interface import Launcher
from pi2.backends.gpu.launches import number_product
from pi2.backends.gpu.packing import pack_matrix
from pi2.formats import find_format, find_packing
from pi2.plan.weights.layout import Precision
from tests.helpers.goldens import measure_error
from tests.helpers.gpu import Bench

CLOSE = 3e-6
ROWS, LENGTH = 75, 288


@pytest.mark.parametrize(
    "product",
    [
        ProductKernels(length=LENGTH, precision="int4", bias=True, relu=True),
        ProductKernels(length=LENGTH, precision="int8", adds=True),
        ProductKernels(length=LENGTH, precision="fp16", bias=True, adds=True),
    ],
    ids=lambda product: product.name,
)
def test_products_of_any_number_of_tokens(launcher: Launcher, product: ProductKernels) -> None:
    random = np.random.default_rng(3)
    rows = random.standard_normal((ROWS, LENGTH)).astype(np.float32)
    weights, scales = find_packing(product.precision).quantize(rows)
    matrix = find_packing(product.precision).dequantize(weights, scales, LENGTH).astype(np.float64)
    arrays = pack_matrix(weights, scales, LENGTH, product.precision)
    biases = random.standard_normal(ROWS).astype(np.float32)
    bench = Bench(launcher, list(list_product_kernels(product, launcher.facts.fp16)))
    for tokens, kernel in ((1, 1), (3, 1), (6, 4), (67, 64)):
        inputs = random.standard_normal((tokens, LENGTH)).astype(np.float32)
        before = random.standard_normal((tokens, ROWS)).astype(np.float32)
        wanted = inputs @ matrix.T
        if product.bias:
            wanted = wanted + biases
        if product.relu:
            wanted = np.maximum(wanted, 0)
        if product.adds:
            wanted = before + wanted
        found = bench.run(
            f"{product.name}_{kernel}",
            arrays | {"inputs": inputs, "outputs": before, "biases": biases},
            number_product(ROWS, LENGTH) | {"tokens": tokens},
        )
        assert measure_error(found["outputs"], wanted) < CLOSE, tokens


def test_a_product_may_be_of_some_rows_and_lie_among_others(launcher: Launcher) -> None:
    random = np.random.default_rng(8)
    rows = random.standard_normal((ROWS, LENGTH)).astype(np.float32)
    weights, scales = find_packing("int8").quantize(rows)
    matrix = find_packing("int8").dequantize(weights, scales, LENGTH).astype(np.float64)
    product = ProductKernels(length=LENGTH, precision="int8", bias=True)
    bench = Bench(launcher, list(list_product_kernels(product, launcher.facts.fp16)))
    first, count, biases = 37, 30, random.standard_normal(ROWS).astype(np.float32)
    numbers = number_product(first % 32 + count, LENGTH)
    numbers |= {"tile": first // 32, "begin": first % 32, "biases_at": first, "factor": 0.5}
    numbers |= {"inputs_at": 8, "inputs_stride": LENGTH + 16, "outputs_at": 3, "outputs_stride": 50}
    for tokens, size in ((1, 1), (6, 4), (67, 64)):
        inputs = random.standard_normal((tokens, LENGTH + 16)).astype(np.float32)
        arrays: dict[str, Raw] = pack_matrix(weights, scales, LENGTH, "int8")
        arrays |= {"inputs": inputs, "biases": biases}
        arrays["outputs"] = np.full((tokens, 50), 7, np.float32)
        found = bench.run(f"{product.name}_{size}", arrays, numbers | {"tokens": tokens})["outputs"]
        wanted = inputs[:, 8 : 8 + LENGTH] @ matrix[first : first + count].T
        wanted = (wanted + biases[first : first + count]) / 2
        assert measure_error(found[:, 3 : 3 + count], wanted) < CLOSE
        assert (found[:, :3] == 7).all() and (found[:, 3 + count :] == 7).all()


def test_parts_of_the_rows_may_have_inputs_of_their_own(launcher: Launcher) -> None:
    random = np.random.default_rng(6)
    blocks, each = 3, ROWS // 3
    rows = random.standard_normal((blocks * each, LENGTH)).astype(np.float32)
    weights, scales = find_packing("int8").quantize(rows)
    packed = pack_matrix(weights, scales, LENGTH, "int8")
    product = ProductKernels(length=LENGTH, precision="int8", blocks=blocks)
    bench = Bench(launcher, list(list_product_kernels(product, launcher.facts.fp16)))
    whole = find_packing("int8").dequantize(weights, scales, LENGTH).reshape(blocks, each, LENGTH)
    for tokens, size in ((1, 1), (6, 4)):
        inputs = random.standard_normal((tokens, blocks, LENGTH)).astype(np.float32)
        outputs = np.empty((tokens, blocks * each), np.float32)
        arrays: dict[str, Raw] = {**packed, "inputs": inputs, "outputs": outputs}
        numbers = number_product(blocks * each, LENGTH, blocks) | {"tokens": tokens}
        found = bench.run(f"{product.name}_{size}", arrays, numbers)["outputs"]
        wanted = np.einsum("tbl,bel->tbe", inputs.astype(np.float64), whole)
        assert measure_error(found, wanted.reshape(tokens, -1)) < CLOSE


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_embeddings_are_rows_of_the_matrix(launcher: Launcher, precision: Precision) -> None:
    rows = np.random.default_rng(4).standard_normal((ROWS, LENGTH)).astype(np.float32)
    weights, scales = find_packing(precision).quantize(rows)
    packed = pack_matrix(weights, scales, LENGTH, precision)
    ids = np.array([0, 74, 31, 32, 0], np.int32)
    blocks = LENGTH // find_format(find_packing(precision).joined).block
    fixed = (("blocks", blocks), ("added", 0))
    step = StepKernel(kernel="take_rows", fixed=fixed, format=precision)
    arrays: dict[str, Raw] = {**packed, "numbers": ids, "y": np.empty((5, LENGTH), np.float32)}
    numbers = {"numbers_at": 0, "y_at": 0, "y_stride": LENGTH, "factor": 0.5, "tokens": 5}
    bench = Bench(launcher, [make_step(step, launcher.facts.fp16)])
    found = bench.run(step.name, arrays, numbers)
    wanted = np.float32(0.5) * find_packing(precision).dequantize(weights, scales, LENGTH)[ids]
    np.testing.assert_allclose(found["y"], wanted, rtol=1e-6)


def make_half_kernel() -> c.Kernel:
    """``wide`` becomes the number of every pair of bytes of ``words``, ``narrow`` their bits."""
    with c.Kernel.declare("halves", (64, 1, 1)) as kernel:
        words = kernel.take_array("words", "uint32")
        wide = kernel.take_array("wide", "float32")
        values = kernel.take_array("values", "float32")
        narrow = kernel.take_array("narrow", "uint32")
        kernel.take_number("n")
        with kernel.run(Axis(number="n", per=64)) as place:
            index = c.let(place.group[0] * 64 + place.thread[0])
            word = c.let(words[index])
            c.store(wide, index * 2, widen_half(word, False))
            c.store(wide, index * 2 + 1, widen_half(word, True))
            c.store(narrow, index, narrow_half(c.let(values[index])))
    return kernel


def test_every_fp16_number_is_widened_and_rounded_as_by_numpy(launcher: Launcher) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = np.where(np.isfinite(halves), halves, np.float16(0))
    random = np.random.default_rng(5)
    values = random.standard_normal(1 << 15).astype(np.float32)
    values *= np.float32(2.0) ** random.integers(-30, 15, 1 << 15).astype(np.float32)
    # Half way between neighbours, where ties go to the even one.
    values[:999] = (halves[:999].astype(np.float32) + halves[1:1000].astype(np.float32)) / 2
    arrays = {
        "words": halves.view(np.uint32),
        "wide": np.empty(1 << 16, np.float32),
        "values": values,
        "narrow": np.empty(1 << 15, np.uint32),
    }
    found = Bench(launcher, [make_half_kernel()]).run("halves", arrays, {"n": 1 << 15})
    np.testing.assert_array_equal(found["wide"], halves.astype(np.float32))
    np.testing.assert_array_equal(
        found["narrow"].astype(np.uint16).view(np.float16), values.astype(np.float16)
    )


def test_reading_misses_nothing(launcher: Launcher) -> None:
    groups, steps = 3, 5
    words = np.random.default_rng(2).integers(0, 1 << 32, (groups, steps, 256, 4), np.uint32)
    sums = np.empty((groups, 256), np.uint32)
    bench = Bench(launcher, [make_read()])
    numbers = {"groups": groups, "steps": steps}
    found = bench.run("read", {"words": words, "sums": sums}, numbers)["sums"]
    wanted = np.bitwise_xor.reduce(np.bitwise_xor.reduce(words, axis=3), axis=1)
    np.testing.assert_array_equal(found, wanted)
