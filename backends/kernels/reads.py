"""The kernel that reads from files: system calls in a compiled loop, without Python's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.kernels import vectors as v

if TYPE_CHECKING:
    from pi2.backends.kernels.parameters import Parameters


def emit_read_runs(take: Parameters) -> None:
    """Read requests start, start + step, ... of ``n`` with preadv.

    Request i fills the ``counts[i]`` vectors from ``firsts[i]`` on; a vector is an address and a
    length, as in C's ``struct iovec``.
    """
    fd = take.take_number("fd")
    start = take.take_number("start")
    step = take.take_number("step")
    requests = take.take_number("requests")
    vectors = take.take_array("vectors", "int64")
    firsts = take.take_array("firsts", "int32")
    counts = take.take_array("counts", "int32")
    offsets = take.take_array("offsets", "int64")
    results = take.take_array("results", "int64")
    with T.serial(T.floordiv(requests - start + step - 1, step)) as turn:
        index = v.let(start + turn * step)
        size = T.call_extern(
            "int64",
            "preadv",
            fd,
            T.address_of(vectors[v.wide(firsts[index]) * 2]),
            counts[index],
            offsets[index],
        )
        v.store(results, index, size, 1)
