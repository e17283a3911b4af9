"""Layers with a state: weights, states of all sequences, room to work in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi2.arrays import F32
from pi2.backends.cpu.arrays import count_tokens
from pi2.backends.cpu.workspace import Views, Workspace
from pi2.backends.kernels.spec import KernelSpec
from pi2.backends.protocol import BuildRequest
from pi2.plan.weights.states import StateShape, list_state_tensors
from pi2.plan.weights.tensor_names import (
    name_layer_tensor,
    name_mixer_norm,
    name_state_tensor,
)


class States:
    """What the functions of these layers read and write beside the arrays of a chunk."""

    def __init__(self, request: BuildRequest, space: Workspace, spec: KernelSpec) -> None:
        assert spec.state is not None
        shape, model = spec.state, request.model
        kinds = [tensor.kind for tensor in list_state_tensors(model, shape)]
        self.weights: dict[tuple[int, int], Views] = {
            (layer, number): space.wrap_tensors(**_name_tensors(layer, number, kinds))
            for layer, number in model.states
        }
        """By layer and number of the mixer in it."""
        self._arrays: list[list[F32]] = []
        """States of each sequence, one after the other."""
        self.kept: list[dict[tuple[int, int], Views]] = []
        """Views of them by layer and number of the mixer, of each sequence."""
        for _ in range(request.sequences):
            made = {place: _make_state(space, shape) for place in model.states}
            self._arrays.append([array for state in made.values() for array in state.values()])
            self.kept.append(
                {
                    place: {name: space.wrap(array) for name, array in state.items()}
                    for place, state in made.items()
                }
            )
        tokens = count_tokens(request)
        self.room = space.make_activations(
            "state_mixed",
            tokens,
            shape.stored_width,
            spec.most_planes,
            isa=spec.isa,
            upper=spec.upper_steps,
        )
        if spec.isa.unpacks:
            self.room |= space.make_tiles("state_mixed", spec, shape.stored_width)
        lengths = {
            "state_projected": shape.entries,
            "state_factors": max(1, shape.factors),
            "state_ranks": shape.stored_rank,
            "state_decays_ranks": shape.stored_decay_rank,
            "state_output_gates_ranks": shape.stored_gate_rank,
        }
        for name, length in lengths.items():
            if length:
                self.room[name] = space.wrap(space.make("float32", tokens, length))

    def read(self, sequence: int) -> F32:
        """Return a copy of all states of a sequence."""
        return np.concatenate(self._arrays[sequence])

    def put(self, sequence: int, state: F32) -> None:
        """Set the states of a sequence to what `read` gave."""
        first = 0
        for array in self._arrays[sequence]:
            array[:] = state[first : first + len(array)]
            first += len(array)


def _name_tensors(layer: int, number: int, kinds: Sequence[str]) -> dict[str, str]:
    """Return the names of a mixer's tensors, by the kernels' names for them."""
    return {kind: name_state_tensor(layer, number, kind) for kind in kinds} | {
        "norm": name_layer_tensor(layer, name_mixer_norm(number)),
        "norm_bias": name_layer_tensor(layer, "attention_norm_bias"),
        "output_norm": name_layer_tensor(layer, "attention_output_norm"),
    }


def _make_state(space: Workspace, shape: StateShape) -> dict[str, F32]:
    """Return the arrays of a state; an element stands for one that is empty."""
    sizes = {"state_tail": shape.kept, "state_memory": shape.memory}
    return {
        name: space.make("float32", max(1, size), segment="state" if size else "workspace")
        for name, size in sizes.items()
    }
