"""Neurons that the tokens of a step have named, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.host.spec import FOUND

if TYPE_CHECKING:
    from pi2.backends.compiler.parameters import Parameters


def emit_unite_named(take: Parameters) -> None:
    """Set bit k of ``named`` int64 [neurons] for the neurons of list k of ``lists``, one behind
    the other in ``flat``, where each ends at its one of ``ends``; clear all other bits.  ``united``
    [neurons] becomes those that have a bit, ascending, ``found`` [0] their number."""
    lists, neurons = take.take_number("lists"), take.take_number("neurons")
    ends = take.take_given_array("ends", "int32")
    flat = take.take_given_array("flat", "int32")
    named = take.take_given_array("named", "int64")
    united = take.take_given_array("united", "int32")
    found = take.take_array("found", "int32", FOUND)
    with T.serial(neurons) as neuron:
        v.store(named, neuron, T.int64(0), 1)
    begin = v.Cell(T.int32(0))
    with T.serial(lists) as number:
        bit = v.let(T.int64(1) << v.wide(number))
        with T.serial(ends[number] - begin.get()) as step:
            neuron = v.let(flat[begin.get() + step])
            v.store(named, neuron, named[neuron] | bit, 1)
        begin.set(ends[number])
    count = v.Cell(T.int32(0))
    with T.serial(neurons) as neuron:
        # What no list has is overwritten by the next one.
        v.store(united, count.get(), neuron, 1)
        count.set(count.get() + T.Select(named[neuron] != T.int64(0), T.int32(1), T.int32(0)))
    v.store(found, 0, count.get(), 1)
