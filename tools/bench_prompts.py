"""Measure the arithmetic of prompts against what the processor can do.

    python tools/bench_prompts.py [--depths D,D,...] [--repetitions N] [--features a,b,...]

Prints a Markdown table for the sizes of a 7B model: matrices times 128 tokens, and the attention of
128 tokens that stand behind others, in operations per second (a multiplication and its addition are
two, what masks hide is not counted), beside loops of nothing but multiply-adds of float32 and,
where the processor has it, ``vpdpbusd``.  One thread; its processor time is taken, so that other
programs disturb little, in rounds of all rows, of which the median counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from bench_kernels import HIDDEN, Bench, allocate, make_spec
from pi2.backends.compiler.vectors import Parameters
from pi2.backends.kernels.mixing_layout import count, lay_out_mixing
from pi2.backends.kernels.spec import KV_DTYPES, KernelSpec
from pi2.machine.cpu import detect_cpu
from pi2.plan.documents.plan import KvType

TOKENS = 128
SUMS = 20
"""Sums that a loop of nothing but multiply-adds has: none waits for the last one."""
STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A kernel call that takes ``operations``."""

    name: str
    operations: float
    run: Callable[[], None]


def emit_peak(kind: str, take: Parameters) -> None:
    """Emit a loop of nothing but multiply-adds: ``float32``, or ``int8`` for ``vpdpbusd``."""
    from tvm.tirx.script import builder as T

    from pi2.backends.compiler import vectors as v
    from pi2.backends.kernels.operands import emit_vpdpbusd

    steps = take.take_number("steps")
    result = take.take_array("result", "float32" if kind == "float32" else "int32")
    if kind == "float32":
        factor = v.let(v.splat(T.cast(steps, "float32") * v.constant(1e-9, "float32"), 16))
        sums = [v.Cell(factor) for _ in range(SUMS)]
    else:
        factor = v.let(v.reinterpret(v.splat(steps, 16), "int8", 64))
        sums = [v.Cell(v.constant(number, "int32", 16)) for number in range(SUMS)]
    with T.serial(steps):
        for cell in sums:
            if kind == "float32":
                cell.set(T.fma(cell.get(), factor, factor))
            else:
                cell.set(emit_vpdpbusd(cell.get(), factor, factor, 16))
    for number, cell in enumerate(sums):
        v.store(result, number * 16, cell.get(), 16)


def emit_attention(spec: KernelSpec, take: Parameters) -> None:
    """Emit attention of a chunk, without its projections."""
    from tvm.tirx.script import builder as T

    from pi2.backends.kernels.chunk_attention import Chunk, emit_chunk_attention
    from pi2.backends.kernels.kv import make_cache
    from pi2.backends.kernels.mixing_arithmetic import take_room
    from pi2.backends.kernels.schedule import Schedule

    tokens, position, context = (take.take_number(n) for n in ("tokens", "position", "context"))
    keys, values = (take.take_array(n, KV_DTYPES[spec.kv]) for n in ("keys", "values"))
    scales = None
    if spec.kv == "int8":
        scales = (take.take_array("a", "float16"), take.take_array("b", "float16"))
    qkv, output = take.take_array("qkv", "float32"), take.take_array("output", "float32")
    chunk = Chunk(
        schedule=Schedule(spec, spec.isa),
        qkv=qkv,
        cache=make_cache(spec, keys, values, scales, context, T.min(context, 1)),
        output=output,
        codes=take.take_array("codes", "int8"),
        tokens=tokens,
        position=position,
        sinks=None,
        room=take_room(take, spec),
    )
    emit_chunk_attention(chunk)


def make_attention_row(kernel: Any, spec: KernelSpec, depth: int) -> Row:
    """Return the attention of the last 128 of ``depth`` tokens."""
    rng = np.random.default_rng(0)
    size = depth * spec.attention.kv_heads
    arrays = [allocate(KV_DTYPES[spec.kv], size * spec.attention.head_dim) for _ in range(2)]
    for array in arrays:
        array[:] = rng.integers(-127, 128, len(array))
    if spec.kv == "int8":
        arrays += [allocate("float16", size) for _ in range(2)]
        for array in arrays[2:]:
            array[:] = 0.01
    layout = lay_out_mixing(spec)
    qkv, output = (
        allocate("float32", TOKENS * spec.attention.projected),
        allocate("float32", TOKENS * HIDDEN),
    )
    qkv[:] = rng.standard_normal(len(qkv))
    arrays += [qkv, output, allocate("int8", TOKENS * spec.most_planes * HIDDEN)]
    arrays += [
        allocate("float32", count(layout.float_sizes)),
        allocate("int32", count(layout.integer_sizes)),
        allocate("int8", count(layout.byte_sizes)),
    ]
    first = depth - TOKENS
    seen = TOKENS * first + TOKENS * (TOKENS + 1) // 2
    return Row(
        name=f"attention, {spec.kv}, {TOKENS} tokens behind {first}",
        operations=4.0 * seen * spec.attention.stored_query,
        run=lambda: kernel(TOKENS, first, depth, *arrays),
    )


def list_rows(features: list[str], depths: list[int]) -> list[Row]:
    """Compile what is to be measured."""
    import tvm

    from pi2.backends.compiler.compile import generate, make_target
    from pi2.backends.compiler.vectors import make_function

    kinds = ["float32", "int8"] if "avx512vnni" in features else ["float32"]
    spec = make_spec(1, features, 2)
    specs = {kv: replace(spec, kv=kv) for kv in get_args(KvType)}
    functions: dict[str, Callable[[Parameters], None]] = {
        f"peak_{kind}": lambda take, kind=kind: emit_peak(kind, take)  # type: ignore[misc]
        for kind in kinds
    }
    for kv, own in specs.items():
        functions[f"attend_{kv}"] = lambda take, own=own: emit_attention(own, take)  # type: ignore[misc]
    module = tvm.IRModule({name: make_function(name, emit) for name, emit in functions.items()})
    kernels = tvm.runtime.Executable(generate(module, make_target(spec.isa))).jit()
    rows = []
    for kind in kinds:
        result = allocate("float32" if kind == "float32" else "int32", SUMS * 16)
        operations = 2.0 * STEPS * SUMS * (16 if kind == "float32" else 64)
        rows.append(
            Row(
                name=f"nothing but {kind}",
                operations=operations,
                run=lambda kind=kind, result=result: kernels[f"peak_{kind}"](STEPS, result),  # type: ignore[misc]
            )
        )
    for planes in (2, 1):
        work = Bench(make_spec(1, features, planes)).multiply(6144, "int4", TOKENS)
        rows.append(
            Row(
                name=f"int4 6144 x {HIDDEN}, {TOKENS} tokens, {8 * planes}-bit activations",
                operations=2.0 * 6144 * HIDDEN * TOKENS,
                run=lambda work=work: work.run(0),  # type: ignore[misc]
            )
        )
    for depth in depths:
        for kv, own in specs.items():
            rows.append(make_attention_row(kernels[f"attend_{kv}"], own, depth))
    return rows


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", default="128,1024,16384")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--features", default=",".join(sorted(detect_cpu().features)))
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = "1"
    depths = [int(depth) for depth in options.depths.split(",")]
    rows = list_rows(options.features.split(","), depths)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(options.repetitions):
        for row, taken in zip(rows, times, strict=True):
            start = time.thread_time()
            row.run()
            taken.append(time.thread_time() - start)
    print(f"one thread, load average {os.getloadavg()[0]:.1f}\n")
    print("| work | ms | GOP/s |\n|---|---|---|")
    for row, taken in zip(rows, times, strict=True):
        median = statistics.median(taken)
        print(f"| {row.name} | {median * 1e3:.2f} | {row.operations / median / 1e9:.0f} |")


if __name__ == "__main__":
    main()
