"""The mixed-integer program of a plan, solved with HiGHS by way of scipy.

Continuous: per group of layers the share of neurons that are resident (r), the neurons missing
(m), the share that a dense unit computes (d), the time of computing (b) and of waiting for flash
(w); and what the context lends to the cache (l).  Binary: one of each kind of choice.  A row that
only holds for some choices is relaxed by a large number where they are not made.

    minimise   time, memory, or energy
    time       head + sum over layers of (fixed + b + look-up m + w)
    energy     processor's power x time + what the dense unit adds x sum of its time
    memory     everything fixed + embedding + predictor + kv + workspace - l
               + neurons x stride x sum of r
    misses     m >= line(r), for the lines of the chosen predictor and cache
    compute    b >= time of all active neurons; with a dense unit, b >= its time too
    lending    l <= what a mean token has not used of kv; l <= the cache less the least that works
    waiting    w >= time of reading m with the chosen engine - what runs meanwhile"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pi2.arrays import F64
from pi2.costs.activity import LOOK_AHEAD_MODES
from pi2.costs.reads import IoChoice
from pi2.costs.settings import LookAhead
from pi2.diagnostics import UserError
from pi2.fitting.budget import SHARE_STEPS
from pi2.planning.problem import ChunkChoice, EmbeddingChoice, KvChoice, Mode, Problem

TIME_LIMIT_S = 60.0
GAP = 1e-3
"""Relative distance to the best plan that is good enough."""
_TIE_S_PER_BYTE = 1e-15
"""Weight that prefers the smaller of two equally fast plans: a microsecond for a gigabyte."""
_TIE_BYTES_PER_S = 1e6
"""Weight that prefers the faster of two equally small plans: a megabyte for a second."""
_PROMPT_PART = 0.05
"""What a prompt's token counts for against a generated one."""

Goal = Literal["time", "memory", "energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The choices of the best plan."""

    mode: Mode
    kv: KvChoice
    embedding: EmbeddingChoice
    chunk: ChunkChoice
    io: IoChoice
    look_ahead: LookAhead
    resident: tuple[float, ...]
    """Share of neurons in memory by group of layers."""
    dense: tuple[float, ...]
    """Share that a dense unit computes, by group."""
    lent_bytes: float
    """What the cache has of the context's memory."""
    token_s: float
    memory_bytes: float


@dataclass(slots=True)
class _Rows:
    """Rows ``low <= a x`` of a program with ``size`` variables."""

    size: int
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def add(self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        """``low <= sum of coefficient x variable <= high``."""
        for column, value in terms.items():
            self.rows.append(len(self.lows))
            self.columns.append(column)
            self.values.append(value)
        self.lows.append(low)
        self.highs.append(high)


class Program:
    """Variables and rows for a problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        groups = len(problem.groups)
        self._places = 0
        self._r = self._take(groups)
        self._m = self._take(groups)
        self._d = self._take(groups)
        self._b = self._take(groups)
        self._w = self._take(groups)
        self._lent = self._take(1)
        self._continuous = self._places
        self._modes = self._take(len(problem.modes))
        self._kvs = self._take(len(problem.kvs))
        self._embeddings = self._take(len(problem.embeddings))
        self._chunks = self._take(len(problem.chunks))
        self._ios = self._take(len(problem.ios))
        self._aheads = self._take(len(problem.look_aheads))
        self._time, self._time_fixed = self._describe_time()
        self._memory, self._memory_fixed = self._describe_memory()

    def solve(
        self, goal: Goal, *, memory_bytes: float | None = None, token_s: float | None = None
    ) -> Solution | None:
        """The best plan within the limits; None if there is none.  UserError P352 without scipy."""
        optimize, sparse = import_solver()
        rows = self._list_rows()
        if memory_bytes is not None:
            rows.add(self._memory, high=(memory_bytes - self._memory_fixed) / _MIB)
        if token_s is not None:
            rows.add(self._time, high=token_s - self._time_fixed)
        size = self._places
        objective = np.zeros(size)
        scale = {
            "time": (1.0, _TIE_S_PER_BYTE * _MIB),
            "memory": (_TIE_BYTES_PER_S / _MIB, 1.0),
            "energy": (self._problem.rates.power_w or 1.0, _TIE_S_PER_BYTE * _MIB),
        }
        for terms, weight in zip((self._time, self._memory), scale[goal], strict=True):
            for column, value in terms.items():
                objective[column] += weight * value
        for place, chunk in zip(self._chunks, self._problem.chunks, strict=True):
            objective[place] += scale[goal][0] * _PROMPT_PART * self._time_prompt_token(chunk)
        if goal == "energy":
            for column, joules in self._describe_dense_energy().items():
                objective[column] += joules
        matrix = sparse.csr_matrix(
            (rows.values, (rows.rows, rows.columns)), shape=(len(rows.lows), size)
        )
        low, high = self._find_bounds()
        integrality = np.zeros(size)
        integrality[self._continuous :] = 1
        with _mute_output():
            result = optimize.milp(
                objective,
                integrality=integrality,
                bounds=optimize.Bounds(low, high),
                constraints=optimize.LinearConstraint(matrix, rows.lows, rows.highs),
                options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
            )
        return None if result.x is None else self._read(result.x)

    def _time_prompt_token(self, chunk: ChunkChoice) -> float:
        """Seconds per prompt token that depend on the chunk: all neurons stream or unpack."""
        problem = self._problem
        layers = sum(group.count for group in problem.groups)
        size = layers * problem.neurons * problem.stride
        flash = problem.rates.flash
        rate = problem.rates.gather.bytes_s if flash is None else flash.find_stream_rate()
        return size / rate / chunk.tokens + chunk.pass_s

    def _take(self, count: int) -> range:
        start = self._places
        self._places += count
        return range(start, start + count)

    def _find_bounds(self) -> tuple[F64, F64]:
        low, high = np.zeros(self._places), np.ones(self._places)
        high[self._m.start : self._m.stop] = self._problem.neurons
        high[self._b.start : self._lent.stop] = np.inf
        if self._problem.rates.dense is None:
            high[self._d.start : self._d.stop] = 0.0
        return low, high

    def _describe_time(self) -> tuple[dict[int, float], float]:
        problem = self._problem
        terms: dict[int, float] = {}
        for group, b, w in zip(problem.groups, self._b, self._w, strict=True):
            terms[b] = terms[w] = float(group.count)
        for place, mode in zip(self._modes, problem.modes, strict=True):
            terms[place] = sum(
                group.count * seconds
                for group, seconds in zip(problem.groups, mode.fixed_s, strict=True)
            )
        for place, kv in zip(self._kvs, problem.kvs, strict=True):
            terms[place] = kv.token_s
        for place, embedding in zip(self._embeddings, problem.embeddings, strict=True):
            terms[place] = embedding.token_s
        look_up_s = max((mode.missing_s for mode in problem.modes), default=0.0)
        for group, m in zip(problem.groups, self._m, strict=True):
            terms[m] = group.count * look_up_s
        return terms, problem.head_s

    def _describe_dense_energy(self) -> dict[int, float]:
        rates = self._problem.rates
        added_w = (rates.both_w or 0.0) - (rates.power_w or 0.0)
        if rates.dense is None or added_w <= 0.0:
            return {}
        return {
            d: added_w * group.count * self._problem.neurons * self._find_dense_neuron_s()
            for group, d in zip(self._problem.groups, self._d, strict=True)
        }

    def _find_dense_neuron_s(self) -> float:
        problem, rates = self._problem, self._problem.rates
        assert rates.dense is not None
        hidden = problem.wish.model.stored_neuron_width
        # 4 bits, one scale for a row; main memory is shared with the processor.
        slow = 1.0
        if not rates.dense.has_memory:
            together = rates.dense.bytes_s + rates.gather.bytes_s
            slow = max(1.0, together / rates.shared_bytes_s)
        seconds = 3 * hidden / 2 / rates.dense.bytes_s * slow
        if rates.dense.ops_s is not None:
            seconds = max(seconds, 2.0 * 3 * hidden * problem.wish.batch / rates.dense.ops_s)
        return seconds

    def _describe_memory(self) -> tuple[dict[int, float], float]:
        problem = self._problem
        terms: dict[int, float] = {}
        for group, r in zip(problem.groups, self._r, strict=True):
            terms[r] = group.count * problem.neurons * problem.stride / _MIB
        spare = 2 * _MIB  # sizes are written in whole MiB, rounded up: hot, and the cache
        if problem.unit_bytes is not None:  # what lies there takes no main memory
            # Its share is rounded down, and what that leaves is in main memory.
            spare += _MIB * sum(terms[r] for r in self._r) / SHARE_STEPS
            for r, d in zip(self._r, self._d, strict=True):
                terms[d] = -terms[r]
        for place, mode in zip(self._modes, problem.modes, strict=True):
            terms[place] = mode.predictor_bytes / _MIB
        for place, kv in zip(self._kvs, problem.kvs, strict=True):
            terms[place] = kv.bytes / _MIB
        for place, embedding in zip(self._embeddings, problem.embeddings, strict=True):
            terms[place] = embedding.bytes / _MIB
        terms[self._lent[0]] = -1.0
        for place, chunk in zip(self._chunks, problem.chunks, strict=True):
            terms[place] = chunk.workspace_bytes / _MIB
        return terms, problem.runtime_bytes + spare

    def _list_rows(self) -> _Rows:
        problem = self._problem
        rows = _Rows(self._places)
        choices = (self._modes, self._kvs, self._embeddings, self._chunks, self._ios, self._aheads)
        for kind in choices:
            rows.add(dict.fromkeys(kind, 1.0), low=1.0, high=1.0)
        lent = self._lent[0]
        unused = {
            place: -kv.lent_bytes / _MIB for place, kv in zip(self._kvs, problem.kvs, strict=True)
        }
        rows.add({lent: 1.0, **unused}, high=0.0)
        for mode, place in zip(problem.modes, self._modes, strict=True):
            self._add_misses(rows, mode, place)
            self._add_waiting(rows, mode, place)
            if mode.predictor not in LOOK_AHEAD_MODES:
                for ahead, other in zip(problem.look_aheads, self._aheads, strict=True):
                    if ahead != "none":
                        rows.add({place: 1.0, other: 1.0}, high=1.0)
        for number in range(len(problem.groups)):
            self._add_compute(rows, number)
        if problem.unit_bytes is not None:
            layer = problem.neurons * problem.stride / _MIB
            sizes = {d: g.count * layer for g, d in zip(problem.groups, self._d, strict=True)}
            rows.add(sizes, high=problem.unit_bytes / _MIB)
        return rows

    def _add_misses(self, rows: _Rows, mode: Mode, place: int) -> None:
        """m >= slope r + offset if the mode is chosen."""
        problem, large = self._problem, float(self._problem.neurons)
        for lines, r, m in zip(mode.lines, self._r, self._m, strict=True):
            for slope, offset in lines:
                rows.add({m: 1.0, r: -slope, place: -large}, low=offset - large)
            if mode.cache_share == 0.0:
                rows.add({r: 1.0, place: -1.0}, low=0.0)  # everything stays
        most = max(kv.lent_bytes for kv in problem.kvs) / _MIB
        lent = self._lent[0]
        if not mode.lends:
            rows.add({lent: 1.0, place: most}, high=most)
            return
        layer = problem.neurons * problem.stride
        terms = {
            r: group.count * share * layer / _MIB
            for group, r, share in zip(problem.groups, self._r, mode.cache_shares, strict=True)
        }
        # Once the context is full, the cache has to work with what is its own.
        needed = mode.least_cold_bytes / _MIB + most
        rows.add({**terms, lent: -1.0, place: -needed}, low=-most)

    def _add_compute(self, rows: _Rows, number: int) -> None:
        """b is the longer one of the CPU's and the dense unit's time; d is not above what stays."""
        problem, b, d = self._problem, self._b[number], self._d[number]
        for mode, place in zip(problem.modes, self._modes, strict=True):
            lines = mode.dense_lines[number]
            if not lines:
                rows.add({b: 1.0, place: -mode.compute_s[number]}, low=0.0)
                continue
            for slope, offset in lines:
                large = mode.compute_s[number]
                rows.add({b: 1.0, d: -slope, place: -large}, low=offset - large)
        if problem.rates.dense is not None:
            unit = problem.rates.dense
            dense_s = problem.neurons * self._find_dense_neuron_s()
            rows.add({b: 1.0, d: -dense_s}, low=unit.launch_s)
            share = min(1.0 - mode.cache_share for mode in problem.modes if mode.cache_share < 1.0)
            rows.add({self._r[number]: share, d: -1.0}, low=0.0)

    def _add_waiting(self, rows: _Rows, mode: Mode, place: int) -> None:
        problem = self._problem
        if mode.cache_share == 0.0:
            return
        for number, (m, b, w) in enumerate(zip(self._m, self._b, self._w, strict=True)):
            used = max((offset for _, offset in mode.lines[number]), default=0.0)
            for io, io_place in zip(problem.ios, self._ios, strict=True):
                own_s = io.run_s if mode.predictor == "router" else io.neuron_s
                neuron_s = mode.neuron_s[number] or own_s
                overlap = problem.rates.overlap if io.overlap is None else io.overlap
                if mode.neuron_s[number]:
                    overlap = problem.rates.stream_overlap
                large = used * neuron_s + io.call_s
                # What the cores are needed for while reading goes on cannot be hidden.
                rows.add(
                    {w: 1.0, m: -(1.0 - overlap) * neuron_s, place: -large, io_place: -large},
                    low=(1.0 - overlap) * io.call_s - 2 * large,
                )
                for ahead, ahead_place in zip(problem.look_aheads, self._aheads, strict=True):
                    hidden = problem.attention_s if ahead != "none" else 0.0
                    hidden += mode.ahead_s if ahead == "layer" else 0.0
                    late_s = 0.0
                    if ahead == "none" and mode.predictor != "none":
                        # The last of two clusters is computed when reading is over.
                        late_s = mode.compute_s[number] / max(used, 1.0) / 2
                    rows.add(
                        {
                            w: 1.0,
                            b: overlap,
                            m: -(neuron_s + overlap * late_s),
                            place: -large,
                            io_place: -large,
                            ahead_place: -large,
                        },
                        low=io.call_s - overlap * hidden - 3 * large,
                    )

    def _read(self, x: F64) -> Solution:
        problem = self._problem

        def pick(places: Sequence[int]) -> int:
            return int(np.argmax([x[place] for place in places]))

        time_s = sum(value * x[column] for column, value in self._time.items())
        memory = sum(value * x[column] for column, value in self._memory.items())
        return Solution(
            mode=problem.modes[pick(self._modes)],
            kv=problem.kvs[pick(self._kvs)],
            embedding=problem.embeddings[pick(self._embeddings)],
            chunk=problem.chunks[pick(self._chunks)],
            io=problem.ios[pick(self._ios)],
            look_ahead=problem.look_aheads[pick(self._aheads)],
            resident=tuple(float(min(max(x[place], 0.0), 1.0)) for place in self._r),
            dense=tuple(float(min(max(x[place], 0.0), 1.0)) for place in self._d),
            lent_bytes=max(float(x[self._lent[0]]), 0.0) * _MIB,
            token_s=float(time_s) + self._time_fixed,
            memory_bytes=float(memory) * _MIB + self._memory_fixed,
        )


_MIB = float(1 << 20)


@contextmanager
def _mute_output() -> Iterator[None]:
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no output
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def import_solver() -> tuple[Any, Any]:
    """scipy's modules; UserError P352 without them."""
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise UserError.of(
            "P352", "scipy is not installed, whose solver finds plans", help="pip install scipy"
        ) from None
    return optimize, sparse
