"""How fast a device reads its memory: what all other times are compared with.

``read``: words uint32x4 [groups, steps, 256], sums uint32 [groups, 256]; groups, steps.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.signature import Axis

THREADS = 256


def make_read() -> c.Kernel:
    """Make ``read``: neighbouring threads read neighbouring vectors, and nothing is left out,
    because what is read is written combined."""
    kernel = c.Kernel("read", (THREADS, 1, 1))
    with kernel.declare():
        words = kernel.take_array("words", "uint32x4")
        sums = kernel.take_array("sums", "uint32")
        kernel.take_number("groups")
        steps = kernel.take_number("steps")
        with kernel.run(Axis(number="groups")) as place:
            group, thread = place.group[0], place.thread[0]
            first = c.let(group * steps * THREADS + thread)
            combined = c.Cell(T.uint32(0))
            with T.serial(steps) as step:
                vector = c.let(words[first + step * THREADS])
                for lane in range(4):
                    combined.set(T.bitwise_xor(combined.get(), c.take_lane(vector, lane)))
            c.store(sums, group * THREADS + thread, combined.get())
    return kernel
