"""Lists of the places at which something holds, ascending."""

from __future__ import annotations

from collections.abc import Callable

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.isa import Isa


def emit_list(
    isa: Isa,
    count: v.Expr,
    test: Callable[[v.Expr, int], v.Expr],
    places: v.Buffer,
    row: v.Expr | int = 0,
) -> v.Expr:
    """Write the places below ``count`` that pass to ``places`` (integers, from ``row`` on, with
    room for ``count`` of them, rounded up to 16); return their number.

    ``test(first, lanes)`` says of the places from ``first`` on whether they pass; what it says of
    places beyond ``count`` does not matter.  Without branches: what does not pass is overwritten by
    what follows.
    """
    end = v.Cell(T.int32(0))
    # An instruction that moves the lanes that pass together takes 16 at a time.
    lanes = 16 if isa.lanes == 16 else 1
    with T.serial(T.floordiv(count + lanes - 1, lanes)) as step:
        first = v.let(step * lanes)
        passes = test(first, lanes)
        place, one, none = first, T.int32(1), T.int32(0)
        if lanes > 1:
            place = v.let(T.ramp(first, 1, lanes))
            passes = T.And(passes, place < v.splat(count, lanes))
            one, none = (v.constant(number, "int32", lanes) for number in (1, 0))
            place = v.compress(place, passes, lanes)
        v.store(places, row + end.get(), v.cast(place, places.dtype, lanes), lanes)
        end.set(end.get() + v.add_lanes(T.Select(passes, one, none), "int32", lanes))
    return v.let(end.get())
