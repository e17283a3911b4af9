"""What a whole model on a GPU is to do: its kernels, and the bytes that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from pi2.backends.gpu.sizes import (
    PACKING_COPIES,
    TILE,
    count_experts,
    count_tile_bytes,
    describe_model_ffn,
)
from pi2.model.blocks import list_attention
from pi2.model.options import describe_unknown, read_options
from pi2.model.states import describe_state
from pi2.model.tensor import EMBEDDING, POSITIONS, DenseTensor, split_name
from pi2.model.tensors import list_tensors
from pi2.plan.arithmetic.sizes import LOGIT_ROWS, STAGED_NEURONS, count_chunk_tokens
from pi2.plan.arithmetic.units import Need, count_qkv_rows, list_unknown_formats, name_head
from pi2.plan.documents.model import Model
from pi2.plan.documents.plan import KvType, PredictorMode
from pi2.plan.documents.quantities import approximate_bytes
from pi2.plan.weights.layout import BundleLayout, fill_groups, round_up

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
        found = describe_model_ffn(self.layout, self.model)
        return dataclasses.replace(found, in_rows=self.is_sparse)

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
    def attention(self) -> AttentionKernels:
        shape, attention = self.model.shape, self.model.attention
        latent = attention.latent
        _, kv_heads, size = list_attention(self.model)[0][0].kept
        attended = [block.attention for block in self.model.blocks if block.attention is not None]
        windows = {own.window for own in attended}
        return AttentionKernels(
            heads=shape.heads,
            kv_heads=kv_heads,
            head_dim=size,
            scale=attention.scale or 1 / math.sqrt(latent.key if latent else shape.head_dim),
            kv=self.kv,
            head_norm=attention.head_norm,
            some_plain=attention.head_norm_layers is not None,
            norm_after=attention.head_norm_place == "after",
            growth=attention.growth > 0,
            epsilon=self.model.norm.epsilon,
            score_cap=attention.softcap,
            window=max((window for window in windows if window is not None), default=None),
            chunked=attention.window_kind == "chunked",
            some_full=None in windows,
            sinks=attention.sinks,
            output_gate=attention.output_gate,
            latent=latent,
        )

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
        ffn, experts = self.ffn, count_experts(model)
        return GpuSpec(
            target=target,
            ffn=ffn,
            gathered=ffn if self.is_sparse else None,
            gates=ffn if self.predictor == "gate" else None,
            select=SelectKernels(
                scored=self.predictor != "router",
                experts=experts,
                expert_neurons=shape.ffn if experts else 0,
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
                experts=experts if model.ffn.bias else 0,
            ),
            attention=self.attention,
            state=self.state,
        )


PARTIAL_ROWS = 64
"""Sums of parts, of a token each, that there is room for, at least."""
JOINED = {
    "query_norm": ("head_norms", 0),
    "key_norm": ("head_norms", 1),
    "router": ("router", 0),
    "shared_router": ("router", 1),
}
"""Tensors that share an array of their layer, and the part of each."""
_VECTOR_BYTES = 16
"""Arrays are whole vectors."""
COMPUTED = read_options("""
    norm: kind=layernorm bias outputs
    positions: . offset
    attention: qkv_bias output_bias head_norm head_norm_weights head_norm_layers
    attention: head_norm_place=after value_width output_gate output_gate_of=head sinks
    attention: sink_layers growth growth_interval growth_offset growth_layers latent scale
    attention: softcap sliding_window window_kind=chunked window_layers
    recurrence: . kernel convolution_bias projection_bias decay_rank decay_floor gate_rank
    recurrence: norm_groups shortest_step longest_step
    convolution: . kernel bias
    : residual=parallel logit_softcap head_bias other_rope
    ffn: activation=relu activation=drelu activation=fatrelu activation=relu2 activation=silu
    ffn: activation=gelu activation=gelu_tanh threshold gated bias slope limit up_offset
    moe: . router=sigmoid router_input=layer weighs=input normalise_weights shared_experts
    moe: shared_gate shared_ffn router_bias choice_bias groups active_groups group_score=best
    moe: scaling dense_layers dense_ffn
    multipliers: embedding residual logits
    rope: kind=linear kind=llama3 kind=yarn kind=longrope kind=none pairs=swapped
    rope: pairs=neighbours
    layers: kinds=delta kinds=mamba kinds=convolution
    attention.latent: query_rank bias
""")
"""Options of models that there are kernels for."""
APART = (("attention.growth", "attention.latent"), ("attention.output_gate", "attention.latent"))
"""Options that do not go together."""


def list_tensor_arrays(tensor: DenseTensor) -> dict[str, int]:
    """Bytes of a tensor's arrays on the device, by the names of kernels' parameters."""
    if tensor.packing.is_float32:
        return {"values": _round(4 * tensor.rows * tensor.length)}
    in_tiles = lies_in_tiles(tensor)
    rows = round_up(tensor.rows, TILE) if in_tiles else tensor.rows
    weights = _round(rows * tensor.row_weight_bytes)
    if not in_tiles:
        return {"values": weights}
    found = {"matrix_weights": weights, "matrix_scales": _round(rows * tensor.row_scale_bytes)}
    return {name: size for name, size in found.items() if size}


def lies_in_tiles(tensor: DenseTensor) -> bool:
    """Whether it is multiplied with inputs, or looked up in tiles."""
    return tensor.name != POSITIONS


def list_neurons(use: ModelUse) -> dict[str, int]:
    """Bytes of the arrays of a layer's neurons, by the names of kernels' parameters."""
    tiles = -(-use.model.layer_neurons // TILE)
    return {name: tiles * size for name, size in count_tile_bytes(use.layout).items()}


def list_kept(use: ModelUse, layer: int) -> dict[str, int]:
    """Bytes of a layer's KV cache and its scales, or of its state."""
    if use.state is not None and layer in use.model.state_layers:
        shape = use.state.shape
        sizes = {"tails": shape.kept, "memory": shape.memory}
        return {name: _round(4 * use.sequences * size) for name, size in sizes.items() if size}
    attention = use.attention
    vectors = use.sequences * attention.kv_heads * use.context
    names = ("keys", "values") if attention.latent is None else ("keys",)
    found = dict.fromkeys(names, _round(4 * vectors * attention.row_words))
    if use.kv == "int8":
        found |= {f"{name}_scales": _round(4 * vectors) for name in names}
    return found


def list_state(use: ModelUse) -> dict[str, int]:
    """Bytes of working arrays, by name."""
    model, shape = use.model, use.model.shape
    chunk, steps, hidden = use.chunk, use.sequences, shape.stored_hidden
    neurons, rows = model.layer_neurons, max(PARTIAL_ROWS, use.chunk)
    floats = {
        "x": chunk * hidden,
        "u": chunk * hidden,
        "v": chunk * hidden,
        "y": 0 if use.ffn_adds_to_stream else chunk * hidden,
        "qkv": chunk * count_qkv_rows(model),
        "mixed": chunk * shape.stored_query,
        "span_sums": rows * shape.heads * use.attention.value_width,
        "span_tops": 2 * rows * shape.heads,
        "activations": chunk * neurons,
        "partials": rows * hidden,
        "logits": count_logit_rows(use) * shape.vocab,
        "ids": chunk,
        "places": 2 * chunk,
    }
    latent = model.attention.latent
    if use.state is not None:
        mixer = use.state.shape
        floats |= {
            "projected": chunk * mixer.rows,
            "state_gates": chunk * mixer.gates,
            "mixed_state": chunk * mixer.stored_width,
        }
        if mixer.kind != "convolution":
            floats |= {"convolved": chunk * mixer.channels, "recurred": chunk * mixer.width}
    if latent is not None:
        vectors = chunk * shape.heads
        floats |= {
            "plain": vectors * fill_groups(latent.plain),
            "turned": vectors * latent.rotated,
            "absorbed": vectors * latent.rank,
            "mixed_latent": chunk * use.attention.width,
        }
        if latent.query_rank is not None:
            floats["made"] = chunk * fill_groups(latent.query_rank)
            floats["queries"] = vectors * latent.key
    if use.router is not None:
        floats["route_scores"] = chunk * use.router.rows
        floats["routes"] = chunk * model.expert_count
    if use.predictor == "low-rank" and model.predictor is not None:
        floats["inner"] = steps * model.expert_count * model.predictor.rank
    if use.is_sparse:
        floats["slots"] = steps * neurons
        floats["found"] = steps * shape.layers
        floats["scores"] = 0 if use.predictor == "router" else steps * neurons
    if model.attention.head_norm:
        floats |= {f"head_norms_{layer}": 2 * shape.head_dim for layer in range(shape.layers)}
    if use.attention.growth:
        floats["growth"] = use.context
        floats["no_growth"] = 0 if model.attention.growth_layers is None else use.context
    if use.is_sparse and model.moe is not None:
        floats |= {f"order_{layer}": neurons for layer in range(shape.layers)}
    if use.router is not None:
        size = use.router.rows * hidden
        floats |= {f"router_{layer}": size for layer in range(shape.layers)}
    if model.norm.bias and model.norm.outputs:
        floats["zeros"] = hidden
    for number in range(count_ropes(use)):
        size = use.context * (list_attention(model)[0][0].turned_width // 2)
        floats |= {f"cosines_{number}": size, f"sines_{number}": size}
    return {name: _round(4 * count) for name, count in floats.items() if count}


def count_ropes(use: ModelUse) -> int:
    return 1 if use.model.other_rope is None else 2


def count_logit_rows(use: ModelUse) -> int:
    """Tokens whose logits are computed at once."""
    return max(use.sequences, min(use.chunk, LOGIT_ROWS))


def list_arrays(use: ModelUse) -> Iterator[int]:
    for tensor in use.list_tensors():
        if tensor.name.rpartition(".")[2] not in JOINED:
            yield from list_tensor_arrays(tensor).values()
    for layer in range(use.model.shape.layers):
        yield from list_neurons(use).values()
        yield from list_kept(use, layer).values()
    yield from list_state(use).values()


def count_host_bytes(use: ModelUse) -> int:
    """Main memory in addition: logits, tables of positions, and pieces of weights on their way to
    the device and while they are rearranged."""
    shape = use.model.shape
    stretch = min(use.model.layer_neurons, STAGED_NEURONS)
    tiles = -(-stretch // TILE)
    moving = (PACKING_COPIES + 1) * tiles * sum(count_tile_bytes(use.layout).values())
    logits = 4 * count_logit_rows(use) * shape.vocab
    turned = list_attention(use.model)[0][0].turned_width
    ropes = 8 * count_ropes(use) * use.context * turned
    growth = 8 * use.context if use.attention.growth else 0
    return logits + ropes + growth + moving


def _round(size: int) -> int:
    return round_up(size, _VECTOR_BYTES)


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
    use = describe_use(resolved)
    total = sum(list_arrays(use))
    layers = range(use.model.shape.layers)
    kept = sum(size for layer in layers for size in list_kept(use, layer).values())
    return Need(
        total + count_host_bytes(use),
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
    limits += describe_unknown(model, COMPUTED, plan.kv.context, APART)
    each = 4 if plan.kv.type == "int8" else 2
    if list_attention(model)[0][0].kept[2] % each:
        limits.append(f"keeps no {plan.kv.type} heads whose width is not a multiple of {each}")
    return limits
