"""Records what the columns of a checkpoint's matrices count: mean squares of their inputs on texts.

The checkpoint's model computes in float32, layer by layer: memory holds one layer's attention and
some neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from pi2.arrays import F32, F64, I32, I64, U8, Bits
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.reference.executor import ReferenceExecutor
from pi2.backends.reference.operators import activate, enter_layers, weigh_activations
from pi2.backends.reference.states import ChunkState, begin_chunk
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.convert import pad_columns
from pi2.importing.dense_rows import find_dense_rows, find_ffn_rows, read_factors, read_state_vector
from pi2.importing.quantize import find_names, name_matrix
from pi2.importing.quantizers import Importance
from pi2.importing.rows import Rows
from pi2.measuring.texts import Window, cut_texts, cut_windows, read_texts
from pi2.model.blocks import Attention
from pi2.model.ffn import find_neurons
from pi2.model.tensor import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    LAYER_EMBEDDING,
    Place,
    fill_name,
)
from pi2.model.tensors import list_tensors
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer

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


def run_layers(
    executor: LayerExecutor, windows: Sequence[Window], progress: Callable[[float], None]
) -> list[F32]:
    """What the head reads of each window [tokens, hidden]."""
    states = [executor.start(np.array(window.tokens[:-1], np.int64)) for window in windows]
    layers = executor.layers
    for layer in range(layers):
        executor.forget()
        for state in states:
            executor.begin_layer(layer, state)
        for piece in executor.weights.list_neurons(layer):
            for state in states:
                executor.add_piece(piece, state)
        for state in states:
            executor.end_layer(layer, state)
        progress((layer + 1) / (layers + 1))
    executor.forget()
    return [executor.finish(state) for state in states]


@dataclass(slots=True, kw_only=True)
class State:
    """What a window has between two steps of the executor."""

    chunk: ChunkState
    kept: U8 | None = None
    """The KV cache, if later layers read the cache of an earlier layer."""
    chosen: Bits | None = None
    """The keys that the last index chose, for layers that share it."""


class LayerExecutor(ReferenceExecutor):
    """Computes layer by layer, with all neurons."""

    def __init__(self, weights: Weights, model: Model, context: int) -> None:
        self.weights = weights
        self.layers = model.shape.layers
        self._tensors = _LazyTensors(weights)
        super().__init__(
            BuildRequest(
                model=model,
                tensors=self._tensors,
                bundle=model.lay_out_bundle(),
                neurons=model.layer_neurons,
                chunk=context,
                context=context,
                gate_rows=None,
                threads=1,
                features=frozenset(),
                architecture="",
                allocate=lambda segment, size: np.zeros(size, np.uint8),
                progress=ignore_progress,
            )
        )

    def forget(self) -> None:
        self._tensors.clear()

    def start(self, tokens: I64) -> State:
        x = enter_layers(self._model, self.weights.read(EMBEDDING, tokens))
        if self._model.norm.embedding_weights:
            x = self._dense.normalize(x, EMBEDDING_NORM)
        _, added, streams = self._none
        if self._model.layer_embedding is not None:
            added = self._layer_inputs.make(self.weights.read(LAYER_EMBEDDING, tokens), x)
        if self._model.altup is not None:
            streams = self._altup.make(x)
        return State(chunk=begin_chunk(x, added, streams))

    def begin_layer(self, layer: int, state: State) -> None:
        self._now = state.chunk
        length = len(state.chunk.x)
        if state.kept is not None:
            self.put_context(0, 0, length, state.kept)
        self.expect(length)
        choices = self._mixing.attention.index.chosen
        choices.update({} if state.chosen is None else {0: state.chosen})
        self.attend(layer, 0)
        state.chosen = choices.get(0)
        if self._model.attention.kv_shared_layers > 0:
            state.kept = self.read_context(0, 0, length)
        self.begin_ffn(layer)

    def add_piece(self, piece: NeuronPiece, state: State) -> None:
        chunk = state.chunk
        values = [chunk.v @ rows.T for rows in piece.rows]
        if piece.biases:
            values = [value + bias for value, bias in zip(values, piece.biases, strict=True)]
        active = self.activate(piece, values, chunk)
        chunk.squares += np.square(active).sum(axis=1)
        chunk.y += active @ piece.down

    def activate(self, piece: NeuronPiece, values: Sequence[F32], chunk: ChunkState) -> F32:
        """Activations [T, n] of neurons; ``values`` are their gates and ups, or only their ups."""
        if piece.experts is not None:
            return weigh_activations(self._model, values, chunk.routes[:, piece.experts])
        up = values[1] if len(values) > 1 else None
        return activate(self._model, values[0], up, chunk.cutoffs)

    def end_layer(self, layer: int, state: State) -> None:
        self._now = state.chunk
        self.end_ffn(layer)

    def finish(self, state: State) -> F32:
        """What the head reads [tokens, hidden]."""
        chunk = state.chunk
        return self._dense.normalize(self.join_streams(chunk.x, chunk.streams), FINAL_NORM)


class _LazyTensors(Mapping[str, Tensor]):
    """Tensors in float32, read when they are first asked for."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._known: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            values = self._weights.read(name)
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


WINDOWS = 24
CONTEXT = 256
"""Tokens of a window: each takes two operations for every weight of the model."""


def record_importance(
    checkpoint: Checkpoint,
    model: Model,
    texts: Sequence[Path],
    progress: Progress = ignore_progress,
) -> Importance:
    """Compute at most `WINDOWS` windows of the ``texts``; `UserError` P660 for too little text,
    P605 without a tokenizer."""
    context = min(CONTEXT, model.shape.context)
    cut = partial(cut_windows, context=context, stride=context)
    try:
        tokenizer = open_tokenizer(checkpoint.read_tokenizer() or b"")
    except TokenizerRefused as error:
        raise UserError.of(
            "P605", f"cannot read the tokenizer of {checkpoint.folder}: {error}"
        ) from None
    windows = cut_texts(read_texts(texts), tokenizer, model, cut, WINDOWS)
    executor = _Recorder(CheckpointWeights(checkpoint, model), model, context)
    found = run_layers(executor, windows, lambda share: progress("calibrating", share))
    head = model.tensors.embedding if model.tied_head else model.tensors.head
    for read in found:
        executor.note(head, read)
    names = find_names(checkpoint)
    sums: dict[str, list[F32]] = {}
    for original, own in executor.sums.items():
        tensor = checkpoint.tensors.get(original)
        if tensor is not None:
            width = tensor.shape[-1]
            name = name_matrix(names, original, tensor)
            sums.setdefault(name, []).append(own[:width].astype(np.float32))
    return Importance(file=texts[0], sums={name: np.concatenate(own) for name, own in sums.items()})


class _Recorder(LayerExecutor):
    """Adds up squares of inputs, by the names of matrices in the checkpoint."""

    def __init__(self, weights: CheckpointWeights, model: Model, context: int) -> None:
        super().__init__(weights, model, context)
        self.sums: dict[str, F64] = {}
        self._layer = 0
        self._piece: NeuronPiece | None = None
        self._first = 0
        self._ends: dict[tuple[int, int], int] = {}

    def note(self, name: str, read: F32, first: int = 0) -> None:
        """Add what the columns from ``first`` on of a matrix have read [T, n]."""
        squares = np.square(read).sum(axis=0, dtype=np.float64)
        known = self.sums.setdefault(name, np.zeros(0))
        missing = first + len(squares) - len(known)
        if missing > 0:
            self.sums[name] = known = np.pad(known, (0, missing))
        known[first : first + len(squares)] += squares

    def begin_layer(self, layer: int, state: State) -> None:
        super().begin_layer(layer, state)
        self._layer = layer
        mixers, names = self._model.blocks[layer].mixers, self._model.tensors
        if len(mixers) != 1 or not isinstance(mixers[0], Attention):
            return
        read = dict.fromkeys(("query", "key", "value", "fused_qkv"), self._mixing.read)
        for key, own in (read | {"output": self._mixing.mixed}).items():
            pattern = getattr(names, key)
            if pattern is not None:
                self.note(fill_name(pattern, layer), own)

    def activate(self, piece: NeuronPiece, values: Sequence[F32], chunk: ChunkState) -> F32:
        active = super().activate(piece, values, chunk)
        expert, read, own = 0, chunk.v, active
        if piece.experts is not None:
            expert = int(piece.experts[0])
            chosen = chunk.routes[:, expert] != 0
            read = read[chosen]
            ones = np.ones((len(read), len(piece.experts)), np.float32)
            own = weigh_activations(self._model, [value[chosen] for value in values], ones)
        if piece is not self._piece:
            place = self._layer, expert
            self._piece, self._first = piece, self._ends.get(place, 0)
            self._ends[place] = self._first + len(piece.down)
        at, block = Place(self._model, self._layer), self._model.blocks[self._layer]
        for part in ("gate", "up") if len(values) > 1 else ("up",):
            source = find_neurons(at, block.ffn, part, expert)
            if source.key:
                self.note(source.name(self._model.tensors), read)
        source = find_neurons(at, block.ffn, "down", expert)
        if source.key and source.rows is None:
            self.note(source.name(self._model.tensors), own, self._first)
        return active
