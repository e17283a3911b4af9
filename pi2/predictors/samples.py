"""What a predictor learns from: inputs of the FFN, and which neurons fired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi2.engine.loaded_model import LoadedModel
from pi2.statistics.texts import Window

F32 = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LayerSamples:
    """Tokens of one layer, on the disk."""

    inputs: npt.NDArray[np.float16]
    """[tokens, hidden], mapped."""
    packed: npt.NDArray[np.uint8]
    """[tokens, neurons / 8], mapped: a bit per neuron, in stored order."""
    neurons: int

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, tokens: slice | npt.NDArray[np.int64]) -> tuple[F32, Bools]:
        """Inputs float32 [n, hidden], and which neurons fired [n, neurons]."""
        bits = np.unpackbits(self.packed[tokens], axis=1, count=self.neurons)
        return self.inputs[tokens].astype(np.float32), bits.view(np.bool_)


class SampleRecorder:
    """An observer of FFNs (`pi2.engine.observation`) that keeps everything in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: list[LayerSamples] = []
        self._filled: list[int] = []

    def make_room(self, layers: int, tokens: int, hidden: int, neurons: int) -> None:
        """Make the files for ``tokens`` tokens."""
        width = -(-neurons // 8)
        for layer in range(layers):
            inputs = np.memmap(
                self._folder / f"inputs-{layer:03d}", np.float16, "w+", shape=(tokens, hidden)
            )
            packed = np.memmap(
                self._folder / f"active-{layer:03d}", np.uint8, "w+", shape=(tokens, width)
            )
            self._layers.append(LayerSamples(inputs, packed, neurons))
            self._filled.append(0)

    def __call__(self, layer: int, inputs: F32, activations: F32) -> None:
        rows = slice(self._filled[layer], self._filled[layer] + len(inputs))
        self._layers[layer].inputs[rows] = inputs
        self._layers[layer].packed[rows] = np.packbits(activations != 0, axis=1)
        self._filled[layer] = rows.stop

    def record(
        self,
        model: LoadedModel,
        windows: Sequence[Window],
        progress: Callable[[float], None] = lambda share: None,
    ) -> list[LayerSamples]:
        """Run ``windows`` through ``model``, whose executor this observes."""
        shape = model.plan.model.shape
        tokens = sum(len(window.tokens) for window in windows)
        self.make_room(shape.layers, tokens, shape.hidden, model.plan.model.layer_neurons)
        for number, window in enumerate(windows):
            for _ in model.iterate_logits(window.tokens):
                pass
            progress((number + 1) / len(windows))
        assert all(filled == tokens for filled in self._filled)
        return self._layers
