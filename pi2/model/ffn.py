"""The FFN and experts: kinds, neurons in checkpoints, routers, FFNs next to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from pi2.formats import find_packing
from pi2.formats.packing import fill_groups
from pi2.model.tensor import GATE_CUTOFF, DenseTensor, Place, Source, fill

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model
    from pi2.plan.documents.model_parts import Ffn as Options
    from pi2.plan.documents.model_parts import Moe

FfnKind = Literal["none", "dense", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """The feed-forward network of a block."""

    kind: FfnKind
    options: Options
    moe: Moe | None
    """The model's experts, of which dense blocks may be a part."""
    width: int
    """Neurons of the FFN, or of one expert."""
    active: int
    """FFNs of the store that compute a token: experts with shared ones, or the experts that hold a
    dense FFN's neurons; 0 for a dense FFN that is kept next to experts."""
    neurons: int
    """Neurons of these, without the padding of the last one."""
    side: int = 0
    """Neurons of a dense FFN that is kept and computed next to experts."""
    closed: float = 0.0
    """Share of the gates that a cutoff closes; 0 without one."""

    @property
    def has_router(self) -> bool:
        return self.kind == "experts"

    @property
    def cutoff(self) -> float | None:
        """Standard deviations that the cutoff of gates is above their mean; None without one."""
        # It imports modules that start-up does without.
        from statistics import NormalDist

        return NormalDist().inv_cdf(self.closed) if self.closed > 0.0 else None


def make_ffn(model: Model, layer: int) -> Ffn:
    """The FFN of a layer of a document, which need not have passed the rules."""
    options, moe, width = model.ffn, model.moe, model.shape.ffn
    shares = options.gate_sparsity
    closed = shares[layer] if layer < len(shares) else 0.0

    make = partial(Ffn, options=options, moe=moe, closed=closed)
    if layer in options.absent_layers:
        return make(kind="none", width=0, active=0, neurons=0)
    if moe is None:
        return make(kind="dense", width=width, active=1, neurons=width)
    if moe.router == "none" or layer in moe.dense_layers:
        own = (moe.dense_ffn or 0) if layer in moe.dense_layers else moe.experts * width
        if moe.latent is not None:
            return make(kind="dense", width=own, active=0, neurons=0, side=own)
        return make(kind="dense", width=own, active=-(-own // width), neurons=own)
    return make(
        kind="experts",
        width=width,
        active=moe.active_experts + moe.shared_experts,
        neurons=moe.active_experts * width + moe.count_shared(width),
        side=0 if model.side_ffn is None else model.side_ffn.width,
    )


def list_neuron_sources(at: Place, own: Ffn) -> Iterator[Source]:
    options, moe = own.options, own.moe
    parts = ("gate", "up", "down") if options.gated else ("up", "down")
    biases = [f"{part}_bias" for part in parts[:-1] if options.bias]
    # A dense FFN is one tensor of each part, and so are all shared experts.
    experts = range(moe.experts + (moe.shared_experts > 0) if moe and own.has_router else 1)
    for part in (*parts, *biases):
        sources = (find_neurons(at, own, part, expert) for expert in experts)
        yield from (source for source in sources if source.key)
    if options.sub_norm and own.kind != "none":
        yield find_factors(at)


def find_neurons(at: Place, own: Ffn, part: str, expert: int) -> Source:
    """Place in a checkpoint of a part of the neurons of one FFN of the store: ``gate`` and ``up``
    [neurons, width], ``down`` [width, neurons], their biases."""
    model, moe, ffn = at.model, own.moe, at.model.shape.ffn
    routed = 1 if moe is None else moe.experts * own.has_router
    if expert < routed and own.kind != "none":
        return _find_own(at, part, expert)
    total, prefix, fused = 0, "", None
    if moe is not None and own.has_router and expert < routed + moe.shared_experts:
        total, prefix = moe.count_shared(ffn), "shared"
        fused, expert = model.tensors.fused_shared, expert - routed
    elif own.kind == "dense" and own.active:
        total, prefix, fused = own.width, "dense", model.tensors.fused_dense
    rows = range(min(expert * ffn, total), min((expert + 1) * ffn, total))
    if not rows:
        width = model.neuron_width
        own_rows = (width, ffn) if part.startswith("down") else (ffn, width)
        return fill(*own_rows[: 1 if part.endswith("_bias") else 2])
    return _take_rows(at, f"{prefix}_{part}", fused and f"fused_{prefix}", total, rows)


def _take_rows(at: Place, key: str, fused: str | None, total: int, rows: range) -> Source:
    """Some of the ``total`` neurons of a dense FFN or shared experts, zeros up to an expert's."""
    hidden, missing = at.model.shape.hidden, at.model.shape.ffn - len(rows)
    if key.endswith("_down"):
        return at.take(key, hidden, total, rows=lambda: rows, missing=missing)
    if fused is None:
        return at.take(key, total, hidden, rows=lambda: rows, missing=missing)
    first = total if key.endswith("_up") else 0
    inside = range(rows.start + first, rows.stop + first)
    return at.take(fused, 2 * total, hidden, rows=lambda: inside, missing=missing)


def name_part(model: Model, part: str) -> str:
    """Key of ``model.tensors`` that names the tensor with a part of an FFN."""
    is_bias, names = part.endswith("_bias"), model.tensors
    fused = names.fused_gate_up_bias if is_bias else names.fused_gate_up
    if fused is None or part.startswith("down"):
        return part
    return "fused_gate_up_bias" if is_bias else "fused_gate_up"


def _find_own(at: Place, part: str, expert: int) -> Source:
    model, ffn, width = at.model, at.model.shape.ffn, at.model.neuron_width
    key, rows = name_part(model, part), None
    shape: tuple[int, ...] = (ffn, width)
    if key != part:
        shape = (2 * ffn, width)
        is_up = part.startswith("up")
        rows = partial(range, is_up * ffn, is_up * ffn + ffn)
        if model.tensors.gate_up_order == "neighbours":
            rows = partial(range, is_up, 2 * ffn, 2)
    if part.startswith("down"):
        shape = (width, ffn)
    shape = shape[:1] if part.endswith("_bias") else shape
    source = at.take(key, *shape, rows=rows)
    if model.moe is None:
        return source
    is_turned = model.tensors.experts_turned and len(shape) == 2
    is_stacked = "{expert}" not in getattr(model.tensors, key)
    shape = shape[::-1] if is_turned else shape
    return replace(
        source,
        shape=(model.moe.experts, *shape) if is_stacked else shape,
        expert=expert,
        is_stacked=is_stacked,
        is_turned=is_turned,
    )


def find_factors(at: Place) -> Source:
    """Weights of the norm of an FFN's activations [neurons], which bundles have."""
    return at.take("ffn_sub_norm", at.model.shape.ffn)


def find_cutoff_precision(model: Model) -> Literal["int8", "fp16"]:
    """How `list_cutoff_tensors` are stored: an error of a cutoff is one of all gates."""
    return "fp16" if find_packing(model.quantization.attention).is_plain else "int8"


def count_cutoff_rows(model: Model) -> int:
    """Parts of a cutoff: the mean, and the numbers whose length is the deviation."""
    return 1 + min(model.shape.ffn, model.shape.hidden)


def count_stored_cutoff_rows(model: Model) -> int:
    is_plain = find_packing(find_cutoff_precision(model)).is_plain
    return count_cutoff_rows(model) * (2 if is_plain else 1)


def list_cutoff_tensors(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``gate_cutoff``: gives the cutoff of the gates G u for a token, without any gate.

    The cutoff is mean + d deviation. The mean is g u, g the mean of the n rows of G. The variance
    of (G - g) u is |R u|^2 / n for a triangular factor R: R^T R = (G - g)^T (G - g). So the rows
    are g, and the rows of R times |d| / sqrt(n), in fp16; then their rounding errors, again in
    fp16."""
    if own.closed > 0.0:
        yield at.matrix(
            GATE_CUTOFF,
            count_stored_cutoff_rows(at.model),
            at.model.shape.stored_hidden,
            find_neurons(at, own, "gate", 0),
            precision=find_cutoff_precision(at.model),
            transform="cutoff",
        )


def list_down_biases(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``down_bias`` [1, hidden], in an MoE model [experts, hidden]."""
    if own.options.bias:
        experts = at.model.expert_count
        sources = [find_neurons(at, own, "down_bias", expert) for expert in range(experts)]
        transform: Literal["rows", "stack"] = "rows" if own.moe is None else "stack"
        length = at.model.shape.stored_hidden
        yield at.vector("down_bias", length, *sources, rows=experts, transform=transform)


def list_predictor_tensors(at: Place, rank: int) -> Iterator[DenseTensor]:
    """``predictor_in`` [rank, width], ``predictor_out`` [neurons, rank] and ``predictor_bias`` [1,
    neurons] in stored order; in an MoE model expert 0's, then expert 1's, ..."""
    model, precision = at.model, at.model.quantization.predictor
    rows, neurons = rank * model.expert_count, model.layer_neurons
    yield at.matrix("predictor_in", rows, model.stored_neuron_width, precision=precision)
    yield at.matrix("predictor_out", neurons, rank, precision=precision)
    yield at.vector("predictor_bias", neurons)


def list_router_tensors(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``router`` [experts, hidden], its biases and factors [1, experts], ``shared_router`` and
    norms [1, hidden]; all float32."""
    moe, shape = own.moe, at.model.shape
    if moe is None:
        return
    if own.has_router:
        scores = at.take("router", moe.experts, shape.hidden)
        yield at.vector("router", shape.stored_hidden, scores, rows=moe.experts)
        is_listed, active = at.layer in moe.listed_layers, moe.active_experts
        if is_listed:
            yield at.copy_vector("choice_table", active, shape.vocab)
        for key in ("router_bias", "choice_bias"):
            if getattr(moe, key) and not (is_listed and key == "choice_bias"):
                yield at.copy_vector(key, moe.experts)
        if moe.shared_gate:
            source = at.take("shared_router", 1, shape.hidden)
            yield at.vector("shared_router", shape.stored_hidden, source)
    if moe.router_input == "stream":
        yield at.norm("router_norm")
    if moe.expert_scale:
        yield at.copy_vector("expert_scale", moe.experts)


def list_side_tensors(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``side_in`` [2 width, hidden], gates and then ups, and ``side_down`` [hidden, width] of a
    dense FFN next to experts, its norms; ``experts_in`` [latent, hidden] and ``experts_out``
    [hidden, latent] around experts of another width.  Layers without experts have zeros."""
    model, moe, side = at.model, own.moe, at.model.side_ffn
    hidden, stored, width = model.shape.hidden, model.shape.stored_hidden, model.side_width
    if side is not None and side.norms:
        yield from map(at.norm, ("side_norm", "side_output_norm", "experts_output_norm"))
    if side is not None:
        rows, length = (1 + model.ffn.gated) * width, fill_groups(width)
        inner, down = list(_list_side(at, own)), fill(stored, length)
        if own.side:
            key = "side_down" if own.has_router else "dense_down"
            down = at.take(key, hidden, own.side)
        yield at.matrix("side_in", rows, stored, *(inner or [fill(rows, stored)]))
        yield at.matrix("side_down", stored, length, down)
    if moe is not None and moe.latent is not None:
        sizes = {"experts_in": (moe.latent, hidden), "experts_out": (hidden, moe.latent)}
        for key, size in sizes.items():
            rows, length = (
                (size[0], stored) if key == "experts_in" else (stored, fill_groups(size[1]))
            )
            source = at.take(key, *size) if own.has_router else fill(rows, length)
            yield at.matrix(key, rows, length, source)


def _list_side(at: Place, own: Ffn) -> Iterator[Source]:
    """Gates and ups of the FFN next to experts, and zeros up to what stores keep."""
    model, width, hidden = at.model, own.side, at.model.shape.hidden
    missing = model.side_width - width
    fused = None if own.has_router else model.tensors.fused_dense
    prefix = "side" if own.has_router else "dense"
    for number, part in enumerate(("gate", "up")):
        if not width or (part == "gate" and not model.ffn.gated):
            continue
        first = number * width if fused else 0
        rows = partial(range, first, first + width) if missing or fused else None
        key, count = ("fused_dense", 2 * width) if fused else (f"{prefix}_{part}", width)
        yield at.take(key, count, hidden, rows=rows, missing=missing)
