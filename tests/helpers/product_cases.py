"""Products of random rows of a format, to compare interpreters with."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pi2.arrays import F32
from pi2.backends.blocks.room import describe_order, list_offsets, make_tables
from pi2.backends.blocks.sizes import count_quantized_bytes, count_scratch_bytes
from pi2.formats import find_format
from tests.helpers.blocks import Numpy
from tests.helpers.instruction_cases import TOKENS, Case, Draw, draw_inputs, empty, put
from tests.helpers.kernels import allocate


def list_products(name: str, draw: Draw) -> Iterator[Case]:
    """Products of a format's rows: of one matrix, and of experts that give rows or add to
    tokens."""
    own, rows, length = find_format(name), 19, 1280
    raw = draw.blocks(name, rows, length)
    grid = make_tables(name)
    kernels = ["multiply", "multiply_few"] + ["multiply_many"] * (not own.is_plain)
    for kernel, planes in itertools.product(kernels, (1, 2)):
        if planes == 1 or own.activations != "float":
            yield make_product(kernel, name, draw, raw, planes=planes)
    kernels.remove("multiply_few")
    for kernel, adds in itertools.product(kernels, (False, True)):
        yield make_product(kernel, name, draw, raw, experts=3, adds=adds)
    if own.block == 256:
        # Longer than what is unpacked at a time.
        yield make_product("multiply_many", name, draw, draw.blocks(name, 5, 8448))
    for added in (0, 1):
        values = {"weights": raw, "grid": grid, "numbers": np.array([3, 0, 18, 3], np.int32)}
        values |= put("y", draw.floats(4, length + 1) * np.float32(added))
        values |= {"blocks": length // own.block, "factor": 0.5, "added": added}
        yield Case(kernel="take_rows", items=4, format=name, values=values)
    yield make_turned(name, draw)


def make_product(
    kernel: str,
    name: str,
    draw: Draw,
    raw: Any,
    *,
    planes: int = 1,
    experts: int = 1,
    adds: bool = False,
) -> Case:
    """Products of tokens with ``raw`` [rows, .], which are of several experts."""
    own, rows, is_many = find_format(name), len(raw), kernel == "multiply_many"
    length = raw.shape[1] // own.block_bytes * own.block
    matrices = np.stack([raw, *(draw.blocks(name, rows, length) for _ in range(experts - 1))])
    x, active = draw_inputs(draw, length), 1 if experts == 1 else 2
    pairs = np.arange(len(x) * active, dtype=np.int32)
    expert_of, tokens = draw.choices(experts, len(pairs)), pairs // active
    if adds:
        x = np.repeat(x, active, axis=0)
    order = np.argsort(expert_of, kind="stable").astype(np.int32)
    starts = np.searchsorted(np.sort(expert_of), np.arange(experts + 1)).astype(np.int32)
    place_of = draw.order(experts)
    sources, targets = (pairs, tokens) if adds else (tokens, pairs)
    y = draw.floats(7, rows, gap=2) if adds else empty(len(pairs), rows + 2)
    scales, bias = np.abs(draw.floats(experts)), draw.floats(experts, rows)
    routes = np.abs(draw.floats(len(pairs)))
    decoded = np.abs(own.decode(matrices)).astype(np.float64)
    size = np.zeros(y.shape)
    for pair, (expert, source, target) in enumerate(zip(expert_of, sources, targets, strict=True)):
        products = decoded[place_of[expert]] @ np.abs(x[source]).astype(np.float64)
        own_size = products * scales[expert] + np.abs(bias[expert])
        size[target, :rows] += own_size * (routes[pair] if adds else 1.0)
    scratch = allocate("uint8", 1, count_scratch_bytes(draw.lanes, 512, 3))
    return Case(
        kernel=kernel,
        items=-(-rows // draw.lanes) if is_many else rows,
        format=name,
        sizes={"y": size},
        values={
            "weights": matrices, "grid": make_tables(name), "rows": rows,
            **quantize(name, draw, x, planes, in_order=is_many), **put("y", y),
            "blocks": length // own.block, "tokens": len(pairs), "added": int(adds),
            "bias": bias, "has_bias": int(planes == 1), "factor": 0.5, "scales": scales,
            **put("scratch", scratch), "expert_of": expert_of, "place_of": place_of,
            "x_of": sources, "y_of": targets, "expert_bytes": raw.nbytes, "pairs": order,
            "starts": starts, "experts": experts, "routes": routes, "has_routes": int(adds),
        },
    )  # fmt: skip


def quantize(name: str, draw: Draw, x: F32, planes: int, *, in_order: bool) -> dict[str, Any]:
    """Inputs as a format's rows are multiplied with them; ``in_order``: as panels are."""
    own, (count, length) = find_format(name), x.shape
    if own.activations == "float":
        return {"x": x, "x_stride": 4 * length, "planes": 1, "plane_stride": 0}
    stride, width = count_quantized_bytes(own.activations, length), 4 * draw.lanes
    codes = allocate("uint8", planes, count, stride)
    rest = x.copy()
    for plane in range(planes):
        values = {**put("x", rest.copy()), "y": codes[plane], "y_stride": stride}
        values |= {"length": length, **put("rest", rest), "has_rest": int(plane + 1 < planes)}
        if own.activations == "q8_k":
            values["order"] = np.array(list_offsets("" if in_order else name, width), np.int64)
        else:
            values |= {"together": 1 if in_order else describe_order(name, width)}
            values |= {"rounds": int(plane == 0), "upper": codes[0].nbytes * (plane == 1)}
        items = count * length // (256 if own.activations == "q8_k" else 32)
        kernel = f"quantize_{own.activations}"
        Numpy(draw.lanes).run(Case(kernel=kernel, items=items, values=values))
    return {"x": codes, "x_stride": stride, "planes": planes, "plane_stride": count * stride}


def make_turned(name: str, draw: Draw) -> Case:
    own, heads, each, rows, length = find_format(name), 3, 5, 4, 512
    raw = draw.blocks(name, heads * each, length)
    x = draw.floats(TOKENS, heads * 6, gap=1)
    numbers = np.abs(own.decode(raw)).astype(np.float64).reshape(heads, each, length)[:, :rows]
    taken = np.abs(x[:, : heads * 6].reshape(TOKENS, heads, 6)[..., :rows])
    return Case(
        kernel="multiply_turned",
        items=heads,
        format=name,
        sizes={"y": np.einsum("thr,hrn->thn", taken, numbers).reshape(TOKENS, -1)},
        values={
            "weights": raw, "grid": make_tables(name), "blocks": length // own.block,
            **put("x", x), **put("y", empty(TOKENS, heads * length)), "x_each": 6,
            "y_each": length, "tokens": TOKENS, "rows": rows, "each": each, "factor": 0.5,
        },
    )  # fmt: skip
