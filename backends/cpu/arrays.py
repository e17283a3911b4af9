"""The arrays that most kernels of the executor take: the residual stream and what is made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32
from pi2.backends.cpu.workspace import Views, Workspace
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.weights.layout import fill_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """What every chunk of a prompt has for itself."""

    x: F32
    """The residual stream [chunk, hidden]."""
    total: F32
    """The FFN's sum [chunk, hidden]."""
    normalized: F32
    """What the FFN reads [chunk, hidden], before it is rounded."""
    layer_input: F32 | None
    """What attention reads, where the FFN or a router reads it too."""
    routes: F32
    """Weights of the experts [chunk, experts]."""
    layer_inputs: F32
    """What layers have of their own [layers, chunk, width]; of width 0 where they have nothing."""
    cutoffs: F32
    """Cutoffs of a layer's gates [chunk], where layers have them."""
    views: Views
    """All of them, and the activations ``hidden``, by the kernels' names."""


def make_arrays(space: Workspace, spec: KernelSpec, chunk: int) -> Arrays:
    """Make the arrays of a chunk."""
    x, total, normalized = (space.make("float32", chunk, spec.hidden) for _ in range(3))
    layer_input = space.make("float32", chunk, spec.hidden) if spec.keeps_input else None
    routes = space.make("float32", chunk, max(1, spec.experts))
    views = {"x": space.wrap(x), "y": space.wrap(total), "routes": space.wrap(routes)}
    if spec.sub_norm:
        views["squares"] = space.wrap(space.make("float32", chunk))
    views |= space.make_activations(
        "hidden",
        chunk,
        spec.hidden,
        spec.most_planes,
        normalized,
        pairs=spec.isa.pairs,
        upper=spec.upper_steps,
    )
    if layer_input is not None:
        views["before"] = space.wrap(layer_input)
    if spec.altup is not None:
        views["streams"] = space.wrap(space.make("float32", chunk, spec.altup.others, spec.hidden))
    cutoffs = np.zeros(0, np.float32)
    if spec.cutoff_rows:
        cutoffs = space.make("float32", chunk)
        views["cutoffs"] = space.wrap(cutoffs)
    own = spec.layer_input
    layer_inputs = np.zeros((0, chunk, 0), np.float32)
    if own is not None:
        layer_inputs = space.make("float32", own.layers, chunk, own.stored_width)
        views["layer_inputs"] = space.wrap(layer_inputs)
    return Arrays(
        x=x,
        total=total,
        normalized=normalized,
        layer_input=layer_input,
        routes=routes,
        layer_inputs=layer_inputs,
        cutoffs=cutoffs,
        views=views,
    )


def make_side_room(space: Workspace, spec: KernelSpec, chunk: int) -> Views:
    """Return views of what an FFN beside experts works with; none without it."""
    if not spec.side_ffn:
        return {}
    length = fill_groups(spec.side_ffn)
    pairs = spec.isa.pairs
    room = space.make_activations(
        "side_inner", chunk, length, spec.most_planes, pairs=pairs, upper=spec.upper_steps
    )
    if pairs:
        room |= space.make_tiles("side_inner", spec.threads, length)
    for name, size in (("side_terms", 2 * spec.side_ffn), ("side_output", spec.hidden)):
        room[name] = space.wrap(space.make("float32", chunk, size))
    return room


def make_layer_room(space: Workspace, spec: KernelSpec, chunk: int) -> Views:
    """Return views of what embeddings of layers are computed with; none without them."""
    own = spec.layer_input
    if own is None:
        return {}
    pairs, width = spec.isa.pairs, own.stored_width
    room = space.make_activations(
        "layer_inner", chunk, width, spec.most_planes, pairs=pairs, upper=spec.upper_steps
    )
    if pairs:
        room |= space.make_tiles("layer_inner", spec.threads, width)
    room["layer_rows"] = space.wrap(space.make("float32", chunk, own.row))
    return room


def measure_arrays(request: BuildRequest) -> dict[str, int]:
    """Return what the symbols in shapes of kernels' parameters stand for."""
    chunk = count_tokens(request)
    return {
        "tokens": chunk,
        "token_heads": chunk * request.model.shape.heads,
        "logits": min(chunk, LOGIT_ROWS),
        "context": request.context,
        "sequences": request.step_tokens,
        "neurons": request.neurons,
        "expert": request.model.shape.ffn,
        "threads": request.threads,
    }


def count_tokens(request: BuildRequest) -> int:
    """Return the tokens that a chunk has room for: a step is one."""
    return max(request.chunk, request.step_tokens)
