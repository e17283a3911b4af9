"""Measure the kernels of neurons against the read bandwidth of the same run.

    python tools/bench_kernels.py [--threads N] [--seconds S] [--features a,b,...]

Prints a Markdown table: medians of interleaved rounds (read, kernel, read, kernel, ...), bytes
that must be read, GB/s and the ratio to the read bandwidth.  Weights are rotated over more
memory than the last-level cache holds.  Other programs on the machine disturb it: the load
average is printed with the result.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pi2.arrays import U8
from pi2.backends.kernels.isa import BLOCK_TOKENS, count_blocks_bytes, count_tile_bytes
from pi2.backends.kernels.spec import KEPT, PANEL, PARTS, UNPACKED, KernelSpec, describe_kernels
from pi2.machine.cpu import detect_cpu
from pi2.plan.documents.model import Model
from pi2.plan.documents.model_parts import Ffn, Quantization, Shape
from pi2.plan.weights.layout import Precision, lay_out_bundle, weight_bytes

HIDDEN = 4096
HUGE_BYTES = 64 << 20
ROTATED_BYTES = 300 << 20
"""More than any last-level cache of these machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A kernel call to measure: ``run(i)`` is the i-th repetition."""

    name: str
    read_bytes: int
    run: Callable[[int], None]


def allocate(dtype: str, *shape: int) -> npt.NDArray[Any]:
    """Return a zeroed array that begins at a multiple of 64 bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # As the engine's arena of neurons has them.
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        region.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(region, np.uint8).view(dtype).reshape(shape)
    raw = np.zeros(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


def align(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an aligned copy."""
    copy = allocate(array.dtype.name, *array.shape)
    copy[:] = array
    return copy


def make_spec(threads: int, features: Sequence[str], planes: int) -> KernelSpec:
    """Return a 7B model's sizes."""
    sizes = {"layers": 1, "hidden": HIDDEN, "ffn": 32, "vocab": 32000, "context": 32}
    model = Model(
        schema_version=2,
        id="bench",
        shape=Shape(**sizes, heads=32, kv_heads=8, head_dim=128),
        ffn=Ffn(activation="drelu"),
        quantization=Quantization(head="int4"),
    )
    return describe_kernels(
        model,
        gates=True,
        ranks=(512,),
        stride=lay_out_bundle(HIDDEN, "int4").stride,
        threads=threads,
        planes=planes,
        chunk_planes=planes,
        architecture="x86-64",
        features=tuple(sorted(features)),
    )


class Bench:
    """Compiled kernels and random weights."""

    def __init__(self, spec: KernelSpec) -> None:
        import tvm
        from tvm.tirx.script import builder as T

        from pi2.backends.compiler import vectors as v
        from pi2.backends.compiler.compile import generate, make_target
        from pi2.backends.compiler.vectors import Parameters, make_function
        from pi2.backends.kernels.matrix import Matrix, emit_multiply, emit_split
        from pi2.backends.kernels.program import Program
        from pi2.backends.kernels.schedule import take_activations

        program = Program(spec)
        target = make_target(program.isa)
        self.spec = spec

        def emit_read(take: Parameters) -> None:
            count = take.take_number("count")
            data = take.take_array("data", "uint8")
            result = take.take_array("result", "int32")
            with T.parallel(spec.threads) as thread:
                begin, end = emit_split(thread, spec.threads, count)
                sums = T.alloc_buffer((64,), "int32")
                for part in range(4):
                    v.store(sums, part * 16, v.constant(0, "int32", 16), 16)
                with T.serial(end - begin) as step:
                    byte = v.let(v.wide(begin + step) * 256)
                    for part in range(4):
                        old = v.load(sums, part * 16, 16)
                        new = old + v.load_as(data, byte + part * 64, "int32", 16)
                        v.store(sums, part * 16, new, 16)
                for part in range(4):
                    value = v.load(sums, part * 16, 16)
                    v.store(result, thread * 64 + part * 16, value, 16)

        def make_multiply(length: int, precision: Precision) -> Callable[[Parameters], None]:
            def emit(take: Parameters) -> None:
                rows = take.take_number("rows")
                tokens = take.take_number("tokens")
                matrix = Matrix(
                    weights=take.take_array("weights", "uint8"),
                    scales=take.take_array("scales", "uint8"),
                    rows=rows,
                    length=length,
                    precision=precision,
                )
                x = take_activations(take, "x", length, spec.planes, tokens)
                y = take.take_array("y", "float32")

                def keep(token: v.Expr, row: v.Expr, value: v.Expr) -> None:
                    v.store(y, token * rows + row, value, 1)

                emit_multiply(program.isa, spec.threads, matrix, x, (T.int32(0), tokens), keep)

            return emit

        functions: dict[str, Callable[[Parameters], None]] = {"read": emit_read}
        for precision in ("int4", "int8", "fp16"):
            functions[f"multiply_{precision}"] = make_multiply(HIDDEN, precision)
        listed = program.list_functions()
        for name in ("add_neurons", "add_dense", "predict_low_rank_512", "begin_ffn"):
            functions[name] = listed[name]
        module = tvm.IRModule({name: make_function(name, e) for name, e in functions.items()})
        self.kernels = tvm.runtime.Executable(generate(module, target)).jit()
        rng = np.random.default_rng(0)
        self.data = allocate("uint8", ROTATED_BYTES)
        step = 1 << 24
        for start in range(0, ROTATED_BYTES, step):
            piece = self.data[start : start + step]
            piece[:] = rng.integers(0, 256, len(piece), np.uint8)
        self.result = allocate("int32", spec.threads * 64)
        self.scales = allocate("float16", 14336, HIDDEN // 32)
        self.scales[:] = 0.01
        self.x = self.make_activations(128, HIDDEN)
        self.x[3][:] = rng.standard_normal((128, HIDDEN))
        self.y = allocate("float32", 128, HIDDEN)
        self.kernels["begin_ffn"](128, *self.flat(*self.x, self.y))

    def make_activations(self, tokens: int, length: int) -> list[npt.NDArray[Any]]:
        """Return codes, scales, sums and values."""
        spec = self.spec
        return [
            allocate("int8", tokens, spec.planes, length),
            allocate("float32", tokens, length // 32),
            allocate("int32", tokens, length // 32),
            allocate("float32", tokens, length),
        ]

    def flat(self, *arrays: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return one-dimensional views."""
        return [array.reshape(-1) for array in arrays]

    def read(self, size: int) -> Work:
        """Reading as many bytes as a kernel does, but at least 4 MiB and at most 256 MiB."""
        size = min(max(size, 4 << 20), 256 << 20) // 256 * 256
        kernel = self.kernels["read"]
        places = (ROTATED_BYTES - size) // 4096

        def run(index: int) -> None:
            start = (index * 6007 * 1024 % places) * 4096
            kernel(size // 256, self.data[start : start + size], self.result)

        return Work(name="read", read_bytes=size, run=run)

    def multiply(self, rows: int, precision: Precision, tokens: int = 1) -> Work:
        """A matrix times activations."""
        weights = rows * weight_bytes(HIDDEN, precision)
        scales = 0 if precision == "fp16" else rows * HIDDEN // 16
        places = (ROTATED_BYTES - weights) // 4096
        kernel = self.kernels[f"multiply_{precision}"]
        y = allocate("float32", tokens, rows)
        fixed = self.flat(self.scales.view(np.uint8), *self.x, y)

        def run(index: int) -> None:
            start = (index * 7919 * 1024 % places) * 4096
            kernel(rows, tokens, self.data[start : start + weights], *fixed)

        name = f"{precision} {rows} x {HIDDEN}, {tokens} tokens"
        return Work(name=name, read_bytes=weights + scales, run=run)

    def gather(self, neurons: int, active: float) -> Work:
        """A sparse FFN: ``active`` of the neurons, all of which fire."""
        spec = self.spec
        count = round(neurons * active)
        arena = self.make_arena()
        rng = np.random.default_rng(1)
        slots = np.stack(
            [np.sort(rng.choice(len(arena), count, replace=False)) for _ in range(16)]
        ).astype(np.int32)
        partial = allocate("float32", spec.threads, HIDDEN)
        counts = allocate("int32", spec.threads + 1)
        kernel = self.kernels["add_neurons"]
        x = self.make_activations(1, HIDDEN)
        x[3][:] = 1
        self.kernels["begin_ffn"](1, *self.flat(*x, self.y))
        gates, firing = allocate("float32", 2, neurons), allocate("int32", neurons)
        fixed = self.flat(*x, *gates, firing, partial, counts, self.y)

        def run(index: int) -> None:
            kernel(count, 0, arena.reshape(-1), slots[index % 16], *fixed)

        run(0)
        assert counts[-1] >= 0.99 * count, "most neurons fire"
        return Work(
            name=f"gathered FFN, {count} of {neurons} neurons",
            read_bytes=count * lay_out_bundle(HIDDEN, "int4").used_bytes,
            run=run,
        )

    def dense(self, count: int, tokens: int) -> Work:
        """A dense FFN for several tokens."""
        spec = self.spec
        arena = self.make_arena()[:count]
        values = allocate("float32", 128, PANEL)
        unpacked = allocate("float32", spec.threads, UNPACKED + KEPT, 128)
        kernel = self.kernels["add_dense"]
        masks = allocate("int32", 128, PARTS)
        blocks: list[npt.NDArray[Any]] = []
        if spec.isa.blocks:
            blocks = [
                allocate("int8", spec.threads, count_tile_bytes(HIDDEN)),
                allocate("int8", 128 // BLOCK_TOKENS, count_blocks_bytes(HIDDEN, spec.planes)),
            ]
        fixed = self.flat(arena, *self.x, *blocks, values, masks, unpacked, self.y)
        return Work(
            name=f"dense FFN, {count} neurons, {tokens} tokens",
            read_bytes=count * lay_out_bundle(HIDDEN, "int4").used_bytes,
            run=lambda _: kernel(count, tokens, *fixed),
        )

    def make_arena(self) -> U8:
        """Return the rotated memory as neurons that all fire for an input of ones.

        Random nibbles are -0.5 on average: with negative scales, sums of thousands are positive.
        """
        stride = self.spec.stride
        arena = self.data[: len(self.data) // stride * stride].reshape(-1, stride)
        layout = lay_out_bundle(HIDDEN, "int4")
        for part in layout.parts:
            scales = np.full(HIDDEN // 32, -0.01, np.float16)
            arena[:, part.scales_offset : part.scales_offset + HIDDEN // 16] = scales.view(np.uint8)
        return arena

    def quantize(self) -> Work:
        """Quantisation of one token."""
        kernel = self.kernels["begin_ffn"]
        fixed = self.flat(*self.x, self.y)
        return Work(name="quantise", read_bytes=4 * HIDDEN, run=lambda _: kernel(1, *fixed))


def measure(reference: Work, work: Work, seconds: float) -> tuple[list[float], list[float]]:
    """Return seconds per call of both, taken in turn."""
    pairs: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    index = 0
    while time.perf_counter() < end or index < 5:
        for one, times in zip((reference, work), pairs, strict=True):
            start = time.perf_counter()
            one.run(index)
            times.append(time.perf_counter() - start)
        index += 1
    return pairs


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--planes", type=int, default=2)
    parser.add_argument("--features", default=",".join(detect_cpu().features), help="(its own)")
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)
    bench = Bench(make_spec(options.threads, options.features.split(","), options.planes))
    works = [
        bench.quantize(),
        bench.multiply(4096, "int4"),
        bench.multiply(11008, "int4"),
        bench.multiply(4096, "int8"),
        bench.multiply(4096, "fp16"),
        bench.gather(11008, 0.10),
        bench.gather(11008, 0.25),
        bench.gather(14336, 0.12),
        bench.multiply(4096, "int4", 128),
        bench.multiply(14336, "int4", 128),
        bench.dense(512, 128),
    ]
    print(f"{options.threads} threads, load average {os.getloadavg()[0]:.1f}\n")
    print("| kernel | median us | best us | GB/s | read GB/s | ratio | best ratio |")
    print("|---|---|---|---|---|---|---|")
    for work in works:
        reference = bench.read(work.read_bytes)
        read_s, work_s = measure(reference, work, options.seconds)
        median_s = statistics.median(work_s)
        rate = work.read_bytes / median_s / 1e9
        limit = reference.read_bytes / statistics.median(read_s) / 1e9
        best = work.read_bytes / min(work_s) / (reference.read_bytes / min(read_s))
        print(
            f"| {work.name} | {median_s * 1e6:.0f} | {min(work_s) * 1e6:.0f} | {rate:.1f} |"
            f" {limit:.1f} | {rate / limit:.2f} | {best:.2f} |"
        )


if __name__ == "__main__":
    main()
