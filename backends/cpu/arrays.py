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
    """The sum of the FFN's neurons [chunk, neuron width]."""
    normalized: F32
    """What the FFN reads [chunk, hidden], before it is rounded."""
    neuron_input: F32
    """What its neurons read [chunk, neuron width], before it is rounded."""
    layer_input: F32 | None
    """What attention reads, where the FFN or a router reads it too."""
    routes: F32
    """Weights of the experts [chunk, experts]."""
    layer_inputs: F32
    """What layers have of their own [layers, chunk, width]; of width 0 where they have nothing."""
    cutoffs: F32
    """Cutoffs of a layer's gates [chunk], where layers have them."""
    views: Views
    """All of them, and the activations ``hidden``, by the kernels' names; those of experts of
    another width are ``experts``."""

    @property
    def neuron_views(self) -> Views:
        """Views for functions that know what neurons read and give, whatever its width is."""
        of_experts = [name for name in self.views if name.startswith("experts_")]
        renamed = {
            f"hidden_{name.removeprefix('experts_')}": self.views[name] for name in of_experts
        }
        return self.views | renamed


def make_arrays(space: Workspace, spec: KernelSpec, chunk: int) -> Arrays:
    """Make the arrays of a chunk."""
    x, normalized = (space.make("float32", chunk, spec.hidden) for _ in range(2))
    total = space.make("float32", chunk, spec.neuron_width)
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
        isa=spec.isa,
        upper=spec.upper_steps,
    )
    neuron_input = normalized
    if spec.latent_experts:
        neuron_input = space.make("float32", chunk, spec.neuron_width)
        views |= space.make_activations(
            "experts",
            chunk,
            spec.neuron_width,
            spec.most_planes,
            neuron_input,
            isa=spec.isa,
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
        neuron_input=neuron_input,
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
    isa = spec.isa
    room = space.make_activations(
        "side_inner", chunk, length, spec.most_planes, isa=isa, upper=spec.upper_steps
    )
    if isa.unpacks:
        room |= space.make_tiles("side_inner", spec, length)
    sizes = {"side_terms": (1 + spec.gated) * spec.side_ffn}
    sizes |= {"side_output": spec.hidden} if spec.side_norms else {}
    for name, size in sizes.items():
        room[name] = space.wrap(space.make("float32", chunk, size))
    return room


def make_layer_room(space: Workspace, spec: KernelSpec, chunk: int) -> Views:
    """Return views of what embeddings of layers are computed with; none without them."""
    own = spec.layer_input
    if own is None:
        return {}
    isa, width = spec.isa, own.stored_width
    room = space.make_activations(
        "layer_inner", chunk, width, spec.most_planes, isa=isa, upper=spec.upper_steps
    )
    if isa.unpacks:
        room |= space.make_tiles("layer_inner", spec, width)
    room["layer_rows"] = space.wrap(space.make("float32", chunk, own.row))
    return room


def measure_arrays(request: BuildRequest) -> dict[str, int]:
    """Return what the symbols in shapes of kernels' parameters stand for."""
    chunk = count_tokens(request)
    return {
        "tokens": chunk,
        "token_heads": chunk * max(view.shape.heads for view, _ in request.model.list_views()),
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
