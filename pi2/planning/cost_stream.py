"""Layers that stream by in pieces, all neurons of each being computed: prompts, and dense decoding.

What the engine does (`pi2.engine.neuron_stream`): a layer's neurons that are not hot are read in
pieces of a staging buffer's size.  One piece is read while the one before it is computed, never
more: so while attention and the hot neurons of a layer are computed, only its first piece comes.
A layer of n pieces takes

    both(before + piece, read) + (n - 1) both(piece, read)

where ``before`` is attention, norms and hot neurons, ``piece`` the arithmetic of a piece, ``read``
its way from flash, and both(a, b) = a + b - overlap min(a, b).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.arithmetic.sizes import STAGED_NEURONS, count_chunks
from pi2.planning.activity import LayerActivity
from pi2.planning.cost_sizes import Sizes
from pi2.planning.rates import Rates, check_flash, find_stream_overlap, find_stream_rate
from pi2.simulate.assumptions import list_dense_units

PROMPT = 128
"""Tokens of a prompt whose speed is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """How fast pieces come from flash."""

    byte_s: float
    """Seconds of a byte, in reads of a piece's size."""
    overlap: float
    """Part of the shorter one of reading and computing that both at once save."""
    neurons: int
    """Number of neurons of a piece."""
    stride: int

    def count_pieces(self, absent: float) -> float:
        """Number of pieces that hold ``absent`` neurons."""
        return float(ceil(absent / self.neurons - 1e-9)) if absent > 0.0 else 0.0

    def time_wait(self, absent: float, before_s: float, compute_s: float) -> float:
        """Seconds that a layer takes beyond its arithmetic: ``before_s`` first, then ``compute_s``
        for all ``absent`` neurons."""
        pieces = self.count_pieces(absent)
        if pieces == 0.0:
            return 0.0
        read_s, piece_s = self.time_read(absent) / pieces, compute_s / pieces
        first = read_s - self.overlap * min(before_s + piece_s, read_s)
        return first + (pieces - 1.0) * (read_s - self.overlap * min(piece_s, read_s))

    def time_read(self, absent: float) -> float:
        """Seconds of reading ``absent`` neurons, nothing else going on."""
        return absent * self.stride * self.byte_s


def find_stream(resolved: ResolvedPlan, rates: Rates) -> Stream:
    """The stream of a plan's layers; ``UserError`` P351 where reads were not measured."""
    flash = check_flash(rates, resolved.device)
    neurons = min(resolved.model.layer_neurons, STAGED_NEURONS)
    stride = resolved.bundle.stride
    return Stream(
        byte_s=1.0 / find_stream_rate(flash, neurons * stride),
        overlap=find_stream_overlap(rates),
        neurons=neurons,
        stride=stride,
    )


def cost_prefill(
    resolved: ResolvedPlan,
    rates: Rates,
    sizes: Sizes,
    activities: tuple[LayerActivity, ...],
    head_s: float,
    prompt: int = PROMPT,
) -> float | None:
    """Tokens per second of a prompt of ``prompt`` tokens; None where no arithmetic rate is known.

    Chunks that go through a layer together take every piece one after the other.
    """
    arithmetic = _find_arithmetic(resolved, rates)
    if arithmetic is None:
        return None
    chunk = resolved.plan.prefill.chunk
    together = chunk * count_chunks(resolved)
    seconds = head_s
    known: dict[tuple[float, int, int], float] = {}
    for start in range(0, prompt, together):
        taken = min(together, prompt - start)
        sizes_of_chunks = [min(chunk, taken - first) for first in range(0, taken, chunk)]
        for layer, activity in zip(resolved.layers, activities, strict=True):
            key = (layer.hot, id(activity), taken)
            if key not in known:
                absent = resolved.model.layer_neurons - layer.hot_neurons
                known[key] = _time_layer(
                    resolved, rates, sizes, activity, arithmetic, sizes_of_chunks, absent
                )
            seconds += known[key]
    return prompt / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arithmetic:
    """Seconds of a weight for a pass over it, and for each token of the pass."""

    ffn: tuple[float, float]
    project: tuple[float, float]
    skips: bool
    """Whether down is computed only for neurons that fire, as by pi2's kernels."""


def _find_arithmetic(resolved: ResolvedPlan, rates: Rates) -> _Arithmetic | None:
    dense = rates.dense
    # Through its bus, a unit with memory of its own computes no prompts that lie in main memory.
    able = dense is not None and not dense.has_memory and uses_dense(resolved)
    if able and dense is not None and dense.ops_s is not None:
        rate = (0.0, 2.0 / dense.ops_s)
        return _Arithmetic(ffn=rate, project=rate, skips=False)
    if rates.dense_many is None or rates.project_many is None:
        return None
    return _Arithmetic(ffn=rates.dense_many, project=rates.project_many, skips=rates.measured)


def _time_layer(
    resolved: ResolvedPlan,
    rates: Rates,
    sizes: Sizes,
    activity: LayerActivity,
    arithmetic: _Arithmetic,
    chunks: list[int],
    absent: int,
) -> float:
    neurons = resolved.model.layer_neurons
    calls = len(chunks)
    before_s = sum(
        _time_many(arithmetic.project, sizes.projection_weights, count) for count in chunks
    )
    before_s += calls * (rates.norm_s + rates.python_s + rates.route_s * (sizes.experts > 0))
    share = 1.0
    if arithmetic.skips and not resolved.model.is_smooth:
        # Gates and ups are computed for all tokens, downs where neurons fire.
        parts = sizes.neuron_weights // sizes.hidden
        share = (parts - 1.0 + activity.named.active * activity.fired) / parts
    each_s = sum(
        _time_many(arithmetic.ffn, sizes.neuron_weights, count, share, activity.chosen)
        for count in chunks
    )
    hot_s, cold_s = (neurons - absent) * each_s, absent * each_s
    seconds = before_s + hot_s + cold_s
    if absent > 0:
        seconds += find_stream(resolved, rates).time_wait(absent, before_s + hot_s, cold_s)
    return seconds


def _time_many(
    rate: tuple[float, float],
    weights: float,
    tokens: int,
    share: float = 1.0,
    chosen: float = 1.0,
) -> float:
    """Seconds of ``weights`` for ``tokens``, ``chosen`` of which need them; ``share``: part of the
    products that are computed."""
    once_s, token_s = rate
    any_token = 1.0 - (1.0 - chosen) ** tokens
    return weights * (once_s * any_token + token_s * share * chosen * tokens)


def uses_dense(resolved: ResolvedPlan) -> bool:
    """Whether the plan gives neurons to an NPU or GPU."""
    return bool(list_dense_units(resolved))
