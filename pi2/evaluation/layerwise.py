"""Scores text by weights that need not fit into memory, in float32: layer by layer, all windows.

It is the reference backend with its weights read where they are needed, once for all windows:
memory is a layer's attention, some neurons and a block of the head, each in float32, whatever the
model's size.  Work is two operations for every weight and token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pi2.arrays import F32, I64, U8
from pi2.backends.protocol import BuildRequest, Tensor
from pi2.backends.reference.chunk_state import ChunkState, begin_chunk
from pi2.backends.reference.executor import ReferenceExecutor
from pi2.backends.reference.neurons import weigh_activations
from pi2.backends.reference.operators import activate, cap, enter_layers
from pi2.evaluation.scores import Scores
from pi2.evaluation.weights import NeuronPiece, Weights
from pi2.plan.documents.model import Model
from pi2.plan.weights.tensor_names import EMBEDDING, FINAL_NORM, HEAD, HEAD_BIAS, LAYER_EMBEDDING
from pi2.progress import ignore_progress
from pi2.statistics.texts import Window

_BLOCK = 8192
"""Rows of the head that are widened together."""


def score_layerwise(
    weights: Weights,
    model: Model,
    windows: Sequence[Window],
    progress: Callable[[float], None] = lambda share: None,
) -> Scores:
    """Score ``windows``; neurons are computed densely."""
    context = max(len(window.tokens) for window in windows)
    executor = _LayerExecutor(weights, model, context)
    states = [executor.start(np.array(window.tokens[:-1], np.int64)) for window in windows]
    layers = model.shape.layers
    for layer in range(layers):
        executor.forget()
        for state in states:
            executor.begin_layer(layer, state)
        for piece in weights.list_neurons(layer):
            for state in states:
                executor.add_piece(piece, state)
        for state in states:
            executor.end_layer(layer, state)
        progress((layer + 1) / (layers + 1))
    executor.forget()
    inputs = np.concatenate(
        [
            executor.finish(state)[window.first_scored - 1 :]
            for state, window in zip(states, windows, strict=True)
        ]
    )
    targets = np.concatenate(
        [np.array(window.tokens[window.first_scored :], np.int64) for window in windows]
    )
    scores = _score_head(weights, model, inputs, targets)
    progress(1.0)
    return scores


def _score_head(weights: Weights, model: Model, inputs: F32, targets: I64) -> Scores:
    """Losses of ``targets`` [n] after normalised ``inputs`` [n, hidden], by blocks of the head."""
    name, vocab = (EMBEDDING if model.tied_head else HEAD), model.shape.vocab
    count, bias = len(inputs), weights.read(HEAD_BIAS)[0] if model.head_bias else None
    best = np.full(count, -np.inf)
    choices = np.zeros(count, np.int64)
    sums, wanted = np.zeros(count), np.zeros(count)
    for start in range(0, vocab, _BLOCK):
        head = weights.read(name, slice(start, min(start + _BLOCK, vocab)))
        scores = inputs @ head.T + (0.0 if bias is None else bias[start : start + len(head)])
        logits = cap(scores * np.float32(model.multipliers.logits), model.logit_softcap).astype(
            np.float64
        )
        top = logits.argmax(axis=1)
        value = logits[np.arange(count), top]
        choices = np.where(value > best, start + top, choices)
        higher = np.maximum(best, value)
        sums = sums * np.exp(best - higher) + np.exp(logits - higher[:, None]).sum(axis=1)
        best = higher
        inside = (targets >= start) & (targets < start + len(head))
        wanted[inside] = logits[inside, targets[inside] - start]
    return Scores(np.log(sums) + best - wanted, choices)


@dataclass(slots=True, kw_only=True)
class State:
    """What a window has between two steps of the executor."""

    chunk: ChunkState
    kept: U8 | None = None
    """Keys and values, where later layers read those of an earlier one."""


class _LayerExecutor(ReferenceExecutor):
    """The reference executor for one layer of many windows after the other."""

    def __init__(self, weights: Weights, model: Model, context: int) -> None:
        self._weights = weights
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
        """Drop the tensors of the layer that is done."""
        self._tensors.clear()

    def start(self, tokens: I64) -> State:
        """The embeddings of a window."""
        x = enter_layers(self._model, self._weights.read(EMBEDDING, tokens))
        _, added, streams = self._none
        if self._model.layer_embedding is not None:
            added = self._layer_inputs.make(self._weights.read(LAYER_EMBEDDING, tokens), x)
        if self._model.altup is not None:
            streams = self._altup.make(x)
        return State(chunk=begin_chunk(x, added, streams))

    def begin_layer(self, layer: int, state: State) -> None:
        """Attention, and what the FFN begins with."""
        self._now = state.chunk
        length = len(state.chunk.x)
        if state.kept is not None:
            self.put_context(0, 0, length, state.kept)
        self.expect(length)
        self.attend(layer, 0)
        if self._model.attention.kv_shared_layers > 0:
            state.kept = self.read_context(0, 0, length)
        self.begin_ffn(layer)

    def add_piece(self, piece: NeuronPiece, state: State) -> None:
        """Add some neurons to the FFN's sum."""
        chunk = state.chunk
        values = [chunk.v @ rows.T for rows in piece.rows]
        if piece.biases:
            values = [value + bias for value, bias in zip(values, piece.biases, strict=True)]
        if piece.experts is None:
            up = values[1] if len(values) > 1 else None
            active = activate(self._model, values[0], up, chunk.cutoffs)
        else:
            active = weigh_activations(self._model, values, chunk.routes[:, piece.experts])
        chunk.squares += np.square(active).sum(axis=1)
        chunk.y += active @ piece.down

    def end_layer(self, layer: int, state: State) -> None:
        """Add the FFN's sum to x."""
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
        """Forget all windows."""
        self._known.clear()
