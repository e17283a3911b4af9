"""Sums that each thread makes for itself, added up in the order of threads: whichever is first,
equal input gives equal bits.

Where the activations of a layer's neurons are normalised together, their squares are added up, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.spec import KernelSpec


def emit_clear(spec: KernelSpec, partial: v.Buffer, thread: v.Expr) -> v.Expr:
    """Set the sum of a thread in ``partial`` float32 [threads, hidden] to 0; return its place."""
    origin = v.let(thread * spec.hidden)
    with T.serial(spec.hidden // 16) as step:
        v.store(partial, origin + step * 16, v.constant(0.0, "float32", 16), 16)
    return origin


def emit_add(spec: KernelSpec, partial: v.Buffer, total: v.Buffer, token: v.Expr) -> None:
    """Add the sums of all threads to ``total`` float32 [tokens, hidden] of ``token``."""
    hidden = spec.hidden
    with T.serial(hidden // 16) as step:
        place = step * 16
        sum_place = token * hidden + place
        value = v.load(total, sum_place, 16)
        for thread in range(spec.threads):
            value = value + v.load(partial, thread * hidden + place, 16)
        v.store(total, sum_place, value, 16)


def emit_add_parts(
    spec: KernelSpec, sums: v.Buffer, parts: v.Expr, total: v.Buffer, token: v.Expr
) -> None:
    """Add the sums of all threads of the first ``parts`` parts, float32 [parts threads, hidden],
    part by part to ``total`` float32 [tokens, hidden] of ``token``."""
    hidden = spec.hidden
    with T.serial(hidden // 16) as step:
        place = step * 16
        sum_place = token * hidden + place
        value = v.Cell(v.load(total, sum_place, 16))
        with T.serial(parts * spec.threads) as own:
            value.set(value.get() + v.load(sums, own * hidden + place, 16))
        v.store(total, sum_place, value.get(), 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of the squares of activations: ``total`` float32 [tokens], and ``own`` float32
    [tokens, threads] of each thread, [threads] where there is one token."""

    total: v.Buffer
    own: v.Buffer

    def set_own(self, place: v.Expr, values: v.Buffer, first: v.Expr, count: v.Expr) -> None:
        """Set a thread's sum to that of ``count`` of ``values`` from ``first`` on."""
        v.store(self.own, place, add_squares(values, first, count), 1)

    def emit_add(self, threads: int, token: v.Expr, first: v.Expr | int = 0) -> None:
        """Add the sums of all threads, from place ``first`` on, to that of ``token``."""
        value = self.total[token]
        for thread in range(threads):
            value = value + self.own[first + thread]
        v.store(self.total, token, value, 1)


def add_squares(values: v.Buffer, first: v.Expr, count: v.Expr) -> v.Expr:
    """Return the sum of the squares of ``count`` of ``values`` from ``first`` on."""
    total = v.Cell(v.constant(0.0, "float32"))
    with T.serial(count) as step:
        value = v.let(values[first + step])
        total.set(T.fma(value, value, total.get()))
    return v.let(total.get())


def emit_count(spec: KernelSpec, counts: v.Buffer) -> None:
    """Add what each thread has counted to the last of ``counts`` int32 [threads + 1], which counts
    for ever."""
    threads = spec.threads
    for thread in range(threads):
        v.store(counts, threads, counts[threads] + counts[thread], 1)
