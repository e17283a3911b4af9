"""A model's layers one after the other, in float32: memory holds one layer's attention and some
neurons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pi2.arrays import F32, I32, I64, U8
from pi2.backends.blocks.contract import CONTEXT_BLOCK
from pi2.backends.blocks.instructions import Weight
from pi2.backends.blocks.layers import count_program
from pi2.backends.blocks.operands import Extent
from pi2.backends.cpu.weights import StoreWeights, describe_stored
from pi2.backends.protocol import BuildRequest
from pi2.backends.reference.executor import NeuronSums, ReferenceExecutor
from pi2.backends.reference.neurons import activate, weigh_activations
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.convert import pad_columns
from pi2.importing.rows import find_dense_rows, find_ffn_rows, read_factors, read_state_vector
from pi2.importing.safetensors_file import SourceTensor
from pi2.measuring.texts import Window
from pi2.model.tensor import EMBEDDING, LAYER_EMBEDDING
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.sizes import LOGIT_ROWS
from pi2.plan.documents.model import Model
from pi2.plan.weights.layout import Tensor
from pi2.progress import ignore_progress

PIECE_NEURONS = 4096
"""Neurons whose weights are widened together."""
LOOKED_UP = (EMBEDDING, LAYER_EMBEDDING)
"""Tensors of which tokens' rows are read."""


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
    """Expert of every neuron [n], in an MoE model."""


class Weights(Protocol):
    def read(self, name: str, rows: slice | I64 | None = None) -> F32:
        """Rows [n, length] of a dense tensor, by default all."""

    def list_neurons(self, layer: int) -> Iterator[NeuronPiece]:
        """All neurons of a layer."""


class CheckpointWeights:
    """Weights of a checked checkpoint, padded with zeros as in a store."""

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
        tensors, stored = self._checkpoint.tensors, self._stored[name]
        if stored.transform == "state":
            return read_state_vector(tensors, self._model, stored)[0]
        sources = find_dense_rows(tensors, self._model, stored)
        if len(sources[0].shape) == 1:
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
            for start in range(0, sources[0].shape[0], PIECE_NEURONS):
                stop = min(start + PIECE_NEURONS, sources[0].shape[0])
                owners = np.full(stop - start, expert, np.int32)
                columns = sources[-1].widen(down[start:stop])
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

    def _find(self, key: str, layer: int, expert: int) -> SourceTensor:
        return find_ffn_rows(self._checkpoint.tensors, self._model, key, layer, expert)


def run_layers(
    executor: LayerExecutor, windows: Sequence[Window], progress: Callable[[float], None]
) -> list[F32]:
    """What the head reads of each window [tokens, hidden]."""
    found: list[F32] = []
    for first in range(0, len(windows), executor.most):
        own = windows[first : first + executor.most]
        executor.begin([np.array(window.tokens[:-1], np.int32) for window in own])
        for layer in range(executor.layers):
            executor.fill(layer)
            for number in range(len(own)):
                executor.begin_layer(layer, number)
            for piece in executor.weights.list_neurons(layer):
                for number in range(len(own)):
                    executor.add_piece(piece, number)
            for number in range(len(own)):
                executor.end_layer(layer, number)
            done = first + len(own) * (layer + 1) / (executor.layers + 1)
            progress(done / len(windows))
        executor.forget()
        found += [executor.finish(number) for number in range(len(own))]
    return found


class _LayerTensors(StoreWeights):
    """Finds tensors as programs do: matrices without their bytes, which `read` gives."""

    def __init__(self, model: Model, read: Callable[[str], F32]) -> None:
        """``read`` gives a tensor of a store in float32 [rows, length]."""
        stored = describe_stored(model)
        super().__init__(stored, {})
        self._read, self._has_bytes = read, False
        self._sizes = {own.name: (own.rows, own.length) for own in list_tensors(model)}
        find = StoreWeights(stored, {own.name: own for own in model.dense_tensors})
        extent = Extent(chunk=1, step_tokens=1, context=1, threads=1, outside=True)
        known = {own.key for own in count_program(stored, find, extent).matrices}
        # Of AltUp's matrices programs copy rows.
        self._matrices = known - {"stream_in", "stream_out"}

    def __call__(self, key: str, layer: int, mixer: int = 0, /) -> Weight | None:
        self._has_bytes = key not in self._matrices
        found = super().__call__(key, layer, mixer)
        if found is None or self._has_bytes:
            return found
        return dataclasses.replace(found, data=None, name=f"{key} {layer} {mixer}")

    def read(self, name: str) -> U8:
        """Bytes of a matrix, by the name that it was found with."""
        key, layer, mixer = name.split()
        self._has_bytes = True
        found = super().__call__(key, int(layer), int(mixer))
        assert found is not None and found.data is not None, name
        return found.data

    def forget(self) -> None:
        self._whole.clear()

    def _take(self, name: str) -> Weight | None:
        if name not in self._sizes:
            return None
        rows, length = self._sizes[name]
        own = Weight(format="f32", rows=rows, length=length, data=np.zeros(0, np.uint8), name=name)
        if not self._has_bytes:
            return own
        if name not in self._whole:
            values = np.ascontiguousarray(self._read(name), np.float32)
            self._whole[name] = dataclasses.replace(own, data=values.view(np.uint8).reshape(-1))
        return self._whole[name]


class LayerExecutor:
    """Computes windows layer by layer, with all neurons."""

    def __init__(self, weights: Weights, model: Model, context: int, windows: int) -> None:
        self.weights, self.layers, self._model = weights, model.shape.layers, model
        mixers = (block.attention for block in model.blocks if block.attention is not None)
        # A list of keys that layers share is of one window.
        self.most = 1 if any(own.chooses == "shared" for own in mixers) else windows
        self._tensors = _LazyTensors(lambda name: self.weights.read(name))
        self._find = _LayerTensors(model, lambda name: self.weights.read(name))
        request = BuildRequest(
            model=model,
            tensors=self._tensors,
            bundle=model.lay_out_bundle(),
            neurons=model.layer_neurons,
            chunk=context,
            chunks=self.most,
            context=context,
            kv_type="fp32",
            gate_rows=None,
            threads=1,
            features=frozenset(),
            architecture="",
            allocate=lambda segment, size: np.zeros(size, np.uint8),
            progress=ignore_progress,
        )
        self._executor = ReferenceExecutor(request, find=self._find)
        self._executor.look_up = self._look_up
        self._filled: list[U8] = []
        """Matrices of a layer."""
        self._whole: list[U8] = []
        self._fill(None, self._whole)
        self._kept: dict[int, U8] = {}
        """By window, the KV cache, if later layers read the cache of an earlier layer."""

    def _fill(self, layer: int | None, kept: list[U8]) -> None:
        """Read the matrices of a layer, or of the model but for its head and embeddings."""
        program = self._executor.program
        for number, matrix in enumerate(program.matrices):
            is_outside = matrix.key in LOOKED_UP or matrix.instructions[0] >= program.end - 1
            if matrix.layer == layer and matrix.weight.data is None and not is_outside:
                kept.append(self._find.read(matrix.weight.name))
                program.set_tensor(number, kept[-1].ctypes.data)

    def _look_up(self, tokens: I32) -> None:
        """Read the rows of embeddings that ``tokens`` have."""
        program = self._executor.program
        for number, matrix in enumerate(program.matrices):
            if matrix.key in LOOKED_UP:
                rows = self.weights.read(matrix.key, tokens.astype(np.int64))
                program.put_rows(number, np.ascontiguousarray(rows, np.float32).view(np.uint8))

    def fill(self, layer: int) -> None:
        self.forget()
        self._fill(layer, self._filled)

    def forget(self) -> None:
        self._filled.clear()
        self._find.forget()
        self._tensors.clear()

    def begin(self, windows: Sequence[I32]) -> None:
        """Begin windows of tokens, `most` at a time."""
        self._kept.clear()
        for number, tokens in enumerate(windows):
            self._executor.select_chunk(number)
            self._executor.embed(tokens)

    def begin_layer(self, layer: int, number: int) -> None:
        executor = self._executor
        executor.select_chunk(number)
        length = -(-self._executor.tokens // CONTEXT_BLOCK) * CONTEXT_BLOCK
        if number in self._kept:
            executor.program.put_context(0, 0, length, self._kept[number])
        executor.program.expect(self._executor.tokens)
        self._attend(layer)
        if self._model.attention.kv_shared_layers > 0:
            self._kept[number] = executor.program.read_context(0, 0, length)
        executor.begin_ffn(layer)

    def _attend(self, layer: int) -> None:
        self._executor.attend(layer, 0)

    def add_piece(self, piece: NeuronPiece, number: int) -> None:
        self._executor.select_chunk(number)
        now = self._executor.now
        values = [now.read @ rows.T for rows in piece.rows]
        if piece.biases:
            values = [value + bias for value, bias in zip(values, piece.biases, strict=True)]
        active = self.activate(piece, values, now)
        now.squares += np.square(active).sum(axis=1)
        now.total += active @ piece.down

    def activate(self, piece: NeuronPiece, values: Sequence[F32], now: NeuronSums) -> F32:
        """Activations [T, n] of neurons; ``values`` are their gates and ups, or only their ups."""
        if piece.experts is not None:
            return weigh_activations(self._model, values, now.routes[:, piece.experts])
        up = values[1] if len(values) > 1 else None
        return activate(self._model, values[0], up, now.cutoffs)

    def end_layer(self, layer: int, number: int) -> None:
        self._executor.select_chunk(number)
        self._executor.end_ffn(layer)
        # What follows neurons needs matrices of the layer.
        self._executor.catch_up()

    def finish(self, number: int) -> F32:
        """What the head reads [tokens, hidden]."""
        self._executor.select_chunk(number)
        firsts = range(0, self._executor.tokens, LOGIT_ROWS)
        return np.concatenate([self._executor.read_head_input(first).copy() for first in firsts])


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors in float32, read when they are first asked for."""

    def __init__(self, read: Callable[[str], F32]) -> None:
        self._read = read
        self._known: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            values = self._read(name)
            rows, length = values.shape
            self._known[name] = Tensor(
                name=name, rows=rows, length=length, precision=None, weights=values
            )
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        self._known.clear()
