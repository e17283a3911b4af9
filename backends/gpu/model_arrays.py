"""A whole model on a GPU: its kernels, and its arrays, which the same lines count or allocate."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi2.backends.gpu.arrays import Memory, count_matrix, count_neurons, count_partial_rows
from pi2.backends.gpu.kernels.specification import (
    AttentionKernels,
    EmbeddingKernels,
    FfnKernels,
    GpuSpec,
    NormKernels,
    ProductKernels,
    RouterKernels,
    SelectKernels,
    StateKernels,
    Target,
)
from pi2.model.blocks import find_attention, list_attention
from pi2.model.options import describe_unknown, read_options
from pi2.model.states import describe_state
from pi2.model.tensor import EMBEDDING, POSITIONS, DenseTensor, split_name
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.sizes import LOGIT_ROWS, STAGED_NEURONS, count_chunk_tokens
from pi2.plan.arithmetic.units import Need, count_qkv_rows, list_unknown_formats, name_head
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import BundleLayout, fill_groups

if TYPE_CHECKING:
    from pi2.plan.arithmetic.resolved import ResolvedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    model: Model
    layout: BundleLayout
    """Bundles with their scales in them."""
    chunk: int
    """Most tokens that are computed together."""
    sequences: int
    context: int
    kv: KvType
    predictor: PredictorMode

    @property
    def is_sparse(self) -> bool:
        """Whether steps compute some neurons apart."""
        return self.predictor != "none"

    @property
    def adds_to_stream(self) -> bool:
        return self.model.multipliers.residual == 1.0 and not self.model.norm.outputs

    @property
    def ffn_adds_to_stream(self) -> bool:
        return self.adds_to_stream and not self.model.ffn.bias

    @property
    def ffn(self) -> FfnKernels:
        return FfnKernels.of(self.layout, self.model, in_rows=self.is_sparse)

    def list_tensors(self) -> list[DenseTensor]:
        ranks = None
        if self.predictor == "low-rank" and self.model.predictor is not None:
            ranks = [self.model.predictor.rank] * self.model.shape.layers
        return list_tensors(self.model, ranks)

    @property
    def products(self) -> Mapping[str, ProductKernels]:
        """Kernels of products, by the kind of tensor; the head's is ``head``."""
        model, shape = self.model, self.model.shape
        pitch = None if shape.query == shape.stored_query else shape.stored_query
        options: dict[str, dict[str, Any]] = {
            **{key: {"adds": self.adds_to_stream} for key in ("output", "state_output")},
            "latent_key": {"blocks": shape.heads},
            "latent_value": {"blocks": shape.heads, "pitch": pitch},
            "predictor_in": {"relu": True},
            "predictor_out": {"bias": True, "blocks": model.expert_count},
        }
        tensors = {split_name(own.name)[1]: own for own in self.list_tensors()}
        tensors["head"] = tensors[name_head(model)]
        found = {}
        for kind, own in tensors.items():
            if own.packing.is_float32 or kind in (EMBEDDING, POSITIONS):
                continue
            wanted = {"bias": f"{kind}_bias" in tensors} | options.get(kind, {})
            found[kind] = ProductKernels(length=own.length, precision=own.precision, **wanted)
        return found

    @property
    def state(self) -> StateKernels | None:
        shape = describe_state(self.model)
        return None if shape is None else StateKernels(shape=shape, epsilon=self.model.norm.epsilon)

    @property
    def attention(self) -> tuple[AttentionKernels, ...]:
        """Kernels of all kinds of attention; sizes are the same."""
        blocks = [block.attention for block in self.model.blocks]
        found = [AttentionKernels.of(own, self.model, self.kv) for own in blocks if own is not None]
        return tuple(dict.fromkeys(found))

    def number_attention(self, layer: int) -> int:
        """Return which of these a layer has."""
        own = find_attention(self.model, layer)
        return self.attention.index(AttentionKernels.of(own, self.model, self.kv))

    @property
    def router(self) -> RouterKernels | None:
        moe = self.model.moe
        if moe is None:
            return None
        return RouterKernels(
            length=self.model.shape.stored_hidden,
            moe=moe.model_copy(update={"dense_layers": (), "dense_ffn": None}),
            others=self.model.expert_count - moe.experts - moe.shared_experts,
            some_dense=bool(moe.dense_layers),
        )

    def describe_kernels(self, target: Target) -> GpuSpec:
        model, shape, norm = self.model, self.model.shape, self.model.norm
        ffn = self.ffn
        return GpuSpec(
            target=target,
            ffn=ffn,
            gathered=ffn if self.is_sparse else None,
            gates=ffn if self.predictor == "gate" else None,
            select=SelectKernels(
                scored=self.predictor != "router",
                experts=ffn.experts,
                expert_neurons=shape.ffn if ffn.experts else 0,
            )
            if self.is_sparse
            else None,
            router=self.router,
            products=tuple(dict.fromkeys(self.products.values())),
            embedding=EmbeddingKernels(
                length=shape.stored_hidden,
                precision=model.quantization.embedding,
                factor=model.multipliers.embedding,
                positions=model.positions is not None,
            ),
            norm=NormKernels(
                length=shape.stored_hidden,
                width=shape.hidden,
                norm=norm,
                residual_factor=model.multipliers.residual,
                spreads=model.ffn.bias,
                experts=ffn.experts if model.ffn.bias else 0,
            ),
            attention=self.attention,
            state=self.state,
        )


_LIMITS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
COMPUTED = read_options(_LIMITS["computed"])


class ModelArrays:
    def __init__(self, memory: Memory, use: ModelUse) -> None:
        layers = range(use.model.shape.layers)
        self.partial_rows = count_partial_rows(use.chunk)
        self.logit_rows = max(use.sequences, min(use.chunk, LOGIT_ROWS))
        """Tokens whose logits are computed at once."""
        self.tensors = {
            tensor.name: memory.take(_count_tensor(tensor)) for tensor in use.list_tensors()
        }
        neurons = count_neurons(use.layout, use.model.layer_neurons)
        self.neurons = [memory.take(neurons) for _ in layers]
        before = memory.device_bytes
        self.kept = [memory.take(_count_kept(use, layer)) for layer in layers]
        self.kept_bytes = memory.device_bytes - before
        working, tables = self._count_working(use), _count_tables(use)
        self.state = memory.take({name: 4 * own for name, own in (working | tables).items()})
        """Working arrays, and tables of positions."""
        self.host = memory.take_host(
            {name: 4 * working[name] for name in ("logits", "found") if name in working}
        )
        # Tables are made in double precision.
        memory.host_bytes += 8 * sum(tables.values())
        stretch = min(use.model.layer_neurons, STAGED_NEURONS)
        memory.pass_on(sum(count_neurons(use.layout, stretch).values()))

    def _count_working(self, use: ModelUse) -> dict[str, int]:
        """Elements of working arrays."""
        model, shape, latent = use.model, use.model.shape, use.model.attention.latent
        chunk, steps, hidden = use.chunk, use.sequences, shape.stored_hidden
        neurons, rows = model.layer_neurons, self.partial_rows
        attention = _describe_any(use)
        found = {
            "x": chunk * hidden,
            "u": chunk * hidden,
            "v": chunk * hidden,
            "y": 0 if use.ffn_adds_to_stream else chunk * hidden,
            "qkv": chunk * count_qkv_rows(model),
            "mixed": chunk * shape.stored_query,
            "span_sums": rows * shape.heads * attention.value_width,
            "span_tops": 2 * rows * shape.heads,
            "activations": chunk * neurons,
            "partials": rows * hidden,
            "logits": self.logit_rows * shape.vocab,
            "ids": chunk,
            "places": 2 * chunk,
        }
        if use.state is not None:
            mixer = use.state.shape
            found |= {
                "projected": chunk * mixer.rows,
                "state_gates": chunk * mixer.gates,
                "mixed_state": chunk * mixer.stored_width,
            }
            if mixer.kind != "convolution":
                found |= {"convolved": chunk * mixer.channels, "recurred": chunk * mixer.width}
        if latent is not None:
            vectors = chunk * shape.heads
            found |= {
                "plain": vectors * fill_groups(latent.plain),
                "turned": vectors * latent.rotated,
                "absorbed": vectors * latent.rank,
                "mixed_latent": chunk * attention.width,
            }
            if latent.query_rank is not None:
                found["made"] = chunk * fill_groups(latent.query_rank)
                found["queries"] = vectors * latent.key
        if use.router is not None:
            found["route_scores"] = chunk * use.router.rows
            found["routes"] = chunk * model.expert_count
        if use.predictor == "low-rank" and model.predictor is not None:
            found["inner"] = steps * model.expert_count * model.predictor.rank
        if use.is_sparse:
            found["slots"] = steps * neurons
            found["found"] = steps * shape.layers
            found["scores"] = 0 if use.predictor == "router" else steps * neurons
        if use.is_sparse and model.moe is not None:
            found |= {f"order_{layer}": neurons for layer in range(shape.layers)}
        if model.norm.bias and model.norm.outputs:
            found["zeros"] = hidden
        return found


def _count_tables(use: ModelUse) -> dict[str, int]:
    """Elements of what positions are multiplied with."""
    ropes = range(1 if use.model.other_rope is None else 2)
    size = use.context * (list_attention(use.model)[0][0].turned_width // 2)
    found = {f"{name}_{number}": size for name in ("cosines", "sines") for number in ropes}
    return found | ({"growth": use.context} if use.model.attention.growth else {})


def _describe_any(use: ModelUse) -> AttentionKernels:
    """Return kernels of attention, whose sizes all have."""
    return AttentionKernels.of(list_attention(use.model)[0][0], use.model, use.kv)


def _count_tensor(tensor: DenseTensor) -> Mapping[str, int]:
    """Bytes of a tensor's arrays on the device, by the names of kernels' parameters."""
    if tensor.packing.is_float32:
        return {"values": 4 * tensor.rows * tensor.length}
    if not lies_in_tiles(tensor):
        return {"values": tensor.rows * tensor.row_weight_bytes}
    return count_matrix(tensor.rows, tensor.length, tensor.precision)


def lies_in_tiles(tensor: DenseTensor) -> bool:
    """Whether it is multiplied with inputs, or looked up in tiles."""
    return tensor.name != POSITIONS


def _count_kept(use: ModelUse, layer: int) -> Mapping[str, int]:
    """Bytes of a layer's KV cache and its scales, or of its state."""
    if use.state is not None and layer in use.model.state_layers:
        shape = use.state.shape
        sizes = {"tails": shape.kept, "memory": shape.memory}
        return {name: 4 * use.sequences * size for name, size in sizes.items()}
    attention = _describe_any(use)
    vectors = use.sequences * attention.kv_heads * use.context
    names = ("keys", "values") if attention.latent is None else ("keys",)
    found = dict.fromkeys(names, 4 * vectors * attention.row_words)
    if use.kv == "int8":
        found |= {f"{name}_scales": 4 * vectors for name in names}
    return found


def describe_use(resolved: ResolvedPlan) -> ModelUse:
    plan, bundle = resolved.plan, resolved.bundle
    return ModelUse(
        model=resolved.model,
        layout=bundle.inline if bundle.scales == "resident" else bundle,
        chunk=count_chunk_tokens(plan),
        sequences=plan.decode.batch,
        context=plan.kv.context,
        kv=plan.kv.type,
        predictor=plan.decode.predictor,
    )


def need_whole_memory(resolved: ResolvedPlan) -> Need:
    """Bytes of all weights, KV cache, working memory, and pieces on their way."""
    memory = Memory()
    kept = ModelArrays(memory, describe_use(resolved)).kept_bytes
    return Need(
        memory.bytes,
        f"the whole model with its keys, values and states ({approximate_bytes(kept)}), and pieces "
        "of weights on their way to it",
    )


def find_alone_limits(resolved: ResolvedPlan) -> list[str]:
    """Parts of a model that the backend cannot compute, each as the end of a sentence."""
    plan, model = resolved.plan, resolved.model
    limits = []
    if resolved.dense_units:
        limits.append(
            f"takes only whole models, without another unit such as `{resolved.dense_units[0]}`"
        )
    if plan.decode.predictor == "gate" and model.is_smooth:
        limits.append("knows no thresholds of smooth activations")
    if plan.memory.embedding == "flash" and not model.tied_head:
        limits.append("keeps the embedding in its memory: memory.embedding must not be `flash`")
    limits += list_unknown_formats(model)
    if not limits and resolved.bundle.scales == "resident":
        limits.append("takes no neurons whose scales lie apart: bundle.scales must be `inline`")
    limits += describe_unknown(model, COMPUTED, plan.kv.context, _LIMITS["apart"])
    each = 4 if plan.kv.type == "int8" else 2
    if list_attention(model)[0][0].kept[2] % each:
        limits.append(f"keeps no {plan.kv.type} heads whose width is not a multiple of {each}")
    return limits
