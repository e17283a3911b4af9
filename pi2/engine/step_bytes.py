"""Bytes that steps touch: counted, so that steps can be compared whatever else the machine does."""

from __future__ import annotations

from pi2.engine.forward import Forward
from pi2.engine.parts import Parts
from pi2.engine.payback import Touched
from pi2.engine.whole_forward import WholeForward
from pi2.plan.arithmetic.kept_sizes import count_kv_token_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.weights.layout import vector_bytes
from pi2.plan.weights.tensor_names import EMBEDDING
from pi2.store.tensors import list_tensors


class StepBytes:
    """Counts what the steps of a model that is computed layer by layer touch.

    Every step reads the dense weights and predictors once, neurons that any of its tokens uses
    once, and keys and values for each token; what comes from flash is counted there, too.
    """

    def __init__(self, parts: Parts, forward: Forward) -> None:
        self._forward = forward
        self._counters = parts.feed_forward.counters
        self._reader = parts.reader
        self._neuron_bytes = parts.resolved.bundle.neuron_bytes
        self._dense_bytes = count_dense_bytes(parts.resolved)
        model, kind = parts.resolved.model, parts.resolved.plan.kv.type
        self._context_bytes = model.shape.layers * count_kv_token_bytes(model, kind)

    def count(self) -> Touched:
        """Bytes of all steps so far; also of prompts, what was read from flash."""
        forward = self._forward
        memory = forward.steps * self._dense_bytes
        memory += forward.attended_tokens * self._context_bytes
        memory += self._counters.touched * self._neuron_bytes
        return Touched(memory, self._reader.read_bytes)


class FileStepBytes:
    """The same of a GGUF file that is run as it is: a step reads every matrix once."""

    def __init__(self, parts: Parts, forward: WholeForward) -> None:
        assert parts.resolved.file is not None
        self._forward = forward
        self._reader = parts.reader
        self._weight_bytes = parts.resolved.file.matrix_bytes
        model = parts.resolved.model
        self._context_bytes = model.shape.layers * count_kv_token_bytes(model, "fp16")

    def count(self) -> Touched:
        """Bytes of all steps so far; also of prompts, what was read."""
        memory = self._forward.steps * self._weight_bytes
        memory += self._forward.attended_tokens * self._context_bytes
        return Touched(memory, self._reader.read_bytes)


def count_dense_bytes(resolved: ResolvedPlan) -> int:
    """Bytes of what every step reads whatever its tokens are: all but neurons and the embedding."""
    model = resolved.model
    predictor = model.predictor if resolved.plan.decode.predictor == "low-rank" else None
    ranks = None if predictor is None else [predictor.rank] * model.shape.layers
    total = sum(
        tensor.rows * (tensor.row_weight_bytes + tensor.row_scale_bytes)
        for tensor in list_tensors(model, ranks)
        if tensor.name != EMBEDDING or model.tied_head
    )
    if resolved.plan.decode.predictor == "gate":
        row = vector_bytes(resolved.bundle.hidden, resolved.bundle.precision)
        total += len(resolved.named_layers) * model.layer_neurons * row
    return total
