"""A compiled loop that only reads memory; ImportError without TVM."""

import os

import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from pi2.arrays import U64
from pi2.backends.compiler.vectors import constant, load, prefetch, store

LINE_BYTES = 256
"""Bytes of one step of the loop: four vectors of 64."""
AHEAD_BYTES = 4096
"""Distance of the prefetch: on the next page already, if the processor's own does not go."""
_LANES = 16


_STEP = LINE_BYTES // 4


class CompiledReader:
    """Reads all of a buffer with some threads when it is called."""

    def __init__(self, buffer: U64, *, threads: int) -> None:
        # TVM's pool reads it when it starts.
        os.environ["TVM_NUM_THREADS"] = str(threads)
        module = tvm.IRModule({"read": _build_function(threads)})
        target = tvm.target.Target.from_device("cpu")
        self._kernel = tvm.compile(module, target=target).jit()["read"]
        data = buffer.view(np.int32)
        self._data = data[: data.size // _STEP * _STEP]
        self.sums = np.zeros(threads * _STEP, np.int32)
        """Sums of what the threads have read; wrong if something was not."""

    def __call__(self) -> None:
        self._kernel(self._data, self.sums)


def _build_function(threads: int) -> tvm.tirx.PrimFunc:
    """sums[t] += data of the t-th part, int32, 64 numbers at a time."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("read")
            T.func_attr({"global_symbol": "read", "tirx.noalias": True})
            size, total = T.int64(), T.int64()
            data = T.match_buffer(T.arg("data", T.handle()), (size,), "int32", align=4)
            sums = T.match_buffer(T.arg("sums", T.handle()), (total,), "int32", align=4)
            steps = T.floordiv(size, T.int64(_STEP))
            with T.parallel(threads) as thread:
                first = T.floordiv(steps * T.Cast("int64", thread), T.int64(threads))
                after = T.floordiv(steps * T.Cast("int64", thread + 1), T.int64(threads))
                own = T.alloc_buffer((_STEP,), "int32")
                parts = range(0, _STEP, _LANES)
                for part in parts:
                    store(own, part, constant(0, "int32", _LANES), _LANES)
                with T.serial(after - first) as step:
                    base = (first + step) * T.int64(_STEP)
                    for part in parts:
                        place = base + T.int64(part)
                        prefetch(data, place + T.int64(AHEAD_BYTES // 4))
                        value = load(own, part, _LANES) + load(data, place, _LANES)
                        store(own, part, value, _LANES)
                for part in parts:
                    store(sums, thread * _STEP + part, load(own, part, _LANES), _LANES)
    return builder.get()
