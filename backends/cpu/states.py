"""Layers with a state: weights, states of all sequences, room to work in."""

from __future__ import annotations

import numpy as np

from pi2.arrays import F32
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
        self._arrays: list[list[F32]] = []
        """States of each sequence, by layer one after the other."""
        self.kept: list[dict[int, Views]] = []
        """Views of them by layer, of each sequence."""
        for _ in range(request.sequences):
            made = {layer: _make_state(space, shape) for layer in model.state_layers}
            self._arrays.append([array for state in made.values() for array in state.values()])
            self.kept.append(
                {
                    layer: {name: space.wrap(array) for name, array in state.items()}
                    for layer, state in made.items()
                }
            )
        tokens = count_tokens(request)
        self.room = space.make_activations(
            "state_mixed",
            tokens,
            shape.stored_width,
            spec.most_planes,
            pairs=spec.isa.pairs,
            upper=spec.upper_steps,
        )
        if spec.isa.pairs:
            self.room |= space.make_tiles("state_mixed", spec.threads, shape.stored_width)
        self.room["state_projected"] = space.wrap(space.make("float32", tokens, shape.rows))
        factors = space.make("float32", tokens, max(1, 2 * shape.value_heads))
        self.room["state_factors"] = space.wrap(factors)

    def read(self, sequence: int) -> F32:
        """Return a copy of all states of a sequence."""
        return np.concatenate(self._arrays[sequence])

    def put(self, sequence: int, state: F32) -> None:
        """Set the states of a sequence to what `read` gave."""
        first = 0
        for array in self._arrays[sequence]:
            array[:] = state[first : first + len(array)]
            first += len(array)


def _make_state(space: Workspace, shape: StateShape) -> dict[str, F32]:
    """Return the arrays of a layer's state; an element stands for one that is empty."""
    sizes = {"state_tail": shape.kept, "state_memory": shape.memory}
    return {
        name: space.make("float32", max(1, size), segment="state" if size else "workspace")
        for name, size in sizes.items()
    }
