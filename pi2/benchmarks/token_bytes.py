"""Bytes that a generated token must read, counted from the plan."""

from __future__ import annotations

from collections.abc import Sequence

from pi2.benchmarks.samples import TokenBytes
from pi2.plan.arithmetic.kept_sizes import count_kv_token_bytes
from pi2.plan.arithmetic.resolved import ResolvedPlan
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan_memory import KvType
from pi2.plan.weights.layout import vector_bytes
from pi2.plan.weights.tensor_names import EMBEDDING, HEAD
from pi2.store.tensors import DenseTensor, list_tensors


def count_token_bytes(
    resolved: ResolvedPlan,
    *,
    ranks: Sequence[int] | None,
    active: float | None,
    position: float,
    shared: float = 1.0,
    sequences: int | None = None,
) -> TokenBytes | None:
    """Bytes per token at a context of ``position`` tokens.

    Where several ``sequences`` generate at the same time (None: as many as the plan says), each
    token has its part of what is read for all of them; ``shared`` is the number of different
    neurons of a step, as a share of all that its tokens name.
    ``active`` is the measured share of neurons with a non-zero activation, in a mixture of those of
    the token's experts: the others need not be read, even if a predictor names them.  ``ranks`` of
    the store's predictors.  None where it is not known: in sparse decoding without a share.
    """
    plan, model = resolved.plan, resolved.model
    dense = plan.decode.predictor in ("none", "router")
    if active is None and not dense:
        return None
    shape, bundle = model.shape, resolved.bundle
    sizes = {tensor.name: _size(tensor) for tensor in list_tensors(model, ranks)}
    embedding = sizes.pop(EMBEDDING)
    row = embedding / shape.vocab
    head = embedding if model.tied_head else sizes.pop(HEAD)
    predictors = {name: sizes.pop(name) for name in list(sizes) if ".predictor_" in name}
    neurons = model.token_neurons
    part = vector_bytes(bundle.hidden, bundle.precision)
    match plan.decode.predictor:
        case "none" | "router":
            predictor, computed = 0.0, float(neurons * bundle.neuron_bytes)
        case "gate":
            assert active is not None
            # Of layers without a cutoff, beside some that have one, every neuron is computed.
            whole = sum(model.count_token_neurons(layer) for layer in resolved.whole_layers)
            predictor = float((neurons - whole) * part)
            computed = (neurons * active - whole) * 2 * part + whole * bundle.neuron_bytes
        case _:
            assert active is not None
            predictor, computed = (
                # Those of experts that rest are not asked.
                sum(predictors.values()) * neurons / (shape.layers * model.layer_neurons),
                (neurons * active * bundle.neuron_bytes),
            )
    batch = sequences or plan.decode.batch
    return TokenBytes(
        attention=sum(sizes.values()) / batch + row,
        head=head / batch,
        # Experts have predictors of their own, which are asked for one token after the other.
        predictor=predictor / (batch if model.moe is None else 1),
        neurons=computed * shared,
        kv=_count_kv(model, position, plan.kv.type),
    )


def count_dense_bytes(model: Model, *, position: float) -> TokenBytes:
    """Bytes per token of a dense engine with fp16 keys and values and the same precisions, at a
    context of ``position`` tokens; in a mixture it reads the token's experts."""
    shape = model.shape
    sizes = {tensor.name: _size(tensor) for tensor in list_tensors(model, None)}
    embedding = sizes.pop(EMBEDDING)
    head = embedding if model.tied_head else sizes.pop(HEAD)
    part = vector_bytes(model.stored_neuron_width, model.quantization.ffn)
    return TokenBytes(
        attention=sum(sizes.values()) + embedding / shape.vocab,
        head=head,
        predictor=0.0,
        neurons=model.token_neurons * 3 * part,
        kv=_count_kv(model, position, "fp16"),
    )


def _count_kv(model: Model, position: float, kind: KvType) -> float:
    shape, window = model.shape, model.attention.sliding_window
    seen = position if window is None else min(position, window)
    return shape.layers * seen * count_kv_token_bytes(model, kind)


def _size(tensor: DenseTensor) -> int:
    return tensor.rows * (tensor.row_weight_bytes + tensor.row_scale_bytes)
