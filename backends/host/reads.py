"""The kernels that read from files, or prepare reads, in loops without Python's lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.host.spec import FOUND

if TYPE_CHECKING:
    from pi2.backends.compiler.parameters import Parameters


def emit_read_runs(take: Parameters) -> None:
    """Read requests start, start + step, ... of ``n`` with preadv.

    Request i fills the ``counts[i]`` vectors from ``firsts[i]`` on; a vector is an address and a
    length, as in C's ``struct iovec``.
    """
    fd = take.take_number("fd")
    start = take.take_number("start")
    step = take.take_number("step")
    requests = take.take_number("requests")
    vectors = take.take_given_array("vectors", "int64")
    firsts = take.take_given_array("firsts", "int32")
    counts = take.take_given_array("counts", "int32")
    offsets = take.take_given_array("offsets", "int64")
    results = take.take_given_array("results", "int64")
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


def emit_plan_reads(take: Parameters) -> None:
    """Plan reads of bundles ``indices`` [count] (ascending) into ``slots`` [count]: neighbours, up
    to ``most``, are one request.

    Writes what `emit_read_runs` takes, and the bytes of each request, the request of each bundle,
    and ``pending`` for results; ``found`` [1] becomes the number of requests.
    """
    plan = ReadPlan(take)
    pending = take.take_number("pending", "int64")
    results = take.take_given_array("results", "int64")
    found = take.take_array("found", "int32", FOUND)

    def begin(request: v.Expr, place: v.Expr, offset: v.Expr) -> None:
        v.store(results, request, pending, 1)

    v.store(found, 0, plan.emit(begin), 1)


class ReadPlan:
    """The parameters of a plan of reads, and the loop that makes it."""

    def __init__(self, take: Parameters) -> None:
        self.count = take.take_number("count")
        self._most = take.take_number("most")
        self._base = take.take_number("base", "int64")
        self._stride = take.take_number("stride", "int64")
        self._address = take.take_number("address", "int64")
        self._indices = take.take_given_array("indices", "int32")
        self._slots = take.take_given_array("slots", "int32")
        self._vectors = take.take_given_array("vectors", "int64")
        self._firsts = take.take_given_array("firsts", "int32")
        self._counts = take.take_given_array("counts", "int32")
        self._offsets = take.take_given_array("offsets", "int64")
        self._sizes = take.take_given_array("sizes", "int64")
        self._requests = take.take_given_array("requests", "int32")

    def emit(
        self,
        begin: Callable[[v.Expr, v.Expr, v.Expr], None],
        grow: Callable[[v.Expr, v.Expr], None] = lambda request, size: None,
    ) -> v.Expr:
        """Write the plan and return its number of requests; ``begin`` is told each request, its
        first bundle's place in the list, and its byte of the file, ``grow`` how many bundles it
        has now."""
        request, size, following = v.Cell(T.int32(-1)), v.Cell(T.int32(0)), v.Cell(T.int32(-1))
        with T.serial(self.count) as place:
            index = v.let(self._indices[place])
            is_far = T.Or(index != following.get(), size.get() == self._most)
            with T.If(T.Or(is_far, place == 0)), T.Then():
                request.set(request.get() + 1)
                size.set(T.int32(0))
                offset = v.let(self._base + v.wide(index) * self._stride)
                v.store(self._firsts, request.get(), place, 1)
                v.store(self._offsets, request.get(), offset, 1)
                begin(request.get(), place, offset)
            size.set(size.get() + 1)
            following.set(index + 1)
            v.store(self._counts, request.get(), size.get(), 1)
            v.store(self._sizes, request.get(), v.wide(size.get()) * self._stride, 1)
            v.store(self._requests, place, request.get(), 1)
            target = v.let(self._address + v.wide(self._slots[place]) * self._stride)
            v.store(self._vectors, v.wide(place) * 2, target, 1)
            v.store(self._vectors, v.wide(place) * 2 + 1, self._stride, 1)
            grow(request.get(), size.get())
        return v.let(request.get() + 1)


def emit_fill_entries(take: Parameters) -> None:
    """Write entries of io_uring's submission ring, ``entries`` [count, 8], for requests as
    `emit_read_runs` takes them: ``head`` is the first word of each, the names of the requests
    follow ``first_name``."""
    count = take.take_number("count")
    head = take.take_number("head", "int64")
    address = take.take_number("address", "int64")
    first_name = take.take_number("first_name", "int64")
    firsts = take.take_given_array("firsts", "int32")
    counts = take.take_given_array("counts", "int32")
    offsets = take.take_given_array("offsets", "int64")
    entries = take.take_given_array("entries", "int64")
    with T.serial(count) as place:
        words = (
            head,
            offsets[place],
            address + v.wide(firsts[place]) * 16,
            v.wide(counts[place]),
            first_name + v.wide(place),
            *(T.int64(0) for _ in range(3)),
        )
        for word, value in enumerate(words):
            v.store(entries, v.wide(place) * 8 + word, value, 1)
