"""The FFN of a few tokens over gathered neurons, each of which some of the tokens have named."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.tirx.script import builder as T

from pi2.backends.compiler import vectors as v
from pi2.backends.kernels.gathered import PlaceList, Run, emit_at_once, emit_in_turn
from pi2.backends.kernels.isa import Isa
from pi2.backends.kernels.matrix import emit_shared
from pi2.backends.kernels.neurons import add_squares, emit_add, emit_count, emit_fill
from pi2.backends.kernels.spec import BLOCK, BLOCK_ROOM, MOST_NAMING


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Neurons, and which of the ``tokens`` have named them.

    ``slots`` int32 [count], and ``rows`` if scales are resident; ``named`` int32 [count]: a bit for
    each token; the room of these is whole lines. ``own_slots`` int32 [threads, tokens,
    `BLOCK_ROOM`], and ``own_rows``, are room for a thread's part of a block, one token's list
    behind the other's: the next token's neurons are prefetched while the last ones of a token are
    computed."""

    slots: v.Buffer
    rows: v.Buffer | None
    named: v.Buffer
    count: v.Expr
    tokens: v.Expr
    own_slots: v.Buffer
    own_rows: v.Buffer | None


def emit_shared_neurons(run: Run, naming: Naming, total: v.Buffer) -> None:
    """Add neurons to ``total`` float32 [tokens, hidden] (lane order) of the tokens that have named
    them.

    Of the run's scratch, ``gates``, ``values`` and ``firing`` are [threads, BLOCK], ``partial`` is
    [tokens, threads, hidden]; its token has no meaning."""
    spec, scratch = run.spec, run.scratch
    threads, hidden, count, tokens = spec.threads, spec.hidden, naming.count, naming.tokens
    squares = scratch.squares

    def emit(thread: v.Expr) -> None:
        seen = T.alloc_buffer((MOST_NAMING,), "int32")
        starts = T.alloc_buffer((MOST_NAMING + 1,), "int32")
        turns = _Turns(run.isa, naming, seen, threads, thread)
        with T.serial(tokens) as token:
            v.store(seen, token, T.int32(0), 1)
            emit_fill(scratch.partial, v.let((token * threads + thread) * hidden), hidden)
            if squares is not None:
                own_sum = token * threads + thread
                v.store(squares.own, own_sum, v.constant(0.0, "float32"), 1)
        fired = v.Cell(T.int32(0))
        first = v.let(thread * BLOCK)
        lists = v.let(thread * (tokens * BLOCK_ROOM))
        with T.serial(T.floordiv(count + BLOCK - 1, BLOCK)) as block:
            begin = v.let(block * BLOCK)
            size = v.let(T.min(count - begin, BLOCK))
            listed = v.Cell(T.int32(0))
            with T.serial(tokens) as token:
                v.store(starts, token, listed.get(), 1)
                end = v.let(lists + listed.get())
                own = _emit_own(turns, end, begin, size, token)
                listed.set(listed.get() + own)
            v.store(starts, tokens, listed.get(), 1)
            with T.serial(tokens) as token:
                start = v.let(starts[token])
                own_first = v.let(lists + start)
                given = PlaceList(
                    count=v.let(starts[token + 1] - start),
                    slots=naming.own_slots,
                    rows=naming.own_rows,
                    locate=lambda place: own_first + place,
                    ahead=v.let(starts[tokens] - start),
                )
                target = v.let((token * threads + thread) * hidden)
                emit_all = emit_at_once if spec.passes == 1 else emit_in_turn
                alone = replace(run, token=token)
                found = emit_all(alone, given, None, first, target, None)
                fired.set(fired.get() + found)
                if squares is not None:
                    place = v.let(token * threads + thread)
                    more = add_squares(scratch.values, first, found)
                    v.store(squares.own, place, squares.own[place] + more, 1)
        v.store(scratch.counts, thread, fired.get(), 1)

    read_bytes = v.wide(count) * (2 * spec.bundle.down_bytes)
    emit_shared(threads, read_bytes, emit)
    with T.serial(tokens) as token:
        place = v.let(token * threads)
        emit_add(spec, scratch.partial, total, token, v.let(place * hidden))
        if squares is not None:
            squares.emit_add(threads, token, place)
    emit_count(spec, scratch.counts)


@dataclass(frozen=True, slots=True)
class _Turns:
    """Whose turn it is: ``seen`` int32 [tokens], a thread of ``threads``."""

    isa: Isa
    naming: Naming
    seen: v.Buffer
    threads: int
    thread: v.Expr


def _emit_own(turns: _Turns, first: v.Expr, begin: v.Expr, size: v.Expr, token: v.Expr) -> v.Expr:
    """List what a thread takes of a token's neurons in a block, from place ``first`` of the lists
    on, and return how many these are: of all that the token has named every n-th, wherever the
    block begins.

    Beyond them up to 16 places are written."""
    isa, naming, seen = turns.isa, turns.naming, turns.seen
    threads, thread = turns.threads, turns.thread
    # An instruction that moves the lanes that pass together takes 16 at a time.
    lanes = 16 if isa.lanes == 16 else 1
    one, none = (v.constant(number, "int32", lanes) for number in (1, 0))
    lists = [(naming.slots, naming.own_slots)]
    if naming.rows is not None and naming.own_rows is not None:
        lists.append((naming.rows, naming.own_rows))
    kept, turn = v.Cell(T.int32(0)), v.Cell(seen[token])

    def count(passes: v.Expr) -> v.Expr:
        return v.add_lanes(T.Select(passes, one, none), "int32", lanes)

    with T.serial(T.floordiv(size + (lanes - 1), lanes)) as step:
        place = v.let(begin + step * lanes)
        shifted = v.load(naming.named, place, lanes) >> v.splat(token, lanes)
        is_named = (shifted & one) != none
        if lanes > 1:
            inside = T.ramp(step * lanes, 1, lanes) < v.splat(size, lanes)
            is_named = T.And(is_named, inside)
        number = v.let(count(is_named))
        if lanes == 1:
            is_own = T.And(is_named, turn.get() == thread)
        else:
            # Side by side, each one's turn is that of the next thread.
            ramp = T.ramp(turn.get(), 1, lanes)
            whose = T.floormod(ramp, v.constant(threads, "int32", lanes))
            there = T.ramp(T.int32(0), 1, lanes) < v.splat(number, lanes)
            is_own = T.And(there, whose == v.splat(thread, lanes))
        for source, target in lists:
            value = v.load(source, place, lanes)
            if lanes > 1:
                value = v.let(v.compress(value, is_named, lanes))
                value = v.compress(value, is_own, lanes)
            # What is not kept is overwritten by the next one.
            v.store(target, first + kept.get(), value, lanes)
        kept.set(kept.get() + count(is_own))
        turn.set(T.floormod(turn.get() + number, threads))
    v.store(seen, token, turn.get(), 1)
    return v.let(kept.get())
