"""What a predictor learns from: inputs of the FFN, and which neurons fired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi2.arrays import F16, F32, I64, U8, Bits
from pi2.engine.loaded_model import LoadedModel
from pi2.engine.observation import Routing
from pi2.plan.documents.model import Model
from pi2.statistics.texts import Window


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """Tokens of one layer, or of one of its experts, on the disk."""

    inputs: F16
    """[tokens, hidden], mapped."""
    packed: U8
    """[tokens, neurons / 8], mapped: a bit per neuron, in stored order."""
    neurons: int

    def __len__(self) -> int:
        return len(self.inputs)

    def cut(self, tokens: int) -> LayerSamples:
        """The first ``tokens`` of them."""
        return LayerSamples(self.inputs[:tokens], self.packed[:tokens], self.neurons)

    def read(self, tokens: slice | I64) -> tuple[F32, Bits]:
        """Inputs float32 [n, hidden], and which neurons fired [n, neurons]."""
        bits = np.unpackbits(self.packed[tokens], axis=1, count=self.neurons)
        return self.inputs[tokens].astype(np.float32), bits.view(np.bool_)


class SampleRecorder:
    """An observer of FFNs (`pi2.engine.observation`) that keeps everything in ``folder``.

    In a mixture every expert has samples of its own, of the tokens that it computes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: list[list[LayerSamples]] = []
        self._filled: list[list[int]] = []

    def make_room(self, model: Model, tokens: int) -> None:
        """Make the files for ``tokens`` tokens; what is never filled takes no disk."""
        hidden, neurons = model.stored_neuron_width, model.shape.ffn
        width = -(-neurons // 8)
        for layer in range(model.shape.layers):
            experts = []
            for expert in range(model.expert_count):
                place = self._folder / f"{layer:03d}-{expert:03d}"
                inputs = np.memmap(
                    place.with_suffix(".inputs"), np.float16, "w+", shape=(tokens, hidden)
                )
                packed = np.memmap(
                    place.with_suffix(".active"), np.uint8, "w+", shape=(tokens, width)
                )
                experts.append(LayerSamples(inputs, packed, neurons))
            self._layers.append(experts)
            self._filled.append([0] * model.expert_count)

    def __call__(
        self, layer: int, inputs: F32, activations: F32, routing: Routing | None = None
    ) -> None:
        active = activations != 0
        for expert in range(len(self._layers[layer])):
            if routing is None:
                self._keep(layer, expert, inputs, active)
                continue
            computes = routing.computes[:, expert]
            mine = active[computes][:, routing.owners == expert]
            self._keep(layer, expert, inputs[computes], mine)

    def _keep(self, layer: int, expert: int, inputs: F32, active: Bits) -> None:
        filled = self._filled[layer]
        rows = slice(filled[expert], filled[expert] + len(inputs))
        samples = self._layers[layer][expert]
        samples.inputs[rows] = inputs
        samples.packed[rows] = np.packbits(active, axis=1)
        filled[expert] = rows.stop

    def record(
        self,
        model: LoadedModel,
        windows: Sequence[Window],
        progress: Callable[[float], None] = lambda share: None,
    ) -> list[list[LayerSamples]]:
        """Run ``windows`` through ``model``, whose executor this observes; returns the samples of
        the experts (one without experts) of every layer."""
        tokens = sum(len(window.tokens) for window in windows)
        self.make_room(model.plan.model, tokens)
        for number, window in enumerate(windows):
            for _ in model.iterate_logits(window.tokens):
                pass
            progress((number + 1) / len(windows))
        return [
            [samples.cut(filled) for samples, filled in zip(experts, counts, strict=True)]
            for experts, counts in zip(self._layers, self._filled, strict=True)
        ]
