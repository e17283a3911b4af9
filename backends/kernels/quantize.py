"""Quantised activations: RMSNorm, and float32 vectors to one or two int8 planes.

Per group of 32: ``scale`` = max|x| / 32512 and x16 = rint(x / scale) = 256 high + low, high in
-127..127, low in -128..127 (two planes, relative error of an element's group maximum 1.6e-5);
``scale`` = max|x| / 127 (one plane, 4e-3).  A group of zeros has scale 0 and codes 0.  Or
nothing is rounded, and values are only brought into lane order (`operands.FLOAT_PLANES`).
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.floats import emit_lane_order
from pi2.backends.kernels.i8mm import place_scale, place_steps
from pi2.backends.kernels.operands import FLOAT_PLANES, Activations, list_runs
from pi2.plan.weights.layout import GROUP

LIMIT = {1: 127, 2: 127 * 256}
"""Largest code by number of planes."""


def emit_norm(
    source: v.Buffer,
    row: v.Expr,
    weight: v.Buffer,
    epsilon: float,
    target: Activations,
    token: v.Expr,
    width: int | None = None,
) -> None:
    """Set ``target.values[token]`` to RMSNorm(source[row]) and quantise it.

    ``source`` float32 [rows, length], ``weight`` float32 [length]; beyond ``width`` elements, if
    they are fewer, both are zero.
    """
    length = target.length
    sums = T.alloc_buffer((32,), "float32")
    for half in range(2):
        v.store(sums, half * 16, v.constant(0.0, "float32", 16), 16)
    with T.serial(length // 32 * target.once) as step:
        for half in range(2):
            part = v.let(v.load(source, row * length + step * 32 + half * 16, 16))
            v.store(sums, half * 16, T.fma(part, part, v.load(sums, half * 16, 16)), 16)
    total = v.add_lanes(v.load(sums, 0, 16) + v.load(sums, 16, 16), "float32", 16)
    mean = total * v.constant(1.0 / (width or length), "float32") + v.constant(epsilon, "float32")
    factor = v.let(v.constant(1.0, "float32") / T.sqrt(mean))
    with T.serial(length // 16 * target.once) as step:
        part = v.load(source, row * length + step * 16, 16) * v.splat(factor, 16)
        part = part * v.load(weight, step * 16, 16)
        v.store(target.values, token * length + step * 16, part, 16)
    emit_quantize(target, token)


def emit_quantize(target: Activations, token: v.Expr) -> None:
    """Set codes, scales and sums of ``target`` from its values; codes alone if those are floats."""
    if target.several is not None:
        with T.If(target.several):
            with T.Then():
                emit_quantize(target.for_chunk(), token)
            with T.Else():
                emit_quantize(target.for_one(), token)
        return
    if target.planes == FLOAT_PLANES:
        emit_lane_order(target, token)
        return
    for lanes, first, count in list_runs(target.length):
        with T.serial(count * target.once) as block, T.serial(lanes * target.once) as lane:
            _emit_group(target, token, v.let(first + block * lanes), lane, lanes)


def _emit_group(
    target: Activations, token: v.Expr, first: v.Expr, lane: v.Expr, lanes: int
) -> None:
    """Quantise group ``first + lane`` of the block of ``lanes`` that begins with ``first``."""
    length, planes = target.length, target.planes
    limit = LIMIT[planes]
    at = token * length + (first + lane) * GROUP
    halves = [v.let(v.load(target.values, at + half * 16, 16)) for half in range(2)]
    both = T.max(T.abs(halves[0]), T.abs(halves[1]))
    largest = v.let(v.find_largest(both, "float32", 16))
    zero = v.constant(0.0, "float32")
    # Subnormal maxima would make the factor infinite: they count as zero.
    tiny = largest < v.constant(1e-30, "float32")
    factor = v.let(T.Select(tiny, zero, v.constant(float(limit), "float32") / largest))
    scale = T.Select(tiny, zero, largest * v.constant(1.0 / limit, "float32"))
    codes = [v.let(v.cast(T.nearbyint(h * v.splat(factor, 16)), "int32", 16)) for h in halves]
    place = token * (length // GROUP) + first + lane
    v.store(
        target.scales,
        place_scale(target, token, first + lane) if target.paired else place,
        scale,
        1,
    )
    total = v.add_lanes(codes[0] + codes[1], "int32", 16)
    v.store(target.sums, place, total * v.constant(-8, "int32"), 1)
    if planes == 2:
        high = [
            v.let((c + v.constant(128, "int32", 16)) >> v.constant(8, "int32", 16)) for c in codes
        ]
        low = [c - (h << v.constant(8, "int32", 16)) for c, h in zip(codes, high, strict=True)]
        if target.upper_sums is not None:
            upper = v.add_lanes(high[0] + high[1], "int32", 16)
            v.store(target.upper_sums, place, upper * v.constant(-8, "int32"), 1)
        parts = [high, low]
    else:
        parts = [codes]
    scratch = T.alloc_buffer((32,), "int8")
    for plane, values in enumerate(parts):
        for half in range(2):
            v.store(scratch, half * 16, v.cast(values[half], "int8", 16), 16)
        if target.paired:
            for step, base in enumerate(place_steps(target, token, plane, first + lane)):
                v.store(target.codes, base, v.load(scratch, step * 8, 8), 8)
            continue
        for chunk in range(8):
            base = (token * planes + plane) * length + first * GROUP + chunk * 4 * lanes + lane * 4
            v.store(target.codes, base, v.load(scratch, chunk * 4, 4), 4)
