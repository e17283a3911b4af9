"""A mixture of experts: routers, what projects to experts, and a dense FFN beside them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pi2.formats.packing import fill_groups
from pi2.model.ffn import Ffn
from pi2.model.tensor import DenseTensor, Place, Source, fill


def list_router_tensors(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``router`` [experts, hidden], its biases and factors [1, experts], ``shared_router`` and
    norms [1, hidden]; all float32."""
    moe, shape = own.moe, at.model.shape
    if moe is None:
        return
    if own.has_router:
        scores = at.take("router", moe.experts, shape.hidden)
        yield at.vector("router", shape.stored_hidden, scores, rows=moe.experts)
        for key in ("router_bias", "choice_bias"):
            if getattr(moe, key):
                yield at.vector(key, moe.experts, at.take(key, moe.experts))
        if moe.shared_gate:
            source = at.take("shared_router", 1, shape.hidden)
            yield at.vector("shared_router", shape.stored_hidden, source)
    if moe.router_input == "stream":
        yield at.norm("router_norm")
    if moe.expert_scale:
        yield at.vector("expert_scale", moe.experts, at.take("expert_scale", moe.experts))


def list_side_tensors(at: Place, own: Ffn) -> Iterator[DenseTensor]:
    """``side_in`` [2 width, hidden], gates and then ups, and ``side_down`` [hidden, width] of a
    dense FFN beside experts, its norms; ``experts_in`` [latent, hidden] and ``experts_out``
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
    """Gates and ups of the FFN beside experts, and zeros up to what stores keep."""
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
