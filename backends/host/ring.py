"""io_uring without Python: one call submits, notes completions and waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.compiler.vectors import Parameters
from pi2.memory.host_loops import ARRAYS, KEPT, LOOPS, NUMBERS, RingControl


class Given:
    """What a loop takes, by name (``own.count``)."""

    def __init__(self, loop: str, take: Parameters) -> None:
        given, kept = LOOPS[loop]
        self._found: dict[str, Any] = {
            name: take.take_given_array(name, ARRAYS[name])
            if name in ARRAYS
            else take.take_number(name, NUMBERS.get(name, "int32"))
            for name in given.split()
        }
        self._found |= {name: take.take_array(name, *KEPT[name]) for name in kept.split()}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(name) from None


def emit_read_runs(own: Given) -> None:
    """Read requests start, start + step, ... before ``requests_end`` with preadv.

    Request i fills the ``counts[i]`` vectors from ``firsts[i]`` on; a vector is an address and a
    length, as in C's ``struct iovec``."""
    rest = own.requests_end - own.start
    with T.serial(T.floordiv(rest + own.step - 1, own.step)) as turn:
        index = v.let(own.start + turn * own.step)
        vector = T.address_of(own.vectors[v.wide(own.firsts[index]) * 2])
        more = own.counts[index], own.offsets[index]
        size = T.call_extern("int64", "preadv", own.fd, vector, *more)
        v.store(own.results, index, size, 1)


def emit_plan_reads(own: Given) -> None:
    """Plan reads of bundles ``indices`` [count] (ascending) into ``slots`` [count]: neighbours, up
    to ``most``, and the ``gap`` between two at most, are one request.

    Writes what `emit_read_runs` takes, and the bytes of each request, the request of each bundle,
    and ``pending`` for results; ``found`` [1] becomes the number of requests."""

    def begin(request: v.Expr, place: v.Expr, offset: v.Expr) -> None:
        v.store(own.results, request, own.pending, 1)

    v.store(own.found, 0, _plan(own, begin), 1)


def _plan(
    own: Given,
    begin: Callable[[v.Expr, v.Expr, v.Expr], None],
    grow: Callable[[v.Expr, v.Expr], None] = lambda request, size: None,
) -> v.Expr:
    """Write the plan and return its number of requests; ``begin`` is told each request, its first
    vector, and its byte of the file, ``grow`` how many vectors it has now."""
    request, size, following = v.Cell(T.int32(-1)), v.Cell(T.int32(0)), v.Cell(T.int32(-1))
    vector = v.Cell(T.int32(0))

    def add_vector(target: v.Expr) -> None:
        v.store(own.vectors, v.wide(vector.get()) * 2, target, 1)
        v.store(own.vectors, v.wide(vector.get()) * 2 + 1, own.stride, 1)
        vector.set(vector.get() + 1)
        size.set(size.get() + 1)

    with T.serial(own.count) as place:
        index = v.let(own.indices[place])
        between = v.let(index - following.get())
        is_far = T.Or(between > own.gap, size.get() + between >= own.most)
        with T.If(T.Or(is_far, place == 0)):
            with T.Then():
                request.set(request.get() + 1)
                size.set(T.int32(0))
                offset = v.let(own.base + v.wide(index) * own.stride)
                v.store(own.firsts, request.get(), vector.get(), 1)
                v.store(own.offsets, request.get(), offset, 1)
                begin(request.get(), v.let(vector.get()), offset)
            with T.Else(), T.serial(between):
                add_vector(own.scratch)
        add_vector(v.let(own.address + v.wide(own.slots[place]) * own.stride))
        following.set(index + 1)
        v.store(own.counts, request.get(), size.get(), 1)
        v.store(own.sizes, request.get(), v.wide(size.get()) * own.stride, 1)
        v.store(own.requests, place, request.get(), 1)
        grow(request.get(), size.get())
    return v.let(request.get() + 1)


def emit_fill_entries(own: Given) -> None:
    """Write entries of io_uring's submission ring, ``entries`` [count, 8], for requests as
    `emit_read_runs` takes them: ``head`` is the first word of each, the names of the requests
    follow ``first_name``."""
    with T.serial(own.count) as place:
        words = (
            own.head,
            own.offsets[place],
            own.address + v.wide(own.firsts[place]) * 16,
            v.wide(own.counts[place]),
            own.first_name + v.wide(place),
            *(T.int64(0) for _ in range(3)),
        )
        for word, value in enumerate(words):
            v.store(own.entries, v.wide(place) * 8 + word, value, 1)


ENTER = 426
"""System call io_uring_enter: the same number on x86-64 and aarch64."""
GET_EVENTS = 1
HAS_COMPLETIONS = 1 << 2
"""Flag of the submission ring: completions wait to be asked for."""
NOTED_A_CALL = 20
"""Completions that a system call notes at least, if there are as many (since Linux 6.13)."""
ENTRY_WORDS = 8
_WORD = 0xFFFFFFFF
_LOADS_FIRST = 9
"""Option ISHLD of aarch64's instruction dmb."""


def emit_drive_ring(architecture: str, own: Given) -> None:
    """Hand over what waits of the ``pool`` of entries as far as there is room, note results, and
    wait until none of ``results`` [begin, end) is ``pending``; see `HostLoops.drive_ring`.

    ``found`` becomes: whether a system call has failed, results that are still pending, and
    whether entries wait."""
    _Ring(architecture, own).emit_drive(own.begin, own.end)


def emit_submit_reads(architecture: str, own: Given) -> None:
    """Plan reads as `emit_plan_reads` does, write their entries into the pool, and hand over what
    has room as `emit_drive_ring` does.

    The requests have the names from ``first_name`` on, ``count`` of them: those that neighbours
    have made superfluous get entries without an operation.  ``head`` is the first word of entries,
    ``vectors_address`` where ``vectors`` are.  ``found`` [4] becomes what `emit_drive_ring` says,
    and the number of requests."""
    first = v.let(T.bitwise_and(own.first_name, own.control[RingControl.POOL_MASK]))

    def store(request: v.Expr, word: int, value: v.Expr) -> None:
        v.store(own.pool, (first + v.wide(request)) * ENTRY_WORDS + word, value, 1)

    def begin(request: v.Expr, vector: v.Expr, offset: v.Expr) -> None:
        v.store(own.results, first + v.wide(request), own.pending, 1)
        store(request, 0, own.head)
        store(request, 1, offset)
        store(request, 2, own.vectors_address + v.wide(vector) * 16)
        store(request, 4, own.first_name + v.wide(request))
        for word in range(5, ENTRY_WORDS):
            store(request, word, T.int64(0))

    def grow(request: v.Expr, size: v.Expr) -> None:
        store(request, 3, v.wide(size))

    requests = _plan(own, begin, grow)
    with T.serial(own.count - requests) as left:
        v.store(own.results, first + v.wide(requests + left), T.int64(0), 1)
        store(requests + left, 0, T.int64(0))
    v.store(own.control, RingControl.NAMED, own.first_name + v.wide(own.count), 1)
    _Ring(architecture, own).emit_drive(T.int32(0), T.int32(0))
    v.store(own.found, 3, requests, 1)


def _cut(value: v.Expr) -> v.Expr:
    return T.bitwise_and(value, T.int64(_WORD))


class _Ring:
    def __init__(self, architecture: str, own: Given) -> None:
        self._is_weak, self._own = architecture == "aarch64", own
        self._control, self._words, self._slots = own.control, own.words, own.ring_slots

    def emit_drive(self, begin: v.Expr, end: v.Expr) -> None:
        control, results, found = self._control, self._own.results, self._own.found
        failed, is_over, pending = (v.Cell(T.int32(0)) for _ in range(3))
        self.emit_note()
        deferred = v.let(control[RingControl.DEFERRED])
        flags = T.bitwise_and(self.read(RingControl.FLAGS), T.int64(HAS_COMPLETIONS))
        hidden = v.Cell(T.Select(flags != T.int64(0), deferred, T.int64(0)))
        with T.While(is_over.get() == 0):
            pending.set(T.int32(0))
            with T.serial(end - begin) as place:
                is_pending = results[begin + place] == self._own.pending
                pending.set(pending.get() + T.Select(is_pending, T.int32(1), T.int32(0)))
            self.emit_push(pending.get())
            queued = v.let(self.count(RingControl.TAIL, RingControl.HEAD))
            in_flight = v.let(self.count(RingControl.TAIL, RingControl.DONE_HEAD))
            least = v.let(T.min(v.wide(pending.get()), in_flight))
            rests = T.And(queued == T.int64(0), least == T.int64(0))
            with T.If(T.And(rests, hidden.get() == T.int64(0))):
                with T.Then():
                    is_over.set(T.int32(1))
                with T.Else():
                    known = v.let(self.read(RingControl.DONE_TAIL))
                    answer = v.let(self.enter(queued, least))
                    with T.If(answer < T.int64(0)):
                        with T.Then():
                            failed.set(T.int32(1))
                            is_over.set(T.int32(1))
                        with T.Else():
                            # The flag tells nothing of what a call leaves over.
                            noted = _cut(self.read(RingControl.DONE_TAIL) - known)
                            is_more = noted >= T.int64(NOTED_A_CALL)
                            hidden.set(T.Select(is_more, deferred, T.int64(0)))
                            self.emit_note()
        waits = control[RingControl.NAMED] - control[RingControl.HANDED_OVER]
        v.store(found, 0, failed.get(), 1)
        v.store(found, 1, pending.get(), 1)
        v.store(found, 2, T.Select(waits > T.int64(0), T.int32(1), T.int32(0)), 1)

    def read(self, which: int) -> v.Expr:
        """A word of the rings, by its place in ``control``."""
        return v.wide(self._words[self._control[which]])

    def _write(self, which: int, value: v.Expr) -> None:
        v.store(self._words, self._control[which], T.cast(_cut(value), "uint32"), 1)

    def count(self, tail: int, head: int) -> v.Expr:
        return _cut(self.read(tail) - self.read(head))

    def enter(self, queued: v.Expr, least: v.Expr) -> v.Expr:
        """Submit ``queued`` entries and wait for ``least`` completions; below 0: it failed.

        The last two arguments are not for the kernel. They mark memory that it changes: nothing of
        it may stay in a register."""
        return T.call_extern(
            "int64",
            "syscall",
            T.int64(ENTER),
            self._control[RingControl.DESCRIPTOR],
            queued,
            least,
            T.int64(GET_EVENTS),
            T.int64(0),
            T.int64(0),
            T.address_of(self._words[0]),
            T.address_of(self._slots[0]),
        )

    def emit_note(self) -> None:
        control, results = self._control, self._own.results
        head = v.let(self.read(RingControl.DONE_HEAD))
        count = v.let(_cut(self.read(RingControl.DONE_TAIL) - head))
        if self._is_weak:
            # What another processor has written before its count.
            self._wait_for_loads()
        first, mask = control[RingControl.EVENTS], control[RingControl.DONE_MASK]
        first, mask = v.let(first), v.let(mask)
        names = v.let(control[RingControl.POOL_MASK])
        with T.serial(count) as turn:
            place = v.let(first + T.bitwise_and(head + turn, mask) * T.int64(4))
            # A name fits 32 bits, as far as it tells the place of its result.
            result = v.let(T.bitwise_and(v.wide(self._words[place]), names))
            value = T.reinterpret(self._words[place + T.int64(2)], dtype="int32")
            v.store(results, result, v.wide(value), 1)
        self._write(RingControl.DONE_HEAD, head + count)

    def emit_push(self, pending: v.Expr) -> None:
        """Write waiting entries into the ring, up to its depth, if a system call is worth it."""
        control = self._control
        handed = v.Cell(control[RingControl.HANDED_OVER])
        named = v.let(control[RingControl.NAMED])
        tail = v.Cell(self.read(RingControl.TAIL))
        done = v.let(self.read(RingControl.DONE_HEAD))
        depth = v.let(control[RingControl.DEPTH])
        room = v.let(depth - _cut(tail.get() - done))
        is_worth = T.Or(pending > 0, room >= control[RingControl.LEAST_ROOM])
        with T.If(T.And(is_worth, handed.get() < named)), T.Then():
            mask, names = control[RingControl.SLOT_MASK], control[RingControl.POOL_MASK]
            mask, names = v.let(mask), v.let(names)
            with T.While(T.And(handed.get() < named, _cut(tail.get() - done) < depth)):
                source = v.let(T.bitwise_and(handed.get(), names) * T.int64(ENTRY_WORDS))
                handed.set(handed.get() + T.int64(1))
                with T.If(self._own.pool[source] != T.int64(0)), T.Then():
                    target = v.let(T.bitwise_and(tail.get(), mask) * T.int64(ENTRY_WORDS))
                    for word in range(ENTRY_WORDS):
                        v.store(self._slots, target + word, self._own.pool[source + word], 1)
                    tail.set(tail.get() + T.int64(1))
            v.store(control, RingControl.HANDED_OVER, handed.get(), 1)
            # The system call that follows makes the kernel see entries before the tail.
            self._write(RingControl.TAIL, tail.get())

    @staticmethod
    def _wait_for_loads() -> None:
        T.evaluate(T.call_llvm_intrin("void", "llvm.aarch64.dmb", T.int32(_LOADS_FIRST)))
