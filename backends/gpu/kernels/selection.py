"""The neurons that compute a token, selected on the device.

``select``: [scores float32 [T, n]], [routes float32 [T, experts], order int32 [n]], slots int32
[T, n], found int32 [first + T]; n, first, tokens, [threshold].

Number i of a token's n neurons is selected where its score is at least ``threshold``, if there are
scores, and in a mixture where the router chose its expert: neurons come expert by expert, and
``order`` says in which slot each of them lies.  ``slots`` are those of the selected ones in this
order, ``found[first + t]`` how many they are.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from pi2.backends.gpu.kernels import code as c
from pi2.backends.gpu.kernels.signature import Axis
from pi2.backends.gpu.kernels.specification import SelectKernels

_THREADS = 256
"""Threads of a work group, which selects for a token."""


def make_select(select: SelectKernels) -> c.Kernel:
    """Make ``select``: every thread counts in a stretch of the neurons, then writes its own."""
    kernel = c.Kernel("select", (_THREADS, 1, 1))
    with kernel.declare():
        scores = kernel.take_array("scores", "float32") if select.scored else None
        routes = kernel.take_array("routes", "float32") if select.experts else None
        order = kernel.take_array("order", "int32") if select.experts else None
        slots = kernel.take_array("slots", "int32")
        found = kernel.take_array("found", "int32")
        size, first_found = kernel.take_number("n"), kernel.take_number("first")
        kernel.take_number("tokens")
        threshold = kernel.take_number("threshold", "float32") if select.scored else None
        with kernel.run(Axis(number="tokens")) as place:
            token, thread = place.group[0], place.thread[0]
            stretch = c.let(c.divide_up(size, _THREADS))
            first = c.let(thread * stretch)
            end = c.let(T.min(first + stretch, size))

            def is_selected(index: c.Expr) -> c.Expr:
                wanted: c.Expr = T.int32(1)
                if scores is not None:
                    wanted = T.cast(scores[token * size + index] >= threshold, "int32")
                if routes is not None:
                    expert = c.let(T.floordiv(index, select.expert_neurons))
                    route = c.let(routes[token * select.experts + expert])
                    chosen = T.max(route, c.number(0.0) - route) > c.number(0.0)
                    wanted = wanted * T.cast(chosen, "int32")
                return c.let(wanted)

            own = c.Cell(T.int32(0))
            with T.serial(stretch) as turn:
                index = c.let(first + turn)
                with c.when(index < end):
                    own.add(is_selected(index))
            counts = c.share(_THREADS, "int32")
            c.store(counts, thread, own.get())
            c.wait_for_group()
            # The counts of all threads before this one, in steps that double.
            distance = 1
            while distance < _THREADS:
                before = c.Cell(counts[thread])
                with c.when(thread >= distance):
                    before.add(counts[thread - distance])
                c.wait_for_group()
                c.store(counts, thread, before.get())
                c.wait_for_group()
                distance *= 2
            place_of_next = c.Cell(counts[thread] - own.get())
            with T.serial(stretch) as turn:
                index = c.let(first + turn)
                with c.when(index < end):
                    with c.when(is_selected(index) > 0):
                        slot = index if order is None else order[index]
                        c.store(slots, token * size + place_of_next.get(), slot)
                        place_of_next.add(T.int32(1))
            with c.when(thread == _THREADS - 1):
                c.store(found, first_found + token, counts[thread])
    return kernel
