"""Records what the columns of a checkpoint's matrices count: mean squares of their inputs on texts.

The checkpoint computes in float32, layer by layer, as `pi2.measuring.conversion` does."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from pi2.arrays import F32, F64
from pi2.backends.reference.operators import weigh_activations
from pi2.backends.reference.states import ChunkState
from pi2.diagnostics import UserError
from pi2.importing.checkpoint import Checkpoint
from pi2.importing.imatrix import Importance
from pi2.importing.quantize import find_names, name_matrix
from pi2.measuring.conversion import (
    CheckpointWeights,
    LayerExecutor,
    NeuronPiece,
    State,
    run_layers,
)
from pi2.measuring.texts import cut_texts, cut_windows, read_texts
from pi2.model.blocks import Attention
from pi2.model.ffn import find_neurons
from pi2.model.tensor import Place, fill_name
from pi2.plan.documents.model import Model
from pi2.progress import Progress, ignore_progress
from pi2.sandbox.tokenizer import TokenizerRefused, open_tokenizer

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
