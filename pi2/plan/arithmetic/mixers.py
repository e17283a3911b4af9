"""Bytes of what mixes a layer's tokens: projections of attention, or what stands in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pi2.plan.weights.cutoffs import find_cutoff_precision, list_cutoff_matrices
from pi2.plan.weights.layout import GROUP, align_bytes, matrix_bytes
from pi2.plan.weights.projections import (
    list_altup_floats,
    list_laurel_matrices,
    list_layer_embedding_matrices,
    list_layer_input_matrices,
    list_projection_vectors,
    list_projections,
    list_side_matrices,
    list_stream_matrices,
)
from pi2.plan.weights.states import describe_state, list_state_tensors
from pi2.plan.weights.tensor_names import LAYER_EMBEDDING, LAYER_PROJECTION

if TYPE_CHECKING:
    from pi2.plan.documents.model import Model


def count_projection_bytes(model: Model) -> int:
    """Bytes of the projections of all attention layers, their biases, norms and sinks."""
    precision, total = model.quantization.attention, 0
    for view, layers in model.list_views():
        matrices, vectors = list_projections(view).values(), list_projection_vectors(view).values()
        each = sum(align_bytes(matrix_bytes(rows, length, precision)) for rows, length in matrices)
        total += layers * (each + sum(align_bytes(4 * length) for length in vectors))
    return total


def count_side_bytes(model: Model) -> int:
    """Bytes of a layer's matrices beside its mixers and its neurons: of an FFN beside experts, of
    its own embedding, and of LAuReL."""
    precision = model.quantization.attention
    matrices = _list_side(model)
    return sum(align_bytes(matrix_bytes(rows, length, precision)) for rows, length in matrices)


def _list_side(model: Model) -> list[tuple[int, int]]:
    """Rows and length of these matrices."""
    own = (list_side_matrices, list_layer_input_matrices, list_laurel_matrices)
    return [size for list_some in own for size in list_some(model).values()]


def count_stream_bytes(model: Model) -> int:
    """Bytes of what several residual streams take in memory, all layers together."""
    precision, floats = model.quantization.attention, list_altup_floats(model).values()
    ends = list_stream_matrices(model).values()
    each = sum(align_bytes(4 * rows * length) for rows, length in floats)
    total = sum(align_bytes(matrix_bytes(rows, length, precision)) for rows, length in ends)
    return total + model.shape.layers * each


def count_cutoff_bytes(model: Model) -> int:
    """Bytes of what tells the cutoffs of gates, all layers together."""
    sizes, precision = list_cutoff_matrices(model).values(), find_cutoff_precision(model)
    return sum(align_bytes(matrix_bytes(rows, length, precision)) for rows, length in sizes)


def count_layer_embedding_bytes(model: Model, tokens: int) -> int:
    """Bytes that the layers' own embeddings take in memory: rows of ``tokens``, and the projection
    beside them with its norm."""
    own = model.layer_embedding
    if own is None:
        return 0
    matrices, precision = list_layer_embedding_matrices(model), model.quantization
    rows, length = matrices[LAYER_PROJECTION]
    row = matrix_bytes(1, matrices[LAYER_EMBEDDING][1], precision.embedding)
    projection = align_bytes(matrix_bytes(rows, length, precision.attention))
    return align_bytes(tokens * row) + projection + align_bytes(4 * own.stored_width)


def count_state_tensor_bytes(model: Model) -> int:
    """Bytes of the projections, the convolution and the vectors of a layer with a state."""
    shape = describe_state(model)
    size = 0
    for tensor in [] if shape is None else list_state_tensors(model, shape):
        if tensor.precision is None:
            size += align_bytes(4 * tensor.rows * tensor.length)
        else:
            size += align_bytes(matrix_bytes(tensor.rows, tensor.length, tensor.precision))
    return size


def count_mixer_bytes(model: Model) -> int:
    """Bytes of weights that a layer's attention, or what stands in its place, an FFN beside its
    experts, its own embedding, residual streams and cutoffs of gates read for a token; the mean of
    all layers."""
    shape, precision = model.shape, model.quantization.attention
    rows, length = list_layer_embedding_matrices(model).get(LAYER_PROJECTION, (0, GROUP))
    total = matrix_bytes(rows, length, precision) + count_cutoff_bytes(model)
    total += count_stream_bytes(model)
    for view, layers in model.list_views():
        matrices = list_projections(view).values()
        total += layers * sum(matrix_bytes(rows, length, precision) for rows, length in matrices)
    state = describe_state(model)
    if state is not None:
        total += len(model.states) * sum(
            matrix_bytes(tensor.rows, tensor.length, tensor.precision)
            for tensor in list_state_tensors(model, state)
            if tensor.precision is not None
        )
    return total // shape.layers + count_side_bytes(model)


def count_mixer_weights(model: Model) -> int:
    """Number of these weights, for arithmetic."""
    shape, state = model.shape, describe_state(model)
    rows, length = list_layer_embedding_matrices(model).get(LAYER_PROJECTION, (0, 0))
    total = rows * length
    own = [*list_cutoff_matrices(model).values(), *list_stream_matrices(model).values()]
    total += sum(rows * length for rows, length in own)
    for view, layers in model.list_views():
        total += layers * sum(rows * length for rows, length in list_projections(view).values())
    if state is not None:
        rows = state.rows + state.gates + state.stored_width
        inner = state.parts * state.stored_width + state.stored_rank * state.width
        inner += state.decays * state.stored_decay_rank + state.width * state.stored_gate_rank
        total += len(model.states) * (rows * shape.stored_hidden + inner)
    return total // shape.layers + sum(rows * length for rows, length in _list_side(model))


def count_state_bytes(model: Model) -> int:
    """Bytes of the state of one sequence in a layer that has one: elements of the tokens that its
    convolution reads, and its recurrent state, float32."""
    state = describe_state(model)
    return 0 if state is None else align_bytes(4 * state.kept) + align_bytes(4 * state.memory)


def count_state_traffic(model: Model) -> int:
    """Bytes of states that a layer reads and writes for a token; the mean of all layers."""
    return 2 * count_state_bytes(model) * len(model.states) // model.shape.layers
