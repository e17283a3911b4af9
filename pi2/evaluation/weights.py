"""Weights in float32, piece by piece: those of a checkpoint, and those of a neuron store.

Both give the same tensors under the same names (`pi2.plan.weights.tensor_names`), so that
one computation (`pi2.evaluation.layerwise`) compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pi2.arrays import F32, I32, I64
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.convert import pad_columns
from pi2.importing.dense_rows import find_dense_rows
from pi2.importing.ffn_rows import find_ffn_rows, read_factors
from pi2.importing.rows import Rows
from pi2.importing.state_rows import find_state_rows, read_state_vector
from pi2.plan.documents.model import Model
from pi2.plan.weights.bundles import slice_bias, slice_experts, slice_factors, unpack_part
from pi2.plan.weights.rounding import dequantize
from pi2.plan.weights.tensor_names import is_state_kind
from pi2.store.reader import NeuronStore
from pi2.store.tensors import list_tensors

PIECE_NEURONS = 4096
"""Neurons whose weights are widened together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronPiece:
    """Some neurons of a layer; all arrays float32."""

    rows: tuple[F32, ...]
    """Gate (where there is one) and up: what the input meets, [n, hidden] each."""
    down: F32
    """What an activation adds, [n, hidden]."""
    biases: tuple[F32, ...]
    """Biases of ``rows`` [n] each; empty where the model has none."""
    experts: I32 | None
    """Expert of every neuron [n], in a mixture."""


class Weights(Protocol):
    """Source of weights."""

    def read(self, name: str, rows: slice | I64 | None = None) -> F32:
        """Rows [n, length] of a dense tensor, by default all."""

    def list_neurons(self, layer: int) -> Iterator[NeuronPiece]:
        """All neurons of a layer."""


class StoreWeights:
    """What is left of the weights in a neuron store."""

    def __init__(self, store: NeuronStore) -> None:
        self._store = store

    def read(self, name: str, rows: slice | I64 | None = None) -> F32:
        tensor = self._store.tensors[name]
        wanted = slice(None) if rows is None else rows
        weights = tensor.weights[wanted]
        if tensor.precision is None:
            return np.asarray(weights, np.float32)
        scales = None if tensor.scales is None else tensor.scales[wanted]
        return dequantize(weights.view(np.uint8), scales, tensor.length, tensor.precision)

    def list_neurons(self, layer: int) -> Iterator[NeuronPiece]:
        layout, stored = self._store.bundle.inline, self._store.layers[layer]
        for start in range(0, stored.neurons, PIECE_NEURONS):
            bundles = stored.read_inline(slice(start, start + PIECE_NEURONS))
            inputs = range(len(layout.parts) - 1)
            down = unpack_part(bundles, layout, len(layout.parts) - 1)
            if layout.factor_offset is not None:
                down = down * slice_factors(bundles, layout)[:, None]
            yield NeuronPiece(
                rows=tuple(unpack_part(bundles, layout, index) for index in inputs),
                down=down,
                biases=tuple(slice_bias(bundles, layout, index) for index in inputs)
                if layout.biases
                else (),
                experts=None if layout.expert_offset is None else slice_experts(bundles, layout),
            )


class CheckpointWeights:
    """The weights of a checkpoint that was checked, as they are; zeros fill up vectors as in a
    store."""

    def __init__(self, checkpoint: Checkpoint, model: Model) -> None:
        self._checkpoint = checkpoint
        self._model = model
        self._stored = {tensor.name: tensor for tensor in list_tensors(model, None)}

    def read(self, name: str, rows: slice | I64 | None = None) -> F32:
        stored = self._stored[name]
        values = pad_columns(self._read(name, rows), stored.length)
        missing = 0 if rows is not None else stored.rows - len(values)
        return np.pad(values, ((0, missing), (0, 0))) if missing else values

    def _read(self, name: str, rows: slice | I64 | None) -> F32:
        parts = name.split(".")
        kind, layer = (parts[2], int(parts[1])) if len(parts) == 3 else (name, 0)
        tensors, model = self._checkpoint.tensors, self._model
        if is_state_kind(kind) and self._stored[name].precision == "fp32":
            return read_state_vector(tensors, model, kind, layer)[0]
        find = find_state_rows if is_state_kind(kind) else find_dense_rows
        sources = find(tensors, model, kind, layer)
        if len(sources[0].tensor.shape) == 1:
            offset = self._model.norm.weight_offset if name.endswith("_norm") else 0.0
            return np.concatenate([source.read() for source in sources])[None] + np.float32(offset)
        if rows is None:
            return np.concatenate([source.read() for source in sources])
        assert len(sources) == 1
        if isinstance(rows, slice):
            return sources[0].read(rows.start, rows.stop)
        return np.concatenate([sources[0].read(row, row + 1) for row in rows.tolist()])

    def list_neurons(self, layer: int) -> Iterator[NeuronPiece]:
        layout = self._model.lay_out_bundle()
        names = [str(part.name) for part in layout.parts]
        for expert in range(self._model.expert_count):
            sources = [self._find(name, layer, expert) for name in names]
            biases = [
                self._find(f"{bias.name}_bias", layer, expert).read() for bias in layout.biases
            ]
            down = sources[-1].read_turned()
            factors = None
            if layout.factor_offset is not None:
                factors = read_factors(self._checkpoint.tensors, self._model, layer)
            for start in range(0, sources[0].count, PIECE_NEURONS):
                stop = min(start + PIECE_NEURONS, sources[0].count)
                owners = np.full(stop - start, expert, np.int32)
                columns = sources[-1].tensor.widen(down[start:stop])
                if factors is not None:
                    columns = columns * factors[start:stop, None]
                yield NeuronPiece(
                    rows=tuple(
                        pad_columns(source.read(start, stop), layout.hidden)
                        for source in sources[:-1]
                    ),
                    down=pad_columns(columns, layout.hidden),
                    biases=tuple(bias[start:stop] for bias in biases),
                    experts=None if self._model.moe is None else owners,
                )

    def _find(self, key: str, layer: int, expert: int) -> Rows:
        return find_ffn_rows(self._checkpoint.tensors, self._model, key, layer, expert)
