"""Layers with a state: weights, states of all sequences, room to work in."""

from __future__ import annotations

from pi2.backends.cpu.arrays import count_tokens
from pi2.backends.cpu.workspace import Views, Workspace
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.states import StateShape, list_state_tensors
from pi2.plan.weights.tensor_names import name_layer_tensor


class States:
    """What the functions of these layers read and write beside the arrays of a chunk."""

    def __init__(self, request: BuildRequest, space: Workspace, spec: KernelSpec) -> None:
        assert spec.state is not None
        shape, model = spec.state, request.model
        kinds = [tensor.kind for tensor in list_state_tensors(model, shape)]
        names = {kind: kind for kind in kinds} | {
            "norm": "attention_norm",
            "norm_bias": "attention_norm_bias",
            "output_norm": "attention_output_norm",
        }
        self.weights: dict[int, Views] = {
            layer: space.wrap_tensors(
                **{key: name_layer_tensor(layer, kind) for key, kind in names.items()}
            )
            for layer in model.state_layers
        }
        self.kept: list[dict[int, Views]] = [
            {layer: _make_state(space, shape) for layer in model.state_layers}
            for _ in range(request.sequences)
        ]
        """States of each sequence by layer."""
        tokens = count_tokens(request)
        self.room = space.make_activations(
            "state_mixed", tokens, shape.stored_width, spec.most_planes, pairs=spec.isa.pairs
        )
        if spec.isa.pairs:
            self.room |= space.make_tiles("state_mixed", spec.threads, shape.stored_width)
        self.room["state_projected"] = space.wrap(space.make("float32", tokens, shape.rows))
        factors = space.make("float32", tokens, max(1, 2 * shape.value_heads))
        self.room["state_factors"] = space.wrap(factors)


def _make_state(space: Workspace, shape: StateShape) -> Views:
    """Return views of a layer's state."""
    sizes = {"state_tail": shape.kept, "state_memory": shape.memory}
    return {
        name: space.wrap(space.make("float32", size, segment="state"))
        if size
        else space.wrap(space.make("float32", 1))
        for name, size in sizes.items()
    }
